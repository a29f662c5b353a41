"""Reading a text that arrives in pieces, as if it were all there.

A parser is a generator over a `Reader`: it yields wherever it needs more text, and goes on when there is some. As long
as it looks at the text through these methods, what it finds depends on the text alone, not on how it was divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields while it waits for text, returns a T


_SPACE = re.compile(r"\s*")
_NOTHING = "(?!)"  # is found nowhere


class Reader:
    """The text that was received and not consumed yet: `text` from `start` on.

    What is consumed stays before `start` until more comes, as a text that is all there is taken in many small steps.
    """

    __slots__ = ("closed", "position", "start", "text")

    def __init__(self) -> None:
        self.text = ""
        self.start = 0
        self.position = 0  # of `start` in all that was received
        self.closed = False  # nothing follows `text`

    def __len__(self) -> int:
        """Characters that are not consumed."""
        return len(self.text) - self.start

    def push(self, text: str) -> None:
        """Receive more."""
        self.text, self.start = self.text[self.start :] + text, 0

    def more(self) -> Steps[bool]:
        """Wait for more text; False when there is none to come."""
        length = len(self)
        while len(self) == length and not self.closed:
            yield
        return len(self) > length

    def goes_on_with(self, prefix: str | tuple[str, ...]) -> bool:
        """Whether that is here already."""
        return self.text.startswith(prefix, self.start)

    def take(self, length: int) -> str:
        taken = self.text[self.start : self.start + length]
        self.start += len(taken)
        self.position += len(taken)
        return taken

    def put_back(self, text: str) -> None:
        """Undo a `take` of `text`, which was the last."""
        if self.start < len(text):
            self.push("")
            self.text, self.start = text + self.text, len(text)
        self.start -= len(text)
        self.position -= len(text)

    def starts_with(self, prefix: str) -> Steps[bool]:
        """Whether the text goes on with `prefix`; waits only as long as it may."""
        while len(self) < len(prefix) and prefix.startswith(self.text[self.start :]) and (yield from self.more()):
            pass
        return self.goes_on_with(prefix)

    def space(self) -> Steps[str]:
        """Consume white space."""
        taken = ""
        while True:
            found = _SPACE.match(self.text, self.start)
            assert found is not None
            taken += self.take(found.end() - self.start)
            if len(self) or not (yield from self.more()):
                return taken

    def until(self, marks: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str | None]:
        """Pass text on until one of `marks`, which is consumed and returned; None when the text ends without one.

        What may be the beginning of a mark is held back. No mark may begin another. Without marks: all that comes.
        """
        any_mark = _any_of(marks)
        while True:
            found = any_mark.search(self.text, self.start)
            if found is not None:
                _pass(emit, self.take(found.start() - self.start))
                return self.take(len(found.group()))
            _pass(emit, self.take(len(self) - _held(self.text[self.start :], marks)))
            if not (yield from self.more()):
                _pass(emit, self.take(len(self)))
                return None


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of them, in one walk over the text up to it."""
    return re.compile("|".join(map(re.escape, marks)) or _NOTHING)


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
