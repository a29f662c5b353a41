"""Messages with a channel each: gpt-oss (https://github.com/openai/harmony).

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>an answer
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

An answer begins behind `<|start|>assistant`; who a message is for may stand before the channel, too. What a grammar of
a request makes it say begins with neither, and is all content.
"""

from __future__ import annotations

import re

from .events import Parser, Sink
from .lark import CallGrammar, Lark, quoted
from .reader import Reader, Steps
from .tool_set import ToolSet

START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
)
_BEGINNINGS = (CHANNEL, START, "to=")
_CLOSING = (END, CALL, START, CHANNEL)
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]{1,64})")


class Harmony:
    name = "harmony"
    marks = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    reads_thoughts = True

    def parser(self, tools: ToolSet) -> Parser:
        def parse(reader: Reader, sink: Sink) -> Steps[None]:
            yield from _parse(reader, sink, tools)

        return parse

    def grammar(self, tools: ToolSet, lark: Lark) -> CallGrammar:
        """A thought, what is said before a call, and a call; or an answer, where none is required."""
        next_message = f'{lark.mark(START)} "assistant"'

        def before(channel: str) -> str:
            text = lark.text_until(f"{channel}_text", END)
            head = f"{lark.mark(CHANNEL)} {quoted(channel)} {lark.mark(MESSAGE)}"
            return lark.rule(f"{channel}_message", f"{head} {text} {next_message}")

        wanted = []
        for i, each in enumerate(tools.callable):
            head = f'{quoted(f"commentary to=functions.{each.name} ")} {lark.mark(CONSTRAIN)} "json"'
            arguments = lark.argument(f"arguments_{i}", each.parameters, each)
            wanted.append(lark.rule(f"call_{i}", f"{head} {lark.mark(MESSAGE)} {arguments}"))
        if tools.choice != "required":
            wanted.append(lark.rule("final", f'"final" {lark.mark(MESSAGE)} /(.|\\n)*/'))
        lead = f"{before('analysis')}? {before('commentary')}?"
        body = lark.rule("messages", f"{lead} {lark.mark(CHANNEL)} ({' | '.join(wanted)})")
        return CallGrammar(None, body, text="/[^<](.|\\n)*/")


def _parse(reader: Reader, sink: Sink, tools: ToolSet) -> Steps[None]:
    space = yield from reader.space()
    for beginning in _BEGINNINGS:
        if (yield from reader.starts_with(beginning)):
            break
    else:
        reader.put_back(space)
        yield from reader.until((), sink.content)
        return
    is_over = False
    while not is_over:
        header: list[str] = []  # a role, a channel, and who it is for
        if (yield from reader.until((MESSAGE,), header.append)) is None:
            return
        is_over = yield from _message(reader, sink, "".join(header), tools)


def _message(reader: Reader, sink: Sink, header: str, tools: ToolSet) -> Steps[bool]:
    """One message, up to what closes it. Whether the text ends in it."""
    called = _called(header, tools)
    if called is not None:
        sink.call(called)
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


def _called(header: str, tools: ToolSet) -> str | None:
    """The function that a message is for: any that is called one, or one that was offered, where some were."""
    found = _RECIPIENT.search(header)
    if found is None or not tools.functions:
        return None
    return found[2] if found[1] or found[2] in tools else None
