"""Work on long texts: in threads, few at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import TypeVar

T = TypeVar("T")

LARGE = 16 << 10  # bytes or characters: what takes some 20 ms to tokenize, during which no stream would move
_MOST_AT_ONCE = 2  # the tokenization of a text takes some 200 times its memory


class HeavyWork:
    """Runs short work at once, and long work in a thread when one of few places is free. One event loop's own."""

    def __init__(self, most_at_once: int = _MOST_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(most_at_once)

    async def run(self, text: Sized, work: Callable[[], T]) -> T:
        """What `work` returns, whose time and memory grow with the length of `text`."""
        if len(text) < LARGE:
            return work()
        await self._places.acquire()
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(self._leave)
        # A thread cannot be cancelled: it keeps its place after the one who waits for it has gone.
        return await asyncio.shield(thread)

    def _leave(self, thread: asyncio.Future[T]) -> None:
        self._places.release()
        if not thread.cancelled():
            thread.exception()  # somebody has seen it, also where nobody waits any more
