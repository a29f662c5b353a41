"""The fields that every endpoint which generates has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import RequestOptions
from quire.engine.sampling_params import MAX_STOP_STRINGS, SamplingParams

from .fields import StrictModel, at_most, check_length, wrong

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_PRIORITY = 1_000_000
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_SALT_CHARS = 256

# Fields that mean the same in a request and in `SamplingParams`.
_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bias_by_token_id(value: object) -> object:
    """JSON's keys are strings: {"50256": -100}."""
    if not isinstance(value, dict):
        raise wrong("must be an object from token ids to numbers")
    check_length(value, MAX_LOGIT_BIAS)
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        raise wrong("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: never sent


class GenerationRequest(StrictModel):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias_by_token_id)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], at_most(MAX_STOP_STRINGS), BeforeValidator(_stop_list)] | None = None
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    include_report: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> RequestOptions:
        """What the scheduler is told. Raises `InvalidRequestError`."""
        priority = 0 if self.priority is None else self.priority
        if abs(priority) > MAX_PRIORITY:
            limits = f"from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise InvalidRequestError(f"priority: must be an integer {limits}, got {priority}.", "priority")
        if self.deadline_ms is not None and not 1 <= self.deadline_ms <= MAX_DEADLINE_MS:
            limits = f"from 1 to {MAX_DEADLINE_MS}"
            raise InvalidRequestError(
                f"deadline_ms: must be an integer {limits}, got {self.deadline_ms}.", "deadline_ms"
            )
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt: must have 1 to {MAX_SALT_CHARS} characters, got {len(self.cache_salt)}.", "cache_salt"
            )
        return RequestOptions(priority=priority, deadline_ms=self.deadline_ms, cache_salt=self.cache_salt)

    def _checked(self, field: str, room: int) -> int | None:
        """The most tokens that the user allows, under the name that he gave it; None when he gave none."""
        value: int | None = getattr(self, field)
        if value is not None and not 1 <= value <= room:
            code = "context_length_exceeded" if value > room else None
            raise InvalidRequestError(
                f"{field}: must be an integer from 1 to {room}, what the context leaves after the prompt; got {value}.",
                field,
                code,
            )
        return value

    def _sampling_params(
        self, max_tokens: int | None, logprobs: int | None, defaults: dict[str, float]
    ) -> SamplingParams:
        """Raises `InvalidRequestError` on a value out of range, or options of a stream without one."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: is allowed only when stream is true.", "stream_options")
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **given}, max_tokens=max_tokens, logprobs=logprobs, logit_bias=self.logit_bias or None
        )
