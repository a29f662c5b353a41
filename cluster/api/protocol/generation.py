"""The fields that every endpoint which generates has in common."""

from __future__ import annotations

import re
import uuid
from typing import Annotated

from pydantic import BeforeValidator

from quire.engine.beam_search import MAX_BEAMS, BeamSearchParams
from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import RequestOptions
from quire.engine.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams

from .fields import StrictModel, at_most, check_length, wrong
from .structured import ResponseFormat, StructuredOutputs, grammar_of

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_PRIORITY = 1_000_000
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_SALT_CHARS = 256
MAX_SESSION_CHARS = 256
TO_THE_CONTEXT = -1  # as `truncate_prompt_tokens`: as many as the context holds besides the answer
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_SHOWN_CHARS = 80

# What beam search heeds besides the fields that make the prompt. Everything else that asks for something is refused.
_WITH_BEAM_SEARCH = frozenset(
    [
        "model",
        "prompt",
        "messages",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "use_beam_search",
        "length_penalty",
        "temperature",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "return_token_ids",
        "request_id",
        "session_id",
        "priority",
        "deadline_ms",
        "cache_salt",
        "echo",
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "continue_final_message",
        "reasoning_effort",
        "include_reasoning",
    ]
)

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
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
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


def _session(label: object) -> str | None:
    """A label as what requests may have in common; None for one that cannot be meant so."""
    return label if isinstance(label, str) and 1 <= len(label) <= MAX_SESSION_CHARS else None


class StreamOptions(StrictModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # the usage so far in every chunk
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
    allowed_token_ids: Annotated[list[int], at_most(MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    stop: Annotated[list[str], at_most(MAX_STOP_STRINGS), BeforeValidator(_stop_list)] | None = None
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    request_id: str | None = None
    session_id: str | None = None
    prompt_cache_key: object | None = None  # OpenAI's names for what may serve as a session; any value is accepted
    user: object | None = None
    priority: int | None = None
    deadline_ms: int | None = None
    cache_salt: str | None = None
    include_report: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_choices(self) -> int:
        """Answers that are computed for each prompt."""
        return self.n or 1

    def ids(self, prefix: str) -> tuple[str, str]:
        """The id of the answer, and that of its first engine request, which must be unique while the user's own may
        not be. Raises `InvalidRequestError`."""
        drawn = uuid.uuid4().hex
        if self.request_id is None:
            return f"{prefix}-{drawn}", f"{prefix}-{drawn}"
        if not _REQUEST_ID.fullmatch(self.request_id):
            raise InvalidRequestError(
                "request_id: must be 1 to 128 printable ASCII characters without spaces, got "
                f"{self.request_id[:_SHOWN_CHARS]!r}.",
                "request_id",
            )
        return f"{prefix}-{self.request_id}", f"{prefix}-{self.request_id}-{drawn}"

    def truncated(self, token_ids: list[int], max_model_len: int, max_tokens: int) -> list[int]:
        """A prompt's last `truncate_prompt_tokens` tokens. `max_tokens` is what -1 leaves for the answer.

        Raises `InvalidRequestError`.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most != TO_THE_CONTEXT and not 1 <= most < max_model_len:
            limits = f"an integer from 1 to {max_model_len - 1}, or -1 for what the context holds besides the answer"
            raise InvalidRequestError(
                f"truncate_prompt_tokens: must be {limits}; got {most}.", "truncate_prompt_tokens"
            )
        if most == TO_THE_CONTEXT:
            most = max(1, max_model_len - max_tokens)
        return token_ids[-most:]

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
        if self.session_id is not None and not 1 <= len(self.session_id) <= MAX_SESSION_CHARS:
            raise InvalidRequestError(
                f"session_id: must have 1 to {MAX_SESSION_CHARS} characters, got {len(self.session_id)}.", "session_id"
            )
        return RequestOptions(
            priority=priority,
            deadline_ms=self.deadline_ms,
            cache_salt=self.cache_salt,
            session_id=self.session_id or _session(self.prompt_cache_key) or _session(self.user),
            grammar=grammar_of(self.response_format, self.structured_outputs),
        )

    def beam_search_params(self, params: SamplingParams) -> BeamSearchParams | None:
        """None unless beam search is asked for. Raises `InvalidRequestError` on what does not go with it."""
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise InvalidRequestError("length_penalty: is allowed only with use_beam_search.", "length_penalty")
            return None
        if self.temperature:
            raise InvalidRequestError(
                f"temperature: must be 0 with use_beam_search, which draws nothing; got {self.temperature}.",
                "temperature",
            )
        if params.n > MAX_BEAMS:
            raise InvalidRequestError(f"n: at most {MAX_BEAMS} are allowed with use_beam_search, got {params.n}.", "n")
        for name, field in type(self).model_fields.items():
            if name not in _WITH_BEAM_SEARCH and getattr(self, name) != field.default:
                raise InvalidRequestError(f"{name}: does not work together with use_beam_search.", name)
        assert params.max_tokens is not None
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
        )

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
