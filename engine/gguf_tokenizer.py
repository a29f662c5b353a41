"""The tokenizer that the metadata of a GGUF file describe, as a pipeline of the `tokenizers` package.

Files name a way to cut texts (`tokenizer.ggml.pre`) where tokenizer.json has the expression itself. The expressions
here are those of the models' own tokenizer.json; transformers' conversion of GGUF files cuts all texts in one way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .gguf_file import TokenType

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_STAY_APART = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's control tokens
_SPACE = "▁"  # what SentencePiece has for a space

_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased_words(digits: str, shortened: str) -> str:
    """Words are cut before a capital letter."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{shortened}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{shortened}"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a text is cut before byte-level BPE."""

    split: str | None = None  # an expression; None: GPT-2's own
    digits_apart: bool = False
    ignore_merges: bool = False  # a word that is a token stays one, whether merges lead to it or not
    nfc: bool = False  # texts are composed first
    add_bos: bool = False  # where the file does not say


_OF_LLAMA_3 = _Cut(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_IN_THREES = _Cut(_words(r"\p{N}{1,3}"))
_ONE_BY_ONE = _Cut(_words(r"\p{N}"))
_DIGITS_APART = _Cut(digits_apart=True)

_CUTS: Mapping[str, _Cut] = {
    "default": _Cut(),
    "gpt-2": _Cut(),
    "olmo": _Cut(nfc=True),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _Cut(digits_apart=True, nfc=True),
    "llama-bpe": _OF_LLAMA_3,
    "falcon3": _OF_LLAMA_3,
    "dbrx": _IN_THREES,
    "smaug-bpe": _IN_THREES,
    "chatglm-bpe": _IN_THREES,
    "glm4": _Cut(_words(r"\p{N}{1,3}"), ignore_merges=True),
    "qwen2": _Cut(_words(r"\p{N}"), nfc=True),
    "deepseek-r1-qwen": _ONE_BY_ONE,
    "stablelm2": _ONE_BY_ONE,
    "tekken": _Cut(_cased_words(r"\p{N}", ""), ignore_merges=True, add_bos=True),
    "gpt-4o": _Cut(_cased_words(r"\p{N}{1,3}", _SHORTENED + "?")),
}


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises `ConfigError` on a kind that is not known, `KeyError` or `ValueError` where something is missing."""
    from tokenizers import AddedToken, processors

    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    typed = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    if model == "llama":
        with_prefix, add_bos = bool(metadata.get("tokenizer.ggml.add_space_prefix", True)), True
        tokenizer = _sentencepiece(tokens, metadata, with_prefix=with_prefix)
        # Where texts are changed as a whole, these are too; a prefix would be put before each of them.
        normalized = not with_prefix
    elif model == "gpt2" and pre in _CUTS:
        if "tokenizer.ggml.pre" not in metadata:
            logger.warning("%s does not say how texts are cut (tokenizer.ggml.pre): they are as for GPT-2", path)
        tokenizer, add_bos, normalized = _byte_level(tokens, metadata, _CUTS[pre]), _CUTS[pre].add_bos, False
    else:
        known = ", ".join(_CUTS)
        raise ConfigError(
            f"model: the tokenizer of {path} ({model}/{pre}) is not supported; SentencePiece (llama) is, and "
            f"byte-level BPE (gpt2) with {known}."
        )
    # Spaces behind a turn's mark are not part of Phi-3's texts. Files do not say so; llama.cpp knows it, too.
    takes_spaces = metadata.get("general.architecture") == "phi3" and model == "llama"
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=takes_spaces and token not in _STAY_APART)
            for token, kind in typed
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=normalized) for token, kind in typed if kind == TokenType.USER_DEFINED]
    )
    first = [metadata["tokenizer.ggml.bos_token_id"]] if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else []
    last = [metadata["tokenizer.ggml.eos_token_id"]] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in first), "$A", *(tokens[i] for i in last)],
            special_tokens=[(tokens[i], i) for i in {*first, *last}],
        )
    return tokenizer


def _byte_level(tokens: Sequence[str], metadata: Mapping[str, Any], cut: _Cut) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignore_merges))
    except Exception as error:  # the library's own, for merges that lead to no token, has no other type
        raise ValueError(str(error)) from error
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits_apart else []
    if cut.split is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], metadata: Mapping[str, Any], *, with_prefix: bool) -> Tokenizer:
    """SentencePiece's BPE: of neighbours whose text is a token, those of the best score become it first.

    `with_prefix`: a space is put before each text, and taken away again from the answer.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if with_prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if with_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of tokens whose texts together are one, best scores first."""
    whole = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    ranked = sorted((-scores[i], i, token) for token, i in vocab.items() if kinds[i] not in whole)
    return [
        (token[:end], token[end:])
        for _, _, token in ranked
        for end in range(1, len(token))
        if token[:end] in vocab and token[end:] in vocab
    ]
