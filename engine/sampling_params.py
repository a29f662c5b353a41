"""What a user may ask of the sampler and of the end of an answer, validated once, at construction."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import InvalidRequestError
from .grammar.request_fields import StructuredOutputsParams, as_structured_outputs

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond, float32 logits overflow
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of one stop string: the end of an answer is compared with it at every token
_BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping parameters of one request (names and meaning as in OpenAI's and vLLM's APIs).

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `logprobs` N returns the N likeliest tokens and the
    sampled one, of the raw distribution (before temperature and filters); 0 returns the sampled one only.
    `prompt_logprobs` N returns the same for every token of the prompt but the first. `max_tokens` None runs to the end
    of the context; 0 computes the prompt and nothing more. `spaces_between_special_tokens` False joins those that are
    shown, where the tokenizer's decoder would put spaces between them.

    `allowed_token_ids` are the only tokens that may be sampled. `bad_words` are never completed: the last token of one
    is forbidden where the answer ends with the others. Engines know tokens only, so `InputProcessor` turns them into
    `bad_words_token_ids`. Where allowed tokens are left by neither them nor `min_tokens`, these two give way.
    `structured_outputs` is what the answer must look like; on its way to an engine it becomes the grammar of the
    request. Raises `InvalidRequestError`, naming the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        force(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        force(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        force(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            force(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if type(self.top_k) is int and self.top_k == -1:
            force(self, "top_k", 0)

        outputs = self.structured_outputs
        if isinstance(outputs, dict):
            force(self, "structured_outputs", as_structured_outputs(outputs))
        elif outputs is not None and not isinstance(outputs, StructuredOutputsParams):
            message = f"structured_outputs: must be StructuredOutputsParams, got {type(outputs).__name__}."
            raise InvalidRequestError(message, "structured_outputs")
        _check_int("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, MAX_TOP_K)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        for field in _BOOLEANS:
            if not isinstance(getattr(self, field), bool):
                raise InvalidRequestError(f"{field}: must be true or false, got {getattr(self, field)!r}.", field)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids: must hold at least one token id.", "allowed_token_ids")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        bias_by_id = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias_by_id, dict):
            raise InvalidRequestError(f"logit_bias: must map token ids to numbers, got {bias_by_id!r}.", "logit_bias")
        _check_length("logit_bias", len(bias_by_id), MAX_LOGIT_BIAS)
        for token_id, bias in bias_by_id.items():
            _check_int("logit_bias", token_id, 0, None)
            _check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _as_tuple(field: str, values: object) -> tuple[Any, ...]:
    """A list or tuple as a tuple, None as an empty one. A set has no order, and is refused like anything else."""
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise InvalidRequestError(f"{field}: must be a list, got {values!r}.", field)
    return tuple(values)


def _check_token_ids(field: str, token_ids: tuple[int, ...], most: int) -> None:
    _check_length(field, len(token_ids), most)
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        for token_id in token_ids:
            _check_int(field, token_id, 0, None)


def _check_strings(field: str, texts: tuple[str, ...], most: int, most_chars: int) -> None:
    _check_length(field, len(texts), most)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"{field}: must be non-empty strings, got {text!r}.", field)
        if len(text) > most_chars:
            message = f"{field}: a string of {len(text)} characters given, at most {most_chars} are allowed."
            raise InvalidRequestError(message, field)


def _check_length(field: str, given: int, most: int) -> None:
    if given > most:
        raise InvalidRequestError(f"{field}: {given} entries given, at most {most} are allowed.", field)


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidRequestError(f"{field}: must be {allowed}, got {value!r}.", field)


def _check_float(field: str, value: object, low: float, high: float | None, *, open_low: bool = False) -> None:
    above = f"> {low:g}" if open_low else f">= {low:g}"
    allowed = f"a number {above}" if high is None else f"a number {above} and <= {high:g}"
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if good:
        assert isinstance(value, int | float)
        good = (value > low if open_low else value >= low) and (high is None or value <= high)
    if not good:
        raise InvalidRequestError(f"{field}: must be {allowed}, got {value!r}.", field)
