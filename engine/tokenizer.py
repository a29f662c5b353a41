"""Builds the tokenizer of a model: from its Hugging Face files, or from a GGUF file's metadata."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .gguf_file import read_gguf
from .model_source import ModelInfo

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# What llama.cpp calls `tokenizer.ggml.pre`: how a text is cut before the byte level. None: GPT-2's own expression.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, str | None] = {"default": None, "gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3_SPLIT}
_DIGITS_APART = ("smollm",)


def load_tokenizer(info: ModelInfo) -> PreTrainedTokenizerFast:
    """The tokenizer of a model, with its chat template where it has one. Does not import torch.

    Raises `ConfigError` when the model has no tokenizer, one of a kind that is not supported, or another model's.
    """
    tokenizer = _from_gguf(info) if info.format == "gguf" else _from_directory(info)
    _check_vocabulary(info, tokenizer)
    return tokenizer


def _check_vocabulary(info: ModelInfo, tokenizer: PreTrainedTokenizerFast) -> None:
    """Special tokens beyond the embedding are only told: some checkpoints of text models know one for images."""
    backend = tokenizer.backend_tokenizer
    largest = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= info.vocab_size:
        raise ConfigError(
            f"model: the tokenizer of {info.path} does not fit the model: it has token ids up to {largest}, the "
            f"embedding has rows 0 to {info.vocab_size - 1}."
        )
    beyond = sorted(id_ for id_ in backend.get_added_tokens_decoder() if id_ >= info.vocab_size)
    if beyond:
        logger.warning("%s: special tokens %s have no row in the embedding of %d", info.name, beyond, info.vocab_size)


def _from_directory(info: ModelInfo) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (info.path / "tokenizer.json").is_file():
            # As it stands in the file: some of transformers' classes rebuild parts of it from their own defaults.
            fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(info.path)
            return fast
        tokenizer = AutoTokenizer.from_pretrained(info.path)
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(f"model: the tokenizer of {info.path} cannot be loaded ({first_line}).") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"model: the tokenizer of {info.path} has no fast form (tokenizer.json).")
    return tokenizer


def _from_gguf(info: ModelInfo) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    metadata = read_gguf(info.path).metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    try:
        backend = _byte_level_bpe(info, metadata, tokens)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"model: {info.path} holds no complete tokenizer ({error}).") from error
    names = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if metadata.get(f"tokenizer.ggml.{key}_token_id", len(tokens)) < len(tokens)
    }
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=info.hf_config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **names,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level_bpe(info: ModelInfo, metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """A `tokenizers` pipeline from GGUF metadata.

    transformers' own conversion drops the step that cuts digits apart, so that numbers are not those the model learnt.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise ConfigError(
            f"model: the tokenizer of {info.path} ({model}/{pre}) is not supported; byte-level BPE with {known} is."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"
    )
    tokenizer = Tokenizer(bpe)
    split = _SPLITS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS_APART else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in typed if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token) for token, kind in typed if kind == _USER_DEFINED])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer
