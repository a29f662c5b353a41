"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from typing import NamedTuple


class StopMatch(NamedTuple):
    """`stop` was found; `text` is what is newly safe to show before it (or through its end, when it is included)."""

    text: str
    stop: str


class StopStringMatcher:
    """Holds back only what may be the beginning of a stop string: the longest end of the text that starts one.

    The string whose last character comes first wins, and of two that end together the longer: the cut depends on the
    text alone, never on how it was divided into tokens.
    """

    __slots__ = ("_first_characters", "_held", "_include", "_max_len", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._max_len = max(map(len, stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str | StopMatch:
        """Add text; get what can be shown of all that came. While not `armed`, a stop string that ends here is text."""
        if not text:
            return ""
        seen = len(self._held)
        pending = self._held + text
        if armed:
            match = self._find(pending, seen)
            if match is not None:
                start, end, stop = match
                self._held = ""
                return StopMatch(pending[: end if self._include else start], stop)
        split = self._start_of_held(pending)
        self._held = pending[split:]
        return pending[:split]

    def finish(self) -> str:
        """What was held back, when the answer ends without the stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, pending: str, seen: int) -> tuple[int, int, str] | None:
        """The first stop string that ends after `pending[:seen]`, as (start, end, stop)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = pending.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                end = start + len(stop)
                if best is None or (end, start) < (best[1], best[0]):
                    best = (start, end, stop)
        return best

    def _start_of_held(self, pending: str) -> int:
        for start in range(max(0, len(pending) - self._max_len + 1), len(pending)):
            if pending[start] in self._first_characters and any(
                len(stop) > len(pending) - start and stop.startswith(pending[start:]) for stop in self._stops
            ):
                return start
        return len(pending)
