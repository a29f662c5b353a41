"""Whether the calls of this thread are being recorded, and what a compiled call has to say of itself for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol


class NotCapturableError(Exception):
    """What is being recorded would not be the same for other numbers, or cannot be repeated."""


class CompiledCall(NamedTuple):
    """`function(address of the arguments)`, called by every thread at once.

    Threads divide the work by counters, which are zero before the call and anything behind it.
    """

    function: Any  # ctypes function pointer: void (void *)
    arguments: Any  # ctypes structure or array
    counters: int  # address of int64
    num_counters: int


class Recorder(Protocol):
    """What listens while a forward is recorded. What it is told of is done all the same."""

    def add_call(self, call: CompiledCall) -> None: ...

    def add_action(self, action: Callable[[], object]) -> None:
        """Python code that has to run at this place whenever the record is repeated."""
        ...


_of_thread = threading.local()


def recorder() -> Recorder | None:
    """The recorder of this thread, if there is one."""
    found: Recorder | None = getattr(_of_thread, "recorder", None)
    return found


@contextmanager
def recorded_by(listener: Recorder) -> Iterator[None]:
    _of_thread.recorder = listener
    try:
        yield
    finally:
        _of_thread.recorder = None


def only_unrecorded(reason: str) -> None:
    """Raises `NotCapturableError` while somebody records: what follows looks at numbers."""
    if recorder() is not None:
        raise NotCapturableError(reason)
