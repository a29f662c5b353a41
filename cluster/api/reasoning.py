"""The thought before an answer, apart from the answer."""

from __future__ import annotations

from dataclasses import dataclass

from .tools.events import Parser, Sink
from .tools.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a thought stands between. A model that always thinks may leave the first out: its prompt ends with it."""

    start: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins inside a thought."""
        return prompt.rstrip().endswith(self.start)


KNOWN_MARKS = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))


def detect_marks(template: str) -> ReasoningMarks | None:
    """The marks that a chat template knows, of the usual ones."""
    return next((marks for marks in KNOWN_MARKS if marks.start in template and marks.end in template), None)


def with_reasoning(marks: ReasoningMarks, answer: Parser, *, inside: bool) -> Parser:
    """A parser for a thought and then what `answer` reads. `inside`: the text begins in the thought."""

    def parse(reader: Reader, sink: Sink) -> Steps[None]:
        space = yield from reader.space()
        if (yield from reader.starts_with(marks.start)):
            reader.take(len(marks.start))
        elif not inside:
            reader.put_back(space)
            yield from answer(reader, sink)
            return
        sink.thought_begun = True
        yield from reader.space()
        thought = _Thought(sink)
        if (yield from reader.until((marks.end,), thought.push)) is None:
            return
        sink.thought_end = reader.position
        yield from reader.space()
        yield from answer(reader, sink)

    return parse


class _Thought:
    """Passes reasoning on, but for the white space at its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space = ""

    def push(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._sink.reasoning(shown)


def plain(reader: Reader, sink: Sink) -> Steps[None]:
    """The parser of an answer without calls."""
    yield from reader.until((), sink.content)
