"""POST /v1/responses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from quire.engine.errors import InvalidRequestError

from .chat import ReasoningEffort, TemplateVariables
from .fields import StrictModel, at_most, check_length, without_nulls, wrong
from .generation import SampledRequest
from .input_items import ITEM_TYPES, Input, Messages
from .structured import FormatName, Schema
from .tools import MAX_TOOLS, FunctionName

LOGPROBS = "message.output_text.logprobs"
_THOUGHT = "reasoning.encrypted_content"  # thoughts are given as they are: nothing needs to be encrypted
_MAX_METADATA = 16

# What a field of chat completions is called here, for errors. Messages and tools are found by where they came from.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_WORDS = re.compile(rf"\b(?:{'|'.join(name for name in _NAMES if '_' in name)})\b")  # amid a message
_TOOL = re.compile(r"(tools\[\d+\])\.function(?=\.)")


class TextFormat(StrictModel):
    """What `response_format` is to chat completions, without a level in between."""

    type: Literal["text", "json_object", "json_schema"]
    name: FormatName | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    def response_format(self) -> dict[str, Any]:
        """Raises `InvalidRequestError`."""
        given = self.given()
        kind = given.pop("type")
        if kind != "json_schema":
            for field in given:
                param = f"text.format.{field}"
                raise InvalidRequestError(f"{param}: is allowed only with type 'json_schema'.", param)
            return {"type": kind}
        for field in ("name", "schema"):
            if field not in given:
                param = f"text.format.{field}"
                raise InvalidRequestError(f"{param}: is required with type 'json_schema'.", param, "missing_field")
        return {"type": kind, "json_schema": given}


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # no model served here knows another


class ReasoningOptions(StrictModel):
    """A summary is never made: the thought itself is given."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = False  # padding against traffic analysis: never sent


def _is_a_function(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise wrong(f"of type {kind[:40]!r} is not supported, 'function' is")
    return without_nulls(value)


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        function = self.given()
        return {"type": function.pop("type"), "function": function}


_CHOICES = ("none", "auto", "required")


def _choice(value: object) -> object:
    """A word, or the name of a function, as chat completions have it."""
    if isinstance(value, str) and value in _CHOICES:
        return value
    _is_a_function(value)
    if isinstance(value, dict) and value.keys() == {"type", "name"} and isinstance(value["name"], str):
        return {"type": "function", "function": {"name": value["name"]}}
    raise wrong("must be 'none', 'auto', 'required' or {type: 'function', name: ...}")


_NAMED = {"type": {"const": "function"}, "name": {"type": "string"}}
_CHOICE = {
    "anyOf": [
        {"enum": [*_CHOICES]},
        {"type": "object", "properties": _NAMED, "required": [*_NAMED], "additionalProperties": False},
    ]
}


def _includable(value: object) -> object:
    if not isinstance(value, list):
        raise wrong("must be a list")
    for name in value[:8]:
        if name not in (LOGPROBS, _THOUGHT):
            raise wrong(f"must have nothing but {LOGPROBS!r} and {_THOUGHT!r}")
    check_length(value, 8)
    return value


def _labels(value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(label, str) for label in value.values()):
        raise wrong("must be an object of strings")
    check_length(value, _MAX_METADATA)
    return value


class ResponsesRequest(SampledRequest):
    """POST /v1/responses."""

    TYPES_OF_ENTRIES: ClassVar[dict[str, tuple[str, ...]]] = {"input": ITEM_TYPES}

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Annotated[FunctionTool, BeforeValidator(_is_a_function)]] | None, at_most(MAX_TOOLS)] = None
    tool_choice: Annotated[str | dict[str, Any], BeforeValidator(_choice), WithJsonSchema(_CHOICE)] | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None  # of tools that the service itself runs: there are none
    include: Annotated[list[str], BeforeValidator(_includable)] | None = None
    top_logprobs: int | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_labels)] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def chat_fields(self) -> tuple[dict[str, Any], FieldNames]:
        """What makes a chat completion of it, to be validated, and how errors about that are to be told. Raises
        `InvalidRequestError`."""
        told = LOGPROBS in (self.include or ())
        if self.top_logprobs and not told:
            raise InvalidRequestError(f"top_logprobs: is allowed only when include has {LOGPROBS!r}.", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: is allowed only when stream is true.", "stream_options")
        messages = Messages(self.instructions, self.input)
        text_format = None if self.text is None else self.text.format
        fields = {
            "model": self.model,
            "messages": messages.messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": None if text_format is None else text_format.response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "tools": None if self.tools is None else [tool.tool() for tool in self.tools],
            "tool_choice": self.tool_choice,
            "logprobs": told,
            "top_logprobs": self.top_logprobs,
        }
        return fields, FieldNames(messages.origins)

    def shared_fields(self) -> dict[str, Any]:
        """Those that are the same in a chat completion, as they were validated here."""
        return {name: getattr(self, name) for name in _SHARED}


_SHARED = (*SampledRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs")


class FieldNames:
    """What the fields of a chat completion are called in the request for a response that it was made of."""

    def __init__(self, origins: dict[str, str]) -> None:
        self._origins = origins  # of messages and their calls

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Errors are raised in the words of the request."""
        try:
            yield
        except InvalidRequestError as error:
            renamed = self.renamed(error)
            if renamed is error:
                raise
            raise renamed from error

    def renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        param, message = error.param, error.message
        name = None if param is None else self._name(param)
        if name != param and message.startswith(f"{param}:"):
            message = f"{name}{message.removeprefix(str(param))}"
        message = _WORDS.sub(lambda found: _NAMES[found[0]], message)
        same = name == param and message == error.message
        return error if same else InvalidRequestError(message, name, error.code)

    def _name(self, param: str) -> str:
        path = param.split(".")
        for length in range(len(path), 0, -1):  # the call of a message before the message
            origin = self._origins.get(".".join(path[:length]))
            if origin is not None:
                return ".".join([origin, *(part for part in path[length:] if part not in ("function", "tool_calls"))])
        first, *rest = path
        return _TOOL.sub(r"\1", ".".join([_NAMES.get(first, first), *rest]))
