"""`[f(a=1, b="x"), g()]` as the whole answer: Llama 3.2 and Llama 4 by their own choice, OLMo and others."""

from __future__ import annotations

import ast
import keyword
import re

from quire.engine.errors import InvalidRequestError

from .events import Parser, Sink
from .json_calls import Call, dumps
from .lark import CallGrammar, Lark, joined, quoted
from .reader import Reader, Steps
from .tool_set import Function, ToolSet, parameters_of

STARTS, END = ("<|python_start|>", "<|python_tag|>"), "<|python_end|>"
_CALL = re.compile(r"\s*([\w.-]{1,64})\s*\(")
_HEAD_CHARS = 128
_NEXT = re.compile(r"""["'()\[\]{}]""")
_NEXT_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Pythonic:
    name = "pythonic"
    marks = (*STARTS, END)
    reads_thoughts = False

    def parser(self, tools: ToolSet) -> Parser:
        return lambda reader, sink: _parse(reader, sink, tools)

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        calls = [_call_rule(lark, i, each) for i, each in enumerate(tools.callable)]
        one = lark.rule("call", " | ".join(calls))
        more = f' (", " {one})*' if tools.parallel else ""
        return CallGrammar(None, lark.rule("calls", f'"[" {one}{more} "]"'), text="/[^\\[](.|\\n)*/")


def _call_rule(lark: Lark, index: int, function: Function) -> str:
    """`f(a=..., b=...)`; the values are JSON, which `_literal` reads."""
    arguments: list[tuple[str, bool]] = []
    for name, schema, needed in parameters_of(function):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InvalidRequestError(
                f"{function.param}: the argument {name[:80]!r} cannot be written by this model, whose calls are "
                "Python's.",
                function.param,
            )
        value = lark.argument(f"value_{index}_{len(arguments)}", schema, function)
        arguments.append((f"{quoted(f'{name}=')} {value}", needed))
    inner = joined(lark, f"arguments_{index}", arguments, ", ")
    return lark.rule(f"call_{index}", f'{quoted(f"{function.name}(")} {inner} ")"')


def _parse(reader: Reader, sink: Sink, tools: ToolSet) -> Steps[None]:
    sink.content((yield from reader.space()))
    start = ""
    for mark in STARTS:
        if not start and (yield from reader.starts_with(mark)):
            start = reader.take(len(mark))
    before = (yield from reader.space()) if start else ""
    if (yield from reader.starts_with("[")):
        before += reader.take(1)
        while True:
            before += yield from reader.space()
            text = yield from _call_text(reader)
            call = read_call(text) if text else None
            if call is None or call.name not in tools:
                before += text
                break
            sink.call(call.name)
            sink.arguments(call.arguments)
            before = yield from reader.space()
            if reader.goes_on_with("]"):
                reader.take(1)
                break
            if not reader.goes_on_with(","):
                break
            before += reader.take(1)
    if start and not sink.num_calls:
        sink.mark(start)
    sink.content(before)
    while (yield from reader.until((END,), sink.content)):
        if not sink.num_calls:
            sink.mark(END)


def _call_text(reader: Reader) -> Steps[str]:
    """`f(...)` with everything between the parentheses, or as much of it as there is."""
    scanned, quote, escaped, closing = 0, "", False, ""
    while True:
        while scanned < len(reader):
            if escaped:
                escaped, scanned = False, scanned + 1
                continue
            found = (_NEXT_IN_STRING[quote] if quote else _NEXT).search(reader.text, reader.start + scanned)
            if found is None:
                scanned = len(reader)
                break
            scanned = found.end() - reader.start
            if scanned > _HEAD_CHARS and not closing:  # too far for the name of a function
                return reader.take(_HEAD_CHARS)
            character = found.group()
            if quote:
                escaped = character == "\\"
                quote = quote if escaped else ""
            elif character in "\"'":
                quote = character
            elif character in "([{":
                closing += ")]}"["([{".index(character)]
            elif not closing.endswith(character) or not closing:
                return reader.take(scanned - 1)
            elif len(closing) == 1:
                return reader.take(scanned)
            else:
                closing = closing[:-1]
        if scanned > _HEAD_CHARS and not closing:
            return reader.take(_HEAD_CHARS)
        if not (yield from reader.more()):
            return reader.take(len(reader))


def read_call(text: str) -> Call | None:
    """A call from its text; None where it is not one with literal keyword arguments."""
    head = _CALL.match(text)
    if head is None or not text.rstrip().endswith(")"):
        return None
    try:
        # The name may be no Python identifier: another one stands in for it.
        call = ast.parse(f"f({text[head.end() :].strip()}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        arguments = {each.arg: _literal(each.value) for each in call.keywords if each.arg is not None}
        if len(arguments) != len(call.keywords):
            return None
        return Call(head.group(1), dumps(arguments))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> object:
    """A Python literal; names as in JSON are read, too."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)) if key else "": _literal(item) for key, item in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)
