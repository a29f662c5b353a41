"""What the values of a JSON schema's keywords must be, so that a malformed one is refused where it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class _Kind(NamedTuple):
    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_COUNT = _Kind("a whole number that is not negative", lambda value: type(value) is int and 0 <= value < 2**63)
_NUMBER = _Kind("a number", _is_number)
_BOUND = _Kind("a number", lambda value: isinstance(value, bool) or _is_number(value))  # true and false in draft 4
_STEP = _Kind("a number above 0", lambda value: _is_number(value) and value > 0)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_LIST = _Kind("a list that is not empty", lambda value: isinstance(value, list) and bool(value))
_NAMES = _Kind(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)

_KINDS = {
    **dict.fromkeys(["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"], _COUNT),
    **dict.fromkeys(["$anchor", "$id", "$schema", "format", "id", "pattern"], _TEXT),
    **dict.fromkeys(["maximum", "minimum"], _NUMBER),
    **dict.fromkeys(["exclusiveMaximum", "exclusiveMinimum"], _BOUND),
    "enum": _LIST,
    "multipleOf": _STEP,
    "required": _NAMES,
}


def what_it_must_be(keyword: str, value: Any) -> str | None:
    """In words, where it is something else; None where it is well-formed."""
    kind = _KINDS.get(keyword)
    return None if kind is None or kind.fits(value) else kind.words


def shown(value: Any) -> str:
    """A value for a message: its beginning, and never so large a number that it could not be written."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a very large number"
    if isinstance(value, str):
        value = value[:80]
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):  # a number too long to be written, inside of it
        return f"a {type(value).__name__}"
