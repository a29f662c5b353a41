"""`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and many others with ChatML."""

from __future__ import annotations

from .events import Parser, Sink
from .json_calls import call_object
from .lark import CallGrammar, Lark, object_rule
from .reader import Reader, Steps
from .tool_set import ToolSet

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    name = "hermes"
    marks = (OPEN, CLOSE)
    reads_thoughts = False

    def parser(self, tools: ToolSet) -> Parser:  # noqa: ARG002 - the marks tell, whatever the name
        return _parse

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        objects = [object_rule(lark, i, each, "arguments") for i, each in enumerate(tools.callable)]
        body = f'"\\n" ({" | ".join(objects)}) "\\n" {lark.mark(CLOSE)}'
        return CallGrammar(OPEN, lark.rule("call", body), separator="\n")


def _parse(reader: Reader, sink: Sink) -> Steps[None]:
    mark = yield from reader.until((OPEN,), sink.content)
    while mark is not None:
        if (yield from _call(reader, sink)):
            mark = yield from reader.until((OPEN,), sink.content)


def _call(reader: Reader, sink: Sink) -> Steps[bool]:
    """What follows the opening mark, up to the closing one; False where another opening mark came instead of it."""
    space = yield from reader.space()
    rest: str | None = ""
    is_object = yield from reader.starts_with("{")
    if is_object:
        rest = yield from call_object(reader, sink)
    if rest is None:
        yield from reader.until((CLOSE,), sink.arguments)
        return True
    if is_object and not rest:
        between: list[str] = []
        mark = yield from reader.until((CLOSE, OPEN), between.append)
        if "".join(between).strip():
            sink.content("".join(between))
        return mark != OPEN
    sink.mark(OPEN)
    sink.content(space + rest)
    if (yield from reader.until((CLOSE,), sink.content)):
        sink.mark(CLOSE)
    return True
