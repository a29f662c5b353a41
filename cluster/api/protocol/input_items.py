"""The input of POST /v1/responses: items, and the messages of a conversation that they are.

What an answer consists of (a thought, a message, calls of functions) comes back as items of their own. Chat templates
want the message of one turn in one piece.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, WithJsonSchema

from .fields import StrictModel, at_most, check_length, without_nulls, wrong
from .messages import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOOL_CALLS,
    NotYet,
    content_schema,
    refused,
    texts_of,
)

_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_ECHOED = {"annotations", "logprobs", "parsed"}


def _texts(value: object) -> object:
    if value is None:
        raise wrong("must be a string or a list of text parts")
    return texts_of(value, _PARTS, _ECHOED)


_CONTENT = {"anyOf": content_schema(_PARTS, _ECHOED)}
Content = Annotated[str | list[str], BeforeValidator(_texts), WithJsonSchema(_CONTENT)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(StrictModel):
    """`id`, `status` and `phase` are left over from an answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class InputCall(StrictModel):
    """A call that an earlier answer made. `parsed_arguments` are what OpenAI's SDK made of the arguments."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None


class InputCallOutput(StrictModel):
    """What the called function returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: str | None = None
    status: Status | None = None


class InputReasoningText(StrictModel):
    type: Literal["reasoning_text"]
    text: str


class InputSummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class InputReasoning(StrictModel):
    """The thought before an earlier answer: its content, or where another service gave only one, its summary."""

    type: Literal["reasoning"]
    content: Annotated[list[InputReasoningText] | None, at_most(MAX_CONTENT_PARTS)] = None
    summary: Annotated[list[InputSummaryText] | None, at_most(MAX_CONTENT_PARTS)] = None
    encrypted_content: NotYet = None
    id: str | None = None
    status: Status | None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _type_of(item: Any) -> str:
    kind: str = item["type"] if isinstance(item, dict) else item.type
    return kind


def _of_a_known_type(item: object) -> object:
    if not isinstance(item, dict):
        raise wrong("must be an object")
    kind = item.get("type")
    if kind is not None and kind not in ITEM_TYPES:
        told = f"of type {kind[:40]!r}" if isinstance(kind, str) else "of no type"
        raise wrong(f"is {told}, which is not supported: only {', '.join(map(repr, ITEM_TYPES))} are")
    return without_nulls({**item, "type": kind or "message"})


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type_of),
    BeforeValidator(_of_a_known_type),
]


def _listed(value: object) -> object:
    """A text is what a user says."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("must be a string or a list of items")
    if not value:
        raise wrong("must hold at least one item")
    check_length(value, MAX_MESSAGES)
    return value


class _OrText:
    """In the schema, that the list may be a text."""

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core) | {"minItems": 1, "maxItems": MAX_MESSAGES}]}


Input = Annotated[list[Item], FailFast(), BeforeValidator(_listed), _OrText()]


class Messages:
    """The messages that items are, as fields of chat completions, and where each came from.

    All that a model has written in a row is one message, as it was one answer: its thoughts, its texts and its calls,
    each joined, as chat completions have them. But a message behind a message is another one.
    """

    def __init__(self, instructions: str | None, items: list[Item]) -> None:
        """Raises `InvalidRequestError`."""
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}  # "messages[2].tool_calls[0]" -> "input[3]"
        self._calls: set[str] = set()
        if instructions is not None:
            self._begin({"role": "system", "content": instructions}, "instructions")
        before: Item | None = None
        for i, item in enumerate(items):
            self._add(item, before, f"input[{i}]")
            before = item

    def _add(self, item: Item, before: Item | None, where: str) -> None:
        match item:
            case InputMessage(role="assistant"):
                turn = self._turn(where, anew=isinstance(before, InputMessage))
                turn["content"] = _joined(turn.get("content"), item.content)
            case InputMessage():
                self._begin({"role": item.role, "content": _content(item.content)}, where)
            case InputReasoning():
                thought = "".join(part.text for part in item.content or item.summary or ())
                if thought:
                    turn = self._turn(where)
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            case InputCall():
                self._call(item, where)
            case InputCallOutput():
                if item.call_id not in self._calls:
                    why = f"must be that of a function_call before it, got {item.call_id[:80]!r}"
                    raise refused(f"{where}.call_id", why)
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
                self._begin(result, where)

    def _call(self, item: InputCall, where: str) -> None:
        calls = self._turn(where).setdefault("tool_calls", [])
        if len(calls) == MAX_TOOL_CALLS:
            raise refused(where, f"is one call too many: a turn may have {MAX_TOOL_CALLS}")
        self.origins[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = where
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._calls.add(item.call_id)

    def _turn(self, where: str, *, anew: bool = False) -> dict[str, Any]:
        """The message of the assistant that goes on, or a new one."""
        if anew or not self.messages or self.messages[-1]["role"] != "assistant":
            self._begin({"role": "assistant"}, where)
        return self.messages[-1]

    def _begin(self, message: dict[str, Any], where: str) -> None:
        self.origins[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)


def _content(given: str | list[str]) -> str | list[dict[str, str]]:
    """In the parts of chat completions."""
    return given if isinstance(given, str) else [{"type": "text", "text": text} for text in given]


def _joined(before: Any, given: str | list[str]) -> str | list[dict[str, str]]:
    """The content of a turn, with a text behind it."""
    if before is None:
        return _content(given)
    texts = [before] if isinstance(before, str) else [part["text"] for part in before]
    return "\n".join(texts) + ("\n".join(given) if isinstance(given, list) else given)
