# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, no-untyped-def"
# (compiled functions and their views into memory are not Python to a type checker)
"""Compiled calls in a list that all threads walk through together.

    thread 0   | norm | linear    |  | rotate | attend |   ...
    thread 1   |      | linear  | .. |        | attend | .. ...
                                  ^ waits for the others, for a fraction of a microsecond

Calling them one by one from Python costs 10 to 30 µs each, and as much for threads to fall asleep in between and wake
up again. That is more than most of them take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types

from .intrinsics import ask_address, call_address, fetch_add, give_way, load_acquire, pause, pointer, store_release
from .recording import CompiledCall
from .sources import digest_of
from .threads import run_parallel, team_size_function

_CALL = np.dtype([("function", np.int64), ("argument", np.int64), ("counters", np.int64), ("num_counters", np.int64)])
_PROGRAM = np.dtype([("calls", np.int64), ("num_calls", np.int64), ("team_size", np.int64), ("meeting", np.int64)])
_NUMBER = np.dtype([("address", np.int64), ("times", np.int64), ("per", np.int64), ("most", np.int64)])
_LINE = 64  # bytes that cores hand to each other as one
_NUM_SPINS = 2_000  # some tens of microseconds; then whoever else wants this core may have it


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _PROGRAM.names or ()]


class Program:
    """Calls that were made once, to be repeated on the same memory."""

    def __init__(self, calls: Sequence[CompiledCall]) -> None:
        self._owners = [call.arguments for call in calls]
        self._calls = np.array(
            [
                (_address(call.function), ctypes.addressof(call.arguments), call.counters, call.num_counters)
                for call in calls
            ],
            _CALL,
        )
        for call in calls:
            ctypes.memset(call.counters, 0, 8 * call.num_counters)
        self._numbers = np.array(
            [
                (ctypes.addressof(call.arguments) + number.offset, number.times, number.per, number.most)
                for call in calls
                for number in call.rows or ()
            ],
            _NUMBER,
        )
        # Two counters on lines of their own: how often threads have come to the end of a call, and calls that are over.
        self._meeting = np.zeros(3 * _LINE // 8, np.int64)
        first = self._meeting.ctypes.data
        self._num_threads = torch.get_num_threads()  # buffers of the calls are made for as many
        self._arguments = _Arguments(self._calls.ctypes.data, len(calls), team_size_function(), first + -first % _LINE)

    def run_for(self, num_rows: int) -> None:
        """The calls as they would be made for so many rows, if all are for any number."""
        _write_rows(self._numbers.ctypes.data, len(self._numbers), num_rows)
        self.run()

    def run(self) -> None:
        """All calls, in order. Python's other threads run meanwhile."""
        self._meeting[:] = 0
        run_parallel(_walker.ctypes, ctypes.addressof(self._arguments), self._num_threads)


def _address(function: ctypes._CFunctionType) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _rows_writer(sources: str) -> Any:
    @cfunc(types.void(types.int64, types.int64, types.int64), cache=True, error_model="numpy")
    def worker(address, count, num_rows):
        """See `recording.Rows`."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        for number in carray(pointer(address), (count,), _NUMBER):
            wanted = (num_rows * number.times + number.per - 1) // number.per
            carray(pointer(number.address), (1,), np.int64)[0] = min(wanted, number.most)

    return worker


def _walk(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address):
        """One thread. Whoever comes last to the end of a call sets its counters back, for the next who uses them."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        program = carray(pointer(address), (1,), _PROGRAM)[0]
        calls = carray(pointer(program.calls), (program.num_calls,), _CALL)
        num_threads = ask_address(program.team_size) if program.team_size != 0 else 1
        come, over = program.meeting, program.meeting + _LINE
        for index in range(program.num_calls):
            call = calls[index]
            call_address(call.function, call.argument)
            if fetch_add(come, 1) == (index + 1) * num_threads - 1:
                counters = carray(pointer(call.counters), (call.num_counters,), np.int64)
                for i in range(call.num_counters):
                    counters[i] = 0
                store_release(over, index + 1)
            else:
                spins = 0
                while load_acquire(over) <= index:
                    spins += 1
                    if spins < _NUM_SPINS:
                        pause()
                    else:
                        give_way()

    return worker


_SOURCES = digest_of("intrinsics")
_WRITER = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_write_rows = _WRITER(_rows_writer(_SOURCES).address)
_walker = _walk(_SOURCES)
