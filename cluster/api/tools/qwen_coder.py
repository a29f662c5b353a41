"""`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder and its descendants.

Values are bare text; the function's schema tells which are strings.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from quire.engine.errors import InvalidRequestError

from .events import Parser, Sink
from .json_calls import dumps, is_json
from .lark import CallGrammar, Lark, joined, quoted
from .reader import Reader, Steps
from .tool_set import Function, ToolSet, parameters_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_END_VALUE = f"\n{END_PARAMETER}\n"
_NAME = re.compile(r"[\w.-]{1,64}")


class QwenCoder:
    name = "qwen3_coder"
    marks = (OPEN, CLOSE)
    reads_thoughts = False

    def parser(self, tools: ToolSet) -> Parser:
        return lambda reader, sink: _parse(reader, sink, tools)

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        calls = [_call_rule(lark, i, each) for i, each in enumerate(tools.callable)]
        return CallGrammar(OPEN, lark.rule("call", f"({' | '.join(calls)}) {lark.mark(CLOSE)}"), separator="\n")


def _call_rule(lark: Lark, index: int, function: Function) -> str:
    head = quoted(f"\n{FUNCTION}{function.name}>\n")
    if function.parameters is None:
        key = lark.rule("KEY", "/[A-Za-z0-9_.-]{1,64}/")
        inner = lark.rule(f"arguments_{index}", f'("{PARAMETER}" {key} ">\\n" {_text_rule(lark, index, "any")})*')
    else:
        arguments = [
            (f"{quoted(f'{PARAMETER}{name}>' + chr(10))} {_value_rule(lark, index, i, function, name, schema)}", needed)
            for i, (name, schema, needed) in enumerate(parameters_of(function))
        ]
        inner = joined(lark, f"arguments_{index}", arguments, "")
    return lark.rule(f"call_{index}", f"{head} {inner} {quoted(END_FUNCTION + chr(10))}")


def _value_rule(lark: Lark, index: int, i: int, function: Function, name: str, schema: dict[str, Any]) -> str:
    """One value and its end. Strings are bare: of what a schema may say of them, only `enum` can be held to."""
    if kinds_of(schema) != {"string"}:
        value = lark.argument(f"value_{index}_{i}", schema, function)
        return lark.rule(f"ended_{index}_{i}", f"{value} {quoted(_END_VALUE)}")
    if isinstance(schema.get("enum"), list):
        choices = " | ".join(quoted(value + _END_VALUE) for value in schema["enum"] if isinstance(value, str))
        return lark.rule(f"ended_{index}_{i}", choices)
    unheld = [key for key in ("pattern", "format", "minLength", "maxLength", "const") if key in schema]
    if unheld and function.strict:
        raise InvalidRequestError(
            f"{function.param}: {unheld[0]} of {name[:80]!r} cannot be held to: this model writes strings "
            "without quotes.",
            function.param,
        )
    return _text_rule(lark, index, str(i))


def _text_rule(lark: Lark, index: int, name: str) -> str:
    return lark.rule(f"text_{index}_{name}[lazy]", f"/(.|\\n)*/ {quoted(_END_VALUE)}")


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
    kinds.update(kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str))
    for key in ("anyOf", "oneOf"):
        for branch in schema[key] if isinstance(schema.get(key), list) else []:
            kinds |= kinds_of(branch)
    if not kinds and isinstance(schema.get("enum"), list):
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else {"any"}
    return kinds or ({"any"} if "$ref" in schema or "const" in schema else {"string"})


def _as_json(text: str, kinds: set[str]) -> str:
    """A bare value as JSON: what it looks like, where its schema allows that, else a string."""
    bare = text.strip()
    written = bare if is_json(bare) else _python_as_json(bare)
    if written is None or ("string" in kinds and not (written == "null" and "null" in kinds)):
        return dumps(text)
    return written


def _python_as_json(text: str) -> str | None:
    """Models write Python's constants, too."""
    try:
        return dumps(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
