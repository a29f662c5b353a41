"""What parsers find in an answer, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .reader import Reader, Steps


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """A new call; the `Arguments` that follow are its own, until the next."""

    name: str


class Arguments(NamedTuple):
    text: str  # a piece of JSON


Event = Content | Reasoning | CallStart | Arguments


class Sink:
    """Collects the events of one answer. `hidden` are marks that are special tokens, for parsers alone.

    White space between text and a call, between calls and after the last one belongs to the format, not to the
    answer; only what follows tells which it is, so it is held back until then.
    """

    __slots__ = ("_after_call", "_hidden", "_space", "events", "num_calls", "thought_begun", "thought_end")

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        self._hidden = hidden
        self.events: list[Event] = []
        self.num_calls = 0
        self.thought_begun = False
        self.thought_end: int | None = None  # characters of the text up to the thought's end, its mark included
        self._space = ""
        self._after_call = False

    def content(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self.events.append(Content(shown))
            self._after_call = False

    def mark(self, mark: str) -> None:
        """A mark that turned out to introduce nothing: text like any other, unless it is a token that users do not
        see."""
        if mark not in self._hidden:
            self.content(mark)

    def reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))

    def call(self, name: str) -> None:
        self._space = ""
        self._after_call = True
        self.num_calls += 1
        self.events.append(CallStart(name))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(Arguments(text))

    def close(self) -> None:
        """The answer has ended."""
        if self._space and not self._after_call:
            self.events.append(Content(self._space))
        self._space = ""


Parser = Callable[[Reader, Sink], Steps[None]]  # reads an answer to its end


class IncrementalParser:
    """Runs a parser on a text that arrives in pieces. Its events join to those of the whole text."""

    __slots__ = ("_reader", "_sink", "_steps")

    def __init__(self, parser: Parser, *, hidden: frozenset[str] = frozenset()) -> None:
        self._reader, self._sink = Reader(), Sink(hidden)
        self._steps = parser(self._reader, self._sink)
        self._advance()

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    @property
    def thinks(self) -> bool:
        """The text up to here is a thought."""
        return self._sink.thought_begun and self._sink.thought_end is None

    @property
    def thought_end(self) -> int:
        """Characters of the text that are a thought which has ended, its marks included."""
        return self._sink.thought_end or 0

    def push(self, text: str) -> list[Event]:
        """Take text; get what it shows."""
        if text:
            self._reader.push(text)
            self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        """The text is complete; get the rest. Called once."""
        self._reader.closed = True
        self._advance()
        self._sink.close()
        return self._taken()

    def _advance(self) -> None:
        next(self._steps, None)

    def _taken(self) -> list[Event]:
        events, self._sink.events = self._sink.events, []
        return events
