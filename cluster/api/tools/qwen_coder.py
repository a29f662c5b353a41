"""`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder and its descendants.

Values are bare text; the function's schema tells which are strings.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from .events import Parser, Sink
from .json_calls import dumps, loads
from .reader import Reader, Steps
from .tool_set import ToolSet

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[\w.-]{1,64}")


class QwenCoder:
    name = "qwen3_coder"
    marks = (OPEN, CLOSE)

    def parser(self, tools: ToolSet) -> Parser:
        return lambda reader, sink: _parse(reader, sink, tools)


def _parse(reader: Reader, sink: Sink, tools: ToolSet) -> Steps[None]:
    while True:
        mark = yield from reader.until((OPEN, FUNCTION), sink.content)
        if mark is None:
            return
        before = ""
        if mark == OPEN:
            before = yield from reader.space()
            if not (yield from reader.starts_with(FUNCTION)):
                sink.mark(OPEN)
                sink.content(before)
                continue
            before += reader.take(len(FUNCTION))
        yield from _function(reader, sink, tools, mark, before)


def _function(reader: Reader, sink: Sink, tools: ToolSet, mark: str, before: str) -> Steps[None]:
    heard: list[str] = []
    ended = yield from reader.until((">", "\n", OPEN), heard.append)
    name = "".join(heard).strip()
    if ended != ">" or not _NAME.fullmatch(name):
        sink.mark(mark)
        sink.content(before + "".join(heard))
        reader.put_back(ended or "")
        return
    sink.call(name)
    properties = tools.properties(name)
    separator = "{"
    while True:
        between: list[str] = []
        mark_or_end = yield from reader.until((PARAMETER, END_FUNCTION, CLOSE), between.append)
        if "".join(between).strip():
            sink.content("".join(between))
        key = (yield from _key(reader, sink)) if mark_or_end == PARAMETER else None
        if key is None:
            break
        sink.arguments(f"{separator}{dumps(key)}: ")
        separator = ", "
        yield from _value(reader, sink, properties.get(key))
    if mark_or_end in (None, PARAMETER):
        return  # it broke off: so do the arguments
    sink.arguments("{}" if separator == "{" else "}")
    if mark_or_end == END_FUNCTION:
        sink.content((yield from reader.space()))
        if (yield from reader.starts_with(CLOSE)):
            reader.take(len(CLOSE))


def _key(reader: Reader, sink: Sink) -> Steps[str | None]:
    """The name of a parameter; None, and text like any other, where there is none."""
    heard: list[str] = []
    ended = yield from reader.until((">", "\n"), heard.append)
    if ended == ">":
        return "".join(heard).strip()
    sink.content(PARAMETER + "".join(heard) + (ended or ""))
    return None


def _value(reader: Reader, sink: Sink, schema: Any) -> Steps[None]:
    """One value, as JSON. Strings are passed on while they arrive."""
    if (yield from reader.starts_with("\n")):
        reader.take(1)
    kinds = kinds_of(schema)
    ends = (f"\n{END_PARAMETER}", END_PARAMETER, f"\n{END_FUNCTION}", f"\n{PARAMETER}")
    if kinds == {"string"}:
        sink.arguments('"')
        ended = yield from reader.until(ends, lambda text: sink.arguments(dumps(text)[1:-1]))
        if ended is not None:
            sink.arguments('"')
    else:
        heard: list[str] = []
        ended = yield from reader.until(ends, heard.append)
        if ended is not None:
            sink.arguments(_as_json("".join(heard), kinds))
    if ended in ends[2:]:
        reader.put_back(ended)


def kinds_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says so; strings where it says nothing."""
    if not isinstance(schema, dict):
        return {"string"}
    kinds: set[str] = set()
    given = schema.get("type")
    kinds.update([given] if isinstance(given, str) else given if isinstance(given, list) else [])
    for key in ("anyOf", "oneOf"):
        for branch in schema[key] if isinstance(schema.get(key), list) else []:
            kinds |= kinds_of(branch)
    if not kinds and isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else {"any"}
    return kinds or ({"any"} if "$ref" in schema or "const" in schema else {"string"})


def _as_json(text: str, kinds: set[str]) -> str:
    """A bare value as JSON: what it looks like, where its schema allows that, else a string."""
    bare = text.strip()
    value: object = loads(bare)
    if value is None and bare not in ("null", "None"):
        try:
            value = ast.literal_eval(bare)  # models write Python's constants, too
            written = dumps(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return dumps(text)
    else:
        written = dumps(value)
    if "string" in kinds and not (value is None and "null" in kinds):
        return dumps(text)
    return written
