"""From the bytes of a body to a validated request, or to an error that names the field and what it allows.

Every field of OpenAI's and vLLM's schemas works, is refused by name, or is harmless and accepted; none is ignored
in silence. The harmless ones, which change nothing about the answer, are in `HARMLESS`.
"""

from __future__ import annotations

import difflib
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from quire.engine.errors import InvalidRequestError

from .heavy_work import LARGE
from .limits import ApiLimits

T = TypeVar("T", bound=BaseModel)

# Accepted with any value: labels for the service's own bookkeeping, which Quire does not keep.
HARMLESS = frozenset(
    [
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_options",
    ]
)


class _Refused(NamedTuple):
    """Why a known field does not work, and its values (besides null) that ask for what happens anyway."""

    why: str
    neutral: tuple[Any, ...] = ()


_NOT_YET = "is not supported yet"
_CHAT_ONLY = "is a field of /v1/chat/completions only"
_GUIDED = "is the old name of a structured output; use structured_outputs"
_KEEPS_NOTHING = "is not supported: this service keeps no answers; send what was said before with the request"
_ANSWERS_ARE_TEXT = "is not supported: answers are text"

REFUSED: dict[str, _Refused] = {
    # OpenAI
    "audio": _Refused(_ANSWERS_ARE_TEXT),
    "background": _Refused("is not supported: answers come with the response", (False,)),
    "best_of": _Refused("is a field of /v1/completions only", (1,)),
    "context_management": _Refused(_KEEPS_NOTHING, ([],)),
    "conversation": _Refused(_KEEPS_NOTHING),
    "function_call": _Refused("is deprecated by OpenAI; use tool_choice", ("none", "auto")),
    "functions": _Refused("is deprecated by OpenAI; use tools", ([],)),
    "modalities": _Refused(_ANSWERS_ARE_TEXT, (["text"],)),
    "moderation": _Refused("is not supported: this service moderates nothing"),
    "parallel_tool_calls": _Refused(_CHAT_ONLY, (True, False)),
    "prediction": _Refused("is not supported: nothing would be faster for it"),
    "previous_response_id": _Refused(_KEEPS_NOTHING),
    "reasoning_effort": _Refused(_CHAT_ONLY),
    "store": _Refused("is not supported: this service keeps no answers", (False,)),
    "suffix": _Refused("is not supported: no model served here fills in a middle", ("",)),
    "tool_choice": _Refused(_CHAT_ONLY, ("none", "auto")),
    "tools": _Refused(_CHAT_ONLY, ([],)),
    "truncation": _Refused("is not supported: nothing is left out of an input in silence", ("disabled",)),
    "verbosity": _Refused("is not supported: no model served here knows it", ("medium",)),
    "web_search_options": _Refused("is not supported: this service searches nothing"),
    # vLLM
    "add_generation_prompt": _Refused(_CHAT_ONLY, (True,)),
    "chat_template": _Refused(_CHAT_ONLY),
    "chat_template_kwargs": _Refused(_CHAT_ONLY, ({},)),
    "continue_final_message": _Refused(_CHAT_ONLY, (False,)),
    "documents": _Refused(_CHAT_ONLY),
    "guided_choice": _Refused(_GUIDED),
    "guided_grammar": _Refused(_GUIDED),
    "guided_json": _Refused(_GUIDED),
    "guided_regex": _Refused(_GUIDED),
    "include_reasoning": _Refused(_CHAT_ONLY, (True,)),
    "kv_transfer_params": _Refused(_NOT_YET),
    "mm_processor_kwargs": _Refused("is not supported: prompts are text"),
    "prompt_embeds": _Refused("is not supported: prompts are text or token ids"),
    "vllm_xargs": _Refused("is not supported: there are no plugins that could read it", ({},)),
}

_SHOWN_CHARS = 80
# What the decoder calls truncated: it looks for the other half where none is.
_HALF = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_INTEGER = (int, int | None)
_MAX_REPEATED = 10**24  # no field means more, and an error message repeats it to the last digit

_WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse_request(schema: type[T], body: bytes, limits: ApiLimits | None = None) -> T:
    """Validate a body against a request model, and against the service's limits. Raises `InvalidRequestError`."""
    return validate_fields(schema, decode_body(body), limits)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Raises `InvalidRequestError`."""
    try:
        with _nothing_collected() if len(body) >= LARGE else nullcontext():
            data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(_why_not_json(str(error), body), code="invalid_json") from error
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {shown(data)}.", code="invalid_body")
    return data


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A body may have millions of lists, for whose sake the collector would look at all of them again and again, while
    no stream moves: 0.77 s for 7.6 MB of the shortest ones, and 0.11 s without."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def validate_fields(schema: type[T], data: dict[str, Any], limits: ApiLimits | None = None) -> T:
    """The fields of a body as a request. Raises `InvalidRequestError`."""
    try:
        request = schema.model_validate(_known_fields(schema, data))
    except ValidationError as error:
        raise _as_request_error(schema, error) from error
    if limits is not None:
        _check_limits(request, limits)
    return request


def _check_limits(request: BaseModel, limits: ApiLimits) -> None:
    """What the models of requests allow at most, a service may allow less of."""
    lengths = (
        ("messages", limits.max_messages),
        ("stop", limits.max_stop_strings),
        ("logit_bias", limits.max_logit_bias),
    )
    for name, most in lengths:
        value = getattr(request, name, None)
        if value is not None and len(value) > most:
            raise InvalidRequestError(f"{name}: must hold at most {most} entries, got {len(value)}.", name)


def _why_not_json(error: str, body: bytes) -> str:
    """In the words of the decoder, but for what it calls malformed although the grammar of JSON allows it."""
    if "surrogate" in error or ("truncated" in error and _HALF.search(body)):
        where = error[error.rfind("(") :] if error.endswith(")") else ""
        return f"The body holds half of a UTF-16 surrogate pair, which is not a character {where}".rstrip() + "."
    if "out of range" in error:
        return f"The body holds a number that is too large: {error}."
    if "recursion" in error:
        return "The body holds lists and objects too deep in each other."
    return f"The body is not valid JSON: {error}."


def shown(value: object) -> str:
    """A value as an error message repeats it, short, also in the time that it takes."""
    text = repr(_beginning(value, depth=4))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _beginning(value: object, depth: int) -> object:
    """As much of a JSON value as could be shown."""
    match value:
        case str():
            return value[:_SHOWN_CHARS]
        case list() if depth:
            return [_beginning(item, depth - 1) for item in value[:_SHOWN_CHARS]]
        case dict() if depth:
            return {_beginning(k, 0): _beginning(v, depth - 1) for k, v in islice(value.items(), _SHOWN_CHARS)}
        case list() | dict():
            return ...
        case _:
            return value


def _known_fields(schema: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that the model knows; null means not given. Raises on any other that asks for something."""
    known = schema.model_fields
    fields = {}
    for name, value in data.items():
        if name in known:
            if value is not None:
                fields[name] = _as_integer(name, value) if known[name].annotation in _INTEGER else value
        elif name in REFUSED:
            refused = REFUSED[name]
            if value is not None and not any(_same(value, neutral) for neutral in refused.neutral):
                raise InvalidRequestError(f"{name}: {refused.why}, got {shown(value)}.", name, "unsupported")
        elif name not in HARMLESS:
            raise _unknown_field(name, [*known, *REFUSED, *HARMLESS])
    return fields


def _as_integer(param: str, value: object) -> object:
    """JSON has one kind of numbers: 16.0 is an integer, and 1e300 one of 301 digits."""
    if isinstance(value, (int, float)) and not -_MAX_REPEATED < value < _MAX_REPEATED:
        raise InvalidRequestError(f"{param}: must be an integer of far fewer digits, got {_rounded(value)}.", param)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _rounded(value: float) -> str:
    try:
        return f"{float(value):.3g}"
    except OverflowError:
        return "an even longer one"


def _same(value: object, neutral: object) -> bool:
    """Equal, and not merely 1 == True."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _unknown_field(param: str, candidates: list[str]) -> InvalidRequestError:
    param = param[:_SHOWN_CHARS]
    prefix, _, name = param.rpartition(".")
    near = difflib.get_close_matches(name, candidates, n=1)
    hint = f" Did you mean {f'{prefix}.{near[0]}' if prefix else near[0]!r}?" if near else ""
    return InvalidRequestError(f"{param}: is not a known field.{hint}", param, "unknown_field")


def _as_request_error(schema: type[BaseModel], error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's findings, in the words of this API."""
    found = error.errors(include_url=False)[0]
    param = ""
    for part in _without_tags(schema, found["loc"]):
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    kind = found["type"]
    if kind == "missing":
        return InvalidRequestError(f"{param}: is required.", param, "missing_field")
    if kind == "extra_forbidden":
        return _unknown_field(param, _names_at(schema, found["loc"]))
    if kind == "too_many":
        return InvalidRequestError(f"{param}: {found['msg']}.", param)
    if kind == "literal_error":
        wanted = f"must be {found['ctx']['expected']}"
    else:
        wanted = f"must be {_WANTED[kind]}" if kind in _WANTED else found["msg"]
    return InvalidRequestError(f"{param}: {wanted}, got {shown(found['input'])}.", param)


def _without_tags(schema: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Of the entry of a list whose entries have types pydantic names the type, too."""
    if len(loc) > 2 and loc[2] in getattr(schema, "TYPES_OF_ENTRIES", {}).get(loc[0], ()):
        return loc[:2] + loc[3:]
    return loc


def _names_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model in which the last part of `loc` was not known."""
    nested: Any = schema
    for part in loc[:-1]:
        if isinstance(part, str):
            annotation = _fields_of(nested)[part].annotation
            nested = next(
                (kind for kind in (annotation, *getattr(annotation, "__args__", ())) if hasattr(kind, "model_fields")),
                None,
            )
        if nested is None:
            return []
    return list(_fields_of(nested))


def _fields_of(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields by the names that requests know them by."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}
