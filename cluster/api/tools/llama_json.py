"""`{"name": "f", "parameters": {...}}` as the whole answer, maybe after `<|python_tag|>`: Llama 3.1 to 3.3.

Nothing but the name tells a call from JSON that was asked for, so only the request's own functions are taken for calls.
"""

from __future__ import annotations

from .events import Parser, Sink
from .json_calls import call_object
from .lark import CallGrammar, Lark, object_rule
from .reader import Reader, Steps
from .tool_set import ToolSet

TAG = "<|python_tag|>"
_SEPARATORS = (";", ",")


class LlamaJson:
    name = "llama3_json"
    marks = (TAG,)
    reads_thoughts = False

    def parser(self, tools: ToolSet) -> Parser:
        return lambda reader, sink: _parse(reader, sink, tools)

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        """One call: the models' templates know no more."""
        objects = [object_rule(lark, i, each, "parameters") for i, each in enumerate(tools.callable)]
        return CallGrammar(None, lark.rule("call", " | ".join(objects)), text="/[^{](.|\\n)*/")


def _parse(reader: Reader, sink: Sink, tools: ToolSet) -> Steps[None]:
    sink.content((yield from reader.space()))
    tagged = yield from reader.starts_with(TAG)
    if tagged:
        reader.take(len(TAG))
    before = (yield from reader.space()) if tagged else ""
    while (yield from reader.starts_with("{")):
        rest = yield from call_object(reader, sink, names=tools)
        if rest is None:
            yield from reader.until((), sink.arguments)
            return
        if rest:
            before += rest
            break
        before = yield from reader.space()
        if reader.goes_on_with(_SEPARATORS):
            before += reader.take(1) + (yield from reader.space())
    if tagged and not sink.num_calls:
        sink.mark(TAG)
    sink.content(before)
    yield from reader.until((), sink.content)
