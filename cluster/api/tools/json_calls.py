"""A call written as a JSON object, `{"name": "f", "arguments": {...}}`, as most formats have it.

The arguments are passed on as the model writes them, character by character: as with OpenAI, a client that parses them
must expect that a model wrote JSON that is not quite right. Only what looks like no call at all is not taken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Any, NamedTuple

from .events import Sink
from .reader import Reader, Steps

# The usual beginning: from here on it is a call, and its arguments can be passed on while they are written.
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*(?:\}|"(?:[^"\\]|\\.)*"\s*:))'
)
_HEAD_CHARS = 1024  # what begins otherwise is read whole
_NEXT = re.compile(r'["{}\[\]]|[^\s\w,:.+-]')  # what ends plain JSON: structure, or what JSON has in strings only
_NEXT_IN_STRING = re.compile(r'["\\]')


class JsonScanner:
    """Finds the end of a JSON object or array that arrives in pieces, without reading anything twice."""

    __slots__ = ("_depth", "_escaped", "_in_string", "broken", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.done = False  # the value is complete
        self.broken = False  # it goes on with a character that JSON does not have there

    def scan(self, text: str, start: int = 0) -> int:
        """How many characters of `text` from `start` on belong to the value. All of them, unless it is `done` or
        `broken` then."""
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_NEXT_IN_STRING if self._in_string else _NEXT).search(text, at)
            if found is None:
                return len(text) - start
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    self._escaped = True
                case "{" | "[":
                    self._depth += 1
                case "}" | "]" if self._depth > 0:
                    self._depth -= 1
                    self.done = self._depth == 0
                case _:
                    self.broken = True
                    return found.start() - start
            if self.done:
                break
        return at - start


class Call(NamedTuple):
    name: str
    arguments: str


def call_object(reader: Reader, sink: Sink, *, names: Container[str] | None = None) -> Steps[str | None]:
    """Read a call at `{`. Returns what was consumed and is no part of a call: "" after a good one.

    None: its arguments broke off; whatever the format has up to its end belongs to them. With `names`, an object that
    names another function is no call.
    """
    scanner, scanned = JsonScanner(), 0
    while True:
        head = _HEAD.match(reader.text, reader.start, reader.start + _HEAD_CHARS)
        if head is not None and names is not None and loads(head.group(1)) not in names:
            head = None
        if head is not None and isinstance(name := loads(head.group(1)), str):
            reader.take(head.end() - reader.start)
            sink.call(name)
            return (yield from _rest_of_call(reader, sink))
        scanned += scanner.scan(reader.text, reader.start + scanned)
        if scanner.done or scanner.broken or not (yield from reader.more()):
            break
    text = reader.take(scanned)
    call = read_call(loads(text)) if scanner.done else None
    if call is None or (names is not None and call.name not in names):
        return text
    sink.call(call.name)
    sink.arguments(call.arguments)
    return ""


def _rest_of_call(reader: Reader, sink: Sink) -> Steps[str | None]:
    """The value of the arguments, and the object's own end. Further keys say nothing to the client."""
    if not (yield from stream_value(reader, sink)):
        return None
    rest, scanner = "", JsonScanner()
    scanner.scan("{")
    while not scanner.done:
        length = scanner.scan(reader.text, reader.start)
        rest += reader.take(length)
        if scanner.broken or (not scanner.done and not (yield from reader.more())):
            break
    return "" if not rest.strip("} \t\r\n") or rest.lstrip().startswith(",") else rest


def stream_value(reader: Reader, sink: Sink) -> Steps[bool]:
    """Pass an object or array on as arguments while it arrives; False when the text ends or breaks before its end."""
    scanner = JsonScanner()
    while True:
        sink.arguments(reader.take(scanner.scan(reader.text, reader.start)))
        if scanner.done:
            return True
        if scanner.broken or not (yield from reader.more()):
            return False


def read_call(value: object) -> Call | None:
    """A call from a JSON value; None where it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    for key in ("arguments", "parameters"):
        if key in value:
            return Call(name, _arguments(value[key]))
    return None


def _arguments(value: Any) -> str:
    """Arguments as a client gets them: some models write the JSON into a string."""
    if isinstance(value, str) and isinstance(loads(value), dict):
        return value
    return "{}" if value is None else dumps(value)


def dumps(value: object) -> str:
    """JSON as models write it. Raises `ValueError` or `TypeError` on what JSON or UTF-8 does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def loads(text: str) -> object:
    """The value, or None where the text is not JSON, or holds halves of characters or numbers without end."""
    try:
        value: object = json.loads(text, parse_constant=_not_json)
        dumps(value)
    except (ValueError, RecursionError):
        return None
    return value


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    return True


def _not_json(constant: str) -> object:
    """Python would read NaN and Infinity."""
    raise ValueError(constant)
