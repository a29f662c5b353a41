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
        self._places_for_answers = asyncio.Semaphore(most_at_once)  # which are shaped beside prompts, not before them

    async def run(self, text: Sized, work: Callable[[], T]) -> T:
        """What `work` returns, whose time and memory grow with the length of `text`."""
        return work() if len(text) < LARGE else await _in_thread(self._places, work)

    async def shape(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns: an answer, or a piece of one, with about so many tokens, logprobs and numbers. A short
        request may have a long answer."""
        return work() if size < LARGE_ANSWER else await _in_thread(self._places_for_answers, work)


async def _in_thread(places: asyncio.Semaphore, work: Callable[[], T]) -> T:
    await places.acquire()
    thread = asyncio.ensure_future(asyncio.to_thread(work))

    def leave(thread: asyncio.Future[T]) -> None:
        places.release()
        if not thread.cancelled():
            thread.exception()  # somebody has seen it, also where nobody waits any more

    thread.add_done_callback(leave)
    # A thread cannot be cancelled: it keeps its place after the one who waits for it has gone.
    return await asyncio.shield(thread)
