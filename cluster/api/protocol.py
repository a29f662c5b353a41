"""Requests of the OpenAI API as Quire takes them (its extensions are vLLM's).

Types are checked here and strictly ("16" is not 16); ranges by `SamplingParams`. A field that is absent or null takes
the default of the model's authors, where they advise one, else OpenAI's.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300

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


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("quire", message)


def _check_length(value: list[Any] | dict[Any, Any], limit: int) -> None:
    if len(value) > limit:
        raise PydanticCustomError("too_many", f"must hold at most {limit} entries, got {len(value)}")


def _at_most(limit: int) -> BeforeValidator:
    """Checks the length of a list before pydantic looks at its entries."""

    def check(value: object) -> object:
        if isinstance(value, list):
            _check_length(value, limit)
        return value

    return BeforeValidator(check)


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bias_by_token_id(value: object) -> object:
    """JSON's keys are strings: {"50256": -100}."""
    if not isinstance(value, dict):
        raise _wrong("must be an object from token ids to numbers")
    _check_length(value, MAX_LOGIT_BIAS)
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() for key in value):
        raise _wrong("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


def _joined_text(value: object) -> object:
    """Content as one text: a string, or a list of text parts (joined by newlines)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or a list of text parts")
    _check_length(value, MAX_CONTENT_PARTS)
    texts = []
    for part in value:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            raise _wrong(f"parts of type {part['type'][:40]!r} are not supported yet, only 'text' is")
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)):
            raise _wrong("every part must be an object {type: 'text', text: a string}")
        texts.append(part["text"])
    return "\n".join(texts)


def _no_value_yet(value: object) -> object:
    if value not in (None, []):
        raise _wrong("is not supported yet")
    return None


# What clients send back from an earlier answer, where it held nothing.
NotYet = Annotated[None, BeforeValidator(_no_value_yet)]


class StrictModel(BaseModel):
    """Refuses wrong types and unknown fields. pydantic makes a record of every mistake that it finds,
    so everything that repeats has a bound: a large body must not hold a million of them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: object) -> object:
        """With more fields than there are, the first so many hold an unknown one: they are enough to be refused."""
        if isinstance(data, dict) and len(data) > len(cls.model_fields):
            return dict(islice(data.items(), len(cls.model_fields) + 1))
        return data


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
    stop: Annotated[list[str], _at_most(MAX_STOP_STRINGS), BeforeValidator(_stop_list)] | None = None
    stop_token_ids: Annotated[list[int], _at_most(MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: a text, token ids, or a list of either (the answers come in its order)."""

    prompt: Any
    logprobs: int | None = None
    echo: bool = False

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves after the longest prompt. Raises `InvalidRequestError`.

        The default is not cut to the room here: shorter prompts have more.
        """
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo: together with logprobs is not supported yet.", "echo", "unsupported")
        default = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        return self._sampling_params(self._checked("max_tokens", room) or default, self.logprobs, defaults)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises `InvalidRequestError`."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_ids(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
            raise InvalidRequestError(
                "prompt: must be a string, a list of token ids, or a list of either, and none of them empty.", "prompt"
            )
        if not prompt or not all(prompt):
            raise InvalidRequestError("prompt: must not be empty.", "prompt")
        return prompt


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


class ChatMessage(StrictModel):
    """One message. Tool calls come later; what clients echo of an answer without any is accepted."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_joined_text)] = None
    name: str | None = None
    refusal: NotYet = None
    audio: NotYet = None
    annotations: NotYet = None
    function_call: NotYet = None
    tool_calls: NotYet = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), _at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def sampling_params(self, defaults: dict[str, float], room: int) -> SamplingParams:
        """`room`: tokens that the context leaves. Raises `InvalidRequestError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs: is allowed only when logprobs is true.", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs: must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}.", "top_logprobs"
            )
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(self._checked(field, room) or room, logprobs, defaults)

    def template_messages(self) -> list[dict[str, str]]:
        """Messages as chat templates read them. Raises `InvalidRequestError`."""
        if not self.messages:
            raise InvalidRequestError("messages: must hold at least one message.", "messages")
        return [self._template_message(i, message) for i, message in enumerate(self.messages)]

    @staticmethod
    def _template_message(i: int, message: ChatMessage) -> dict[str, str]:
        if message.content is None:
            raise InvalidRequestError(f"messages[{i}].content: is required.", f"messages[{i}].content")
        # OpenAI renamed the role; templates know the old name.
        rendered = {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        return rendered if message.name is None else {**rendered, "name": message.name}
