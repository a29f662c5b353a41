"""Ctrl-C between steps: one in the middle of a step would leave the engine with half of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_afterwards() -> Iterator[None]:
    """What SIGINT does in this thread happens when the block ends, however it ends, or at once when it comes twice.

    Only the main thread is interrupted; elsewhere, and where nothing in Python handles SIGINT, nothing changes.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(frame)
        if len(noted) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(noted) == 1:
            handler(signal.SIGINT, noted[0])
