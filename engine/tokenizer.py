"""Builds the tokenizer of a model: from its Hugging Face files, or from a GGUF file's metadata."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .errors import ConfigError
from .gguf_file import read_gguf
from .gguf_tokenizer import gguf_tokenizer
from .model_source import ModelInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


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
        backend = gguf_tokenizer(info.path, metadata)
        names = {
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if metadata.get(f"tokenizer.ggml.{key}_token_id", len(tokens)) < len(tokens)
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"model: {info.path} holds no complete tokenizer ({error!r}).") from error
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=info.hf_config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **names,
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer
