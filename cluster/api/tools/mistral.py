"""`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{...}`: Mistral's models."""

from __future__ import annotations

import re

from .events import Parser, Sink
from .json_calls import call_object, stream_value
from .lark import CallGrammar, Lark, object_rule, quoted
from .reader import Reader, Steps
from .tool_set import ToolSet

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.-]{1,64}")


class Mistral:
    name = "mistral"
    marks = (CALLS, ARGS, CALL_ID)
    reads_thoughts = False

    def parser(self, tools: ToolSet) -> Parser:  # noqa: ARG002 - the marks tell, whatever the name
        return _parse

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        """The newer form where the tokenizer has its marks, else the older one."""
        functions = tools.callable
        if not lark.is_token(ARGS):
            objects = " | ".join(object_rule(lark, i, each, "arguments") for i, each in enumerate(functions))
            more = f' (", " ({objects}))*' if tools.parallel else ""
            return CallGrammar(CALLS, lark.rule("calls", f'"[" ({objects}){more} "]"'))
        calls = []
        for i, each in enumerate(functions):
            arguments = lark.argument(f"arguments_{i}", each.parameters, each)
            calls.append(lark.rule(f"call_{i}", f"{quoted(each.name)} {lark.mark(ARGS)} {arguments}"))
        return CallGrammar(CALLS, lark.rule("call", " | ".join(calls)), separator="")


def _parse(reader: Reader, sink: Sink) -> Steps[None]:
    while (yield from reader.until((CALLS,), sink.content)):
        space = yield from reader.space()
        if (yield from reader.starts_with("[")):
            yield from _array(reader, sink, space)
        else:
            yield from _named(reader, sink, space)


def _array(reader: Reader, sink: Sink, space: str) -> Steps[None]:
    """Objects between brackets. What follows a good one is text, unless it is another."""
    before = space + reader.take(1) + (yield from reader.space())
    is_first = True
    while (yield from reader.starts_with("{")):
        rest = yield from call_object(reader, sink)
        if rest is None:
            yield from reader.until((CALLS,), sink.arguments)
            return
        if rest:
            if is_first:
                sink.mark(CALLS)
            sink.content(before + rest)
            return
        is_first = False
        before = yield from reader.space()
        if reader.goes_on_with("]"):
            reader.take(1)
            return
        if reader.goes_on_with(","):
            before += reader.take(1) + (yield from reader.space())
    if is_first:
        sink.mark(CALLS)
    sink.content(before)


def _named(reader: Reader, sink: Sink, space: str) -> Steps[None]:
    """A name, maybe an id, and the arguments."""
    heard: list[str] = [space]
    name = ""
    while True:
        mark = yield from reader.until(("{", ARGS, CALL_ID, CALLS), heard.append)
        name = name or "".join(heard).strip()
        if mark in (ARGS, CALL_ID):
            heard.append(mark)
            continue
        if mark is not None:
            reader.put_back(mark)
        if mark != "{" or not _NAME.fullmatch(name):
            sink.mark(CALLS)
            sink.content("".join(heard))
            return
        sink.call(name)
        if not (yield from stream_value(reader, sink)):
            yield from _broken(reader, sink)
        return


def _broken(reader: Reader, sink: Sink) -> Steps[None]:
    """Arguments that are not JSON go on to the next call."""
    if (yield from reader.until((CALLS,), sink.arguments)):
        reader.put_back(CALLS)
