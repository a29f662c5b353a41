"""Work on long texts and long answers: in threads, few at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized
from typing import TypeVar

T = TypeVar("T")

LARGE = 16 << 10  # bytes or characters: what takes some 20 ms to tokenize, during which no stream would move
LARGE_ANSWER = 8 << 10  # tokens, logprobs and numbers: what takes some 10 ms to shape and to encode
_MOST_AT_ONCE = 2  # the tokenization of a text takes some 200 times its memory


class HeavyWork:
    """Runs short work at once, and long work in a thread when one of few places is free. One event loop's own."""

    def __init__(self, most_at_once: int = _MOST_AT_ONCE) -> None:
        self._places = asyncio.Semaphore(most_at_once)

    async def run(self, text: Sized, work: Callable[[], T]) -> T:
        """What `work` returns, whose time and memory grow with the length of `text`."""
        return work() if len(text) < LARGE else await self.in_thread(work)

    async def shape(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns: an answer, or a piece of one, with about so many tokens, logprobs and numbers. A short
        request may have a long answer."""
        return work() if size < LARGE_ANSWER else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, which is known to be long."""
        await self._places.acquire()
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        thread.add_done_callback(self._leave)
        # A thread cannot be cancelled: it keeps its place after the one who waits for it has gone.
        return await asyncio.shield(thread)

    def _leave(self, thread: asyncio.Future[T]) -> None:
        self._places.release()
        if not thread.cancelled():
            thread.exception()  # somebody has seen it, also where nobody waits any more
