"""The messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, WithJsonSchema

from quire.engine.errors import InvalidRequestError

from .fields import StrictModel, at_most, check_length, wrong

MAX_MESSAGES = 32768  # whatever a service allows
MAX_CONTENT_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256


# Hints of clients in parts of text, for caches that wait to be told: here every prefix is cached.
_HINTS = {"cache_control", "prompt_cache_breakpoint"}


def texts_of(value: object, kinds: Mapping[str, str], echoed: AbstractSet[str] = frozenset()) -> object:
    """Content as it was given: a string, or the texts of a list of parts.

    `kinds` has the types that parts may have, with the name of the text in each; what users write comes first.
    `echoed`: fields of answers that come back, and say nothing more.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    check_length(value, MAX_CONTENT_PARTS)
    return [_text_of(part, kinds, echoed | _HINTS) for part in value]


def _text_of(part: object, kinds: Mapping[str, str], others: AbstractSet[str]) -> str:
    usual = next(iter(kinds))
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        raise wrong(f"parts of type {kind[:40]!r} are not supported yet, only {usual!r} is")
    name = kinds.get(kind, "") if isinstance(kind, str) else ""
    text = part.get(name) if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(text, str) or part.keys() - {"type", name, *others}:
        raise wrong(f"every part must be an object {{type: {usual!r}, {kinds[usual]}: a string}}")
    return text


def content_schema(kinds: Mapping[str, str], echoed: AbstractSet[str] = frozenset()) -> list[dict[str, Any]]:
    """What `texts_of` takes, null aside."""
    others: dict[str, dict[str, Any]] = {name: {} for name in sorted(echoed | _HINTS)}
    parts = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, text: {"type": "string"}, **others},
            "required": ["type", text],
            "additionalProperties": False,
        }
        for kind, text in kinds.items()
    ]
    return [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}, "maxItems": MAX_CONTENT_PARTS}]


def _no_value_yet(value: object) -> object:
    if value not in (None, [], ""):
        raise wrong("is not supported yet")
    return None


def _json_object(value: object) -> object:
    """The arguments of a call: templates read them as an object. Some clients send "" for none.

    What a model wrote need not be one, and an agent sends it back to have it repaired: templates get the text then."""
    if not isinstance(value, str):
        raise wrong("must be a string that holds a JSON object")
    try:
        arguments = msgspec.json.decode(value or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
    return arguments if isinstance(arguments, dict) else value


_PARTS = {"text": "text", "refusal": "refusal"}
_CONTENT = {"anyOf": [*content_schema(_PARTS), {"type": "null"}]}

# What clients send back from an earlier answer, where it held nothing.
NotYet = Annotated[None, BeforeValidator(_no_value_yet)]


class CalledFunctionInput(StrictModel):
    """`parsed_arguments` are what OpenAI's SDK made of the arguments: it sends them back with the rest."""

    name: str
    parsed_arguments: Any = None
    arguments: Annotated[dict[str, Any] | str, BeforeValidator(_json_object), WithJsonSchema({"type": "string"})]


class ToolCallInput(StrictModel):
    """A call that an earlier answer made. `index` is left over from a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunctionInput
    index: int | None = None


class ChatMessage(StrictModel):
    """One message. What clients echo of an answer without values is accepted, and `parsed`, which is the SDK's own;
    `reasoning` is what other servers call `reasoning_content`, and `refusal` what another model said instead."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[str] | None, BeforeValidator(lambda value: texts_of(value, _PARTS)), WithJsonSchema(_CONTENT)
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCallInput] | None, at_most(MAX_TOOL_CALLS)] = None
    tool_call_id: str | None = None
    parsed: Any = None
    refusal: str | None = None
    audio: NotYet = None
    annotations: NotYet = None
    function_call: NotYet = None

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning


# Whose messages alone have these.
_ROLES = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "refusal": "assistant",
    "tool_call_id": "tool",
}


def conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them, content as it was given. Raises `InvalidRequestError`."""
    if not messages:
        raise InvalidRequestError("messages: must hold at least one message.", "messages")
    calls: dict[str, str] = {}  # id -> name of the function
    return [_template_message(f"messages[{i}]", message, calls) for i, message in enumerate(messages)]


def _template_message(where: str, message: ChatMessage, calls: dict[str, str]) -> dict[str, Any]:
    for field, role in _ROLES.items():
        if getattr(message, field) and message.role != role:
            raise refused(f"{where}.{field}", f"is allowed only with role {role!r}, got {message.role!r}")
    content = message.refusal if message.content is None else message.content
    if content is None and not message.tool_calls and not _says_nothing(message):
        raise refused(f"{where}.content", "is required")
    # OpenAI renamed the role; templates know the old name.
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "" if content is None else content,
    }
    if message.name is not None:
        if not 1 <= len(message.name) <= MAX_NAME_CHARS:
            raise refused(f"{where}.name", f"must have 1 to {MAX_NAME_CHARS} characters, got {len(message.name)}")
        rendered["name"] = message.name
    if message.thought:
        rendered["reasoning_content"] = message.thought
        if not (message.tool_calls and content):  # gpt-oss's word, which it takes one of both for
            rendered["thinking"] = message.thought
    if message.role == "tool":
        rendered |= _result_of(where, message, calls)
    if message.tool_calls:
        rendered["tool_calls"] = [
            _rendered_call(f"{where}.tool_calls[{i}]", call, calls) for i, call in enumerate(message.tool_calls)
        ]
    return rendered


def _says_nothing(message: ChatMessage) -> bool:
    """Whether this is an answer without content or calls, as the service gives one: the model ended at once, or within
    its thought. It may be told so in so many words, or by the thought alone."""
    told = "content" in message.model_fields_set or bool(message.thought)
    return message.role == "assistant" and told


def _rendered_call(where: str, call: ToolCallInput, calls: dict[str, str]) -> dict[str, Any]:
    if not 1 <= len(call.id) <= MAX_NAME_CHARS:
        raise refused(f"{where}.id", f"must have 1 to {MAX_NAME_CHARS} characters, got {len(call.id)}")
    if not 1 <= len(call.function.name) <= MAX_NAME_CHARS:
        raise refused(f"{where}.function.name", f"must have 1 to {MAX_NAME_CHARS} characters")
    calls[call.id] = call.function.name
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _result_of(where: str, message: ChatMessage, calls: dict[str, str]) -> dict[str, str]:
    """Which call a tool message answers. Templates often want the function's name, which clients leave out."""
    given = message.tool_call_id
    if given is None:
        raise refused(f"{where}.tool_call_id", "is required with role 'tool'", "missing_field")
    if given not in calls:
        known = f"known: {', '.join(list(calls)[-4:])}" if calls else "there is none"
        why = f"must be the id of a call of an earlier message, got {given[:80]!r} ({known[:200]})"
        raise refused(f"{where}.tool_call_id", why)
    return {"tool_call_id": given, "name": message.name or calls[given]}


def refused(param: str, why: str, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}.", param, code)
