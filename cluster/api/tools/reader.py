"""Reading a text that arrives in pieces, as if it were all there.

A parser is a generator over a `Reader`: it yields wherever it needs more text, and goes on when there is some. As long
as it looks at the text through these methods, what it finds depends on the text alone, not on how it was divided.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields while it waits for text, returns a T


class Reader:
    """The text that was received and not consumed yet."""

    __slots__ = ("closed", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0  # of `text` in all that was received
        self.closed = False  # nothing follows `text`

    def more(self) -> Steps[bool]:
        """Wait for more text; False when there is none to come."""
        length = len(self.text)
        while len(self.text) == length and not self.closed:
            yield
        return len(self.text) > length

    def take(self, length: int) -> str:
        taken, self.text = self.text[:length], self.text[length:]
        self.position += len(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undo a `take` of `text`."""
        self.text = text + self.text
        self.position -= len(text)

    def starts_with(self, prefix: str) -> Steps[bool]:
        """Whether the text goes on with `prefix`; waits only as long as it may."""
        while len(self.text) < len(prefix) and prefix.startswith(self.text) and (yield from self.more()):
            pass
        return self.text.startswith(prefix)

    def space(self) -> Steps[str]:
        """Consume white space."""
        taken = ""
        while True:
            rest = self.text.lstrip()
            taken += self.take(len(self.text) - len(rest))
            if rest or not (yield from self.more()):
                return taken

    def until(self, marks: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str | None]:
        """Pass text on until one of `marks`, which is consumed and returned; None when the text ends without one.

        What may be the beginning of a mark is held back. No mark may begin another. Without marks: all that comes.
        """
        while True:
            start, mark = min(((self.text.find(mark), mark) for mark in marks if mark in self.text), default=(-1, ""))
            if mark:
                _pass(emit, self.take(start))
                self.take(len(mark))
                return mark
            _pass(emit, self.take(len(self.text) - _held(self.text, marks)))
            if not (yield from self.more()):
                _pass(emit, self.take(len(self.text)))
                return None


def _pass(emit: Callable[[str], None], text: str) -> None:
    if text:
        emit(text)


def _held(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a mark."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
