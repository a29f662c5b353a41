"""The fields that every endpoint which generates has in common."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import BeforeValidator

from quire.engine.beam_search import MAX_BEAMS, BeamSearchParams
from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import RequestOptions
from quire.engine.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams

from .fields import StrictModel, at_most, check_length, wrong
from .scheduling import ScheduledRequest
from .structured import ResponseFormat, StructuredOutputs, grammar_of

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
TO_THE_CONTEXT = -1  # as `truncate_prompt_tokens`: as many as the context holds besides the answer

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
        "user",
        "prompt_cache_key",
        "seed",  # nothing is drawn
    ]
)

# Values of other fields that ask for what a search does anyway, or for nothing.
_NEUTRAL_WITH_BEAM_SEARCH: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "min_tokens": (0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "response_format": (ResponseFormat(type="text"),),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False,),
}

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
    if not all(isinstance(key, str) and len(key) <= 19 and key.isascii() and key.isdigit() for key in value):
        raise wrong("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


BiasByTokenId = Annotated[dict[int, float], BeforeValidator(_bias_by_token_id)]
StopStrings = Annotated[list[str], at_most(MAX_STOP_STRINGS), BeforeValidator(_stop_list)]


class StreamOptions(StrictModel):
    """Null is false, as OpenAI's schema has it."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # the usage so far in every chunk
    include_obfuscation: bool | None = False  # padding against traffic analysis: never sent


def num_kept(truncate_prompt_tokens: int | None, max_model_len: int, max_tokens: int) -> int | None:
    """How many of a prompt's last tokens are kept; None for all. `max_tokens` is what -1 leaves for the answer.

    Raises `InvalidRequestError`.
    """
    most = truncate_prompt_tokens
    if most == TO_THE_CONTEXT:
        return max(1, max_model_len - max_tokens)
    if most is not None and not 1 <= most < max_model_len:
        limits = f"an integer from 1 to {max_model_len - 1}, or -1 for what the context holds besides the answer"
        raise InvalidRequestError(f"truncate_prompt_tokens: must be {limits}; got {most}.", "truncate_prompt_tokens")
    return most


class SampledRequest(ScheduledRequest):
    """What all endpoints that answer share, by these names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: BiasByTokenId | None = None
    bad_words: Annotated[list[str], at_most(MAX_BAD_WORDS)] | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    include_report: bool = False
    stream: bool = False


class GenerationRequest(SampledRequest):
    """What completions of texts and of chats share."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Annotated[list[int], at_most(MAX_ALLOWED_TOKEN_IDS)] | None = None
    stop_token_ids: Annotated[list[int], at_most(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Answers that are computed for each prompt."""
        return self.n or 1

    def options(self) -> RequestOptions:
        """What the scheduler is told, and what holds the answer. Raises `InvalidRequestError`."""
        grammar = grammar_of(self.response_format, self.structured_outputs)
        return msgspec.structs.replace(super().options(), grammar=grammar)

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
            neutral = (field.default, *_NEUTRAL_WITH_BEAM_SEARCH.get(name, ()))
            if name not in _WITH_BEAM_SEARCH and getattr(self, name) not in neutral:
                raise InvalidRequestError(f"{name}: does not work together with use_beam_search.", name)
        assert params.max_tokens is not None
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
        )

    def _checked(self, field: str, room: int, least: int = 1) -> int | None:
        """The most tokens that the user allows, under the name that he gave it; None when he gave none."""
        value: int | None = getattr(self, field)
        if value is not None and not least <= value <= room:
            code = "context_length_exceeded" if value > room else None
            raise InvalidRequestError(
                f"{field}: must be an integer from {least} to {room}, what the context leaves after the prompt; got "
                f"{value}.",
                field,
                code,
            )
        return value

    def _sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        defaults: dict[str, float],
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """`prompt_logprobs`: how many the endpoint needs itself. Raises `InvalidRequestError` on a value out of range,
        on options of a stream without one, and on what a stream cannot hold."""
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs: are not available when stream is true.", "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: is allowed only when stream is true.", "stream_options")
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        params = SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=self.logit_bias or None,
            prompt_logprobs=self.prompt_logprobs,
        )
        if prompt_logprobs is None or prompt_logprobs <= (params.prompt_logprobs or -1):
            return params
        return msgspec.structs.replace(params, prompt_logprobs=prompt_logprobs)
