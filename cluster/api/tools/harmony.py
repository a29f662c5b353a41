"""Messages with a channel each: gpt-oss (https://github.com/openai/harmony).

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>an answer
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

An answer begins behind `<|start|>assistant`. What a grammar makes it say begins with no channel, and is all content.
"""

from __future__ import annotations

import re

from quire.engine.errors import InvalidRequestError

from .events import Parser, Sink
from .lark import CallGrammar, Lark
from .reader import Reader, Steps
from .tool_set import ToolSet

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_CLOSING = (END, CALL, START, CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]{1,64})")


class Harmony:
    name = "harmony"
    marks = (START, CHANNEL, MESSAGE, END, CALL, "<|constrain|>")
    reads_thoughts = True

    def parser(self, tools: ToolSet) -> Parser:  # noqa: ARG002 - the recipient tells, whatever the name
        return _parse

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:  # noqa: ARG002
        raise InvalidRequestError(
            "tools: no grammar holds the calls of this model: tool_choice, parallel_tool_calls and strict are not "
            "supported.",
            "tools",
            "unsupported",
        )


def _parse(reader: Reader, sink: Sink) -> Steps[None]:
    space = yield from reader.space()
    if not (yield from reader.starts_with(CHANNEL)) and not (yield from reader.starts_with(START)):
        reader.put_back(space)
        yield from reader.until((), sink.content)
        return
    is_over = False
    while not is_over:
        header: list[str] = []  # a role, a channel, and who it is for
        if (yield from reader.until((MESSAGE,), header.append)) is None:
            return
        is_over = yield from _message(reader, sink, "".join(header))


def _message(reader: Reader, sink: Sink, header: str) -> Steps[bool]:
    """One message, up to what closes it. Whether the text ends in it."""
    called = _RECIPIENT.search(header)
    if called is not None:
        sink.call(called[1])
        mark = yield from reader.until(_CLOSING, sink.arguments)
    elif "analysis" in header:
        sink.thought_begun = True
        mark = yield from reader.until(_CLOSING, sink.reasoning)
        if mark is not None:
            sink.thought_end = reader.position
    else:
        mark = yield from reader.until(_CLOSING, sink.content)
    if mark in (START, CHANNEL):
        reader.put_back(mark)
    return mark is None
