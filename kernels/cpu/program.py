# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, no-untyped-def"
# (compiled functions and their views into memory are not Python to a type checker)
"""Compiled calls in a list that all threads walk through together.

    thread 0   | norm | linear    |  | rotate | attend |   ...
    thread 1   |      | linear  | .. |        | attend | .. ...
                                  ^ waits for the others, for a fraction of a microsecond

Calling them one by one from Python costs 10 to 30 µs each, and as much for threads to fall asleep in between and wake
up again. That is more than most of them take.

Wherever other processes want a core now and then, a thread loses it amid a call, for as long as they have something to
do, and the others would wait for it: each moment that is taken from one thread would be taken from all. So idempotent
calls may be `lag` ahead of a thread that has not come back: the others compute what it holds (`claims`), and go on
without it.

    thread 0   | norm | linear ------ | rotate | attend | linear -- | norm |
    thread 1   |      | linear  - - - - - - - - - - - -    | linear | norm |
                              ^ has lost its core         ^ has it again, and goes where the others are

So does who asked for a program and comes later, as it had something else to do. Who has been away may still write what
it was to write, to the same place and with the same bits. So no call of the next `lag` may use
the memory of a call for something else, which is up to whoever records them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from .claims import RUN, UNTIL_COMPUTED, renew
from .intrinsics import (
    call_address,
    exchange,
    fetch_add,
    fetch_max,
    give_way,
    load_acquire,
    load_in_order,
    pause,
    pointer,
    store_release,
)
from .recording import CompiledCall, place_of_rows
from .sources import digest_of
from .team import Team, team_of

_CALL = np.dtype(
    [
        ("function", np.int64),
        ("argument", np.int64),
        ("claims", np.int64),
        ("begins_after", np.int64),  # calls that no thread may be amid any more
        ("num_met", np.int64),  # calls before it at whose end all threads meet; -1 if it is not such a call
        ("rows", np.int64),  # address of how many it is for, if it may be none, and nothing is to be done; or 0
    ]
)
_PROGRAM = np.dtype(
    [(name, np.int64) for name in ("calls", "num_calls", "team_size", "meeting", "run", "patience", "num_threads")]
)
_NUMBER = np.dtype([("address", np.int64), ("times", np.int64), ("per", np.int64), ("most", np.int64)])
_LINE = 64  # bytes that cores hand to each other as one
LEAST_PATIENCE = 20_000  # ticks until one computes what another holds: 5 to 10 µs on x86
_PLACES = 4  # lines of a meeting that come before those of the threads
_NUM_SPINS = 2_000  # some tens of microseconds; then whoever else wants this core may have it


class _Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _PROGRAM.names or ()]


class Program:
    """Calls that were made once, to be repeated on the same memory."""

    def __init__(self, calls: Sequence[CompiledCall], lag: int = 0) -> None:
        """lag: calls that threads may be ahead of one that has lost its core; 0: they wait for it in each."""
        self._owners = [(call.arguments, call.claims) for call in calls]
        meets = [lag == 0 or not call.is_idempotent for call in calls]
        num_met = accumulate(meets, initial=0)
        self._calls = np.array(
            [
                (
                    _address(call.function),
                    ctypes.addressof(call.arguments),
                    ctypes.addressof(call.claims),
                    after,
                    met,
                    place_of_rows(call),
                )
                for call, after, met in zip(
                    calls,
                    _begins_after(calls, meets, lag),
                    (number if meet else -1 for number, meet in zip(num_met, meets, strict=False)),
                    strict=True,
                )
            ],
            _CALL,
        )
        self._numbers = np.array(
            [
                (ctypes.addressof(call.arguments) + number.offset, number.times, number.per, number.most)
                for call in calls
                for number in call.rows or ()
            ],
            _NUMBER,
        )
        self.num_threads = torch.get_num_threads()  # memory of the calls is made for as many
        self._team: Team | None = None
        # On lines of their own: how often threads have come to the end of a call where they meet, calls that are over,
        # threads that have begun, whether calls are ready; and for each thread, the call that it is amid.
        self._meeting = np.zeros((_PLACES + 1 + self.num_threads) * _LINE // 8, np.int64)
        first = self._meeting.ctypes.data
        self._arguments = _Arguments(
            self._calls.ctypes.data,
            len(calls),
            0,
            first + -first % _LINE,
            0,
            LEAST_PATIENCE,
            self.num_threads,
        )

    def run_for(self, num_rows: int) -> None:
        """The calls as they would be made for so many rows, if all are for any number."""
        _write_rows(self._numbers.ctypes.data, len(self._numbers), num_rows)
        self()

    @property
    def has_helpers(self) -> bool:
        """Whether threads beside this one begin with it when it is started."""
        return team_of(self.num_threads).num_threads > 1

    def __call__(self) -> None:
        """All calls, in order. Python's other threads run meanwhile."""
        self.start()
        self.join()

    def start(self) -> None:
        """Threads beside this one begin with the calls, as far as they come without it."""
        self._team = team_of(self.num_threads)
        self._team.join()  # for whoever was interrupted before it did, perhaps amid this program
        self._meeting[:] = 0
        self._arguments.run += 1
        self._arguments.team_size = self._team.num_threads
        self._team.start(_walker.address, ctypes.addressof(self._arguments), self)

    def join(self) -> None:
        """Take part in what was started, until all calls are over."""
        assert self._team is not None
        self._team.join()


def _begins_after(calls: Sequence[CompiledCall], meets: Sequence[bool], lag: int) -> list[int]:
    """By call: how many of those before it no thread may be amid any more when it begins."""
    found, last_use = [], {0: 0}
    for index, (call, meet) in enumerate(zip(calls, meets, strict=True)):
        found.append(index if meet and lag else max(index - lag, last_use.get(call.scratch, 0), 0))
        if call.scratch:
            last_use[call.scratch] = index + 1
    return found if lag else [0] * len(calls)


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


@njit(error_model="numpy")
def _make_ready(program):
    """Nobody has come to any call, or is amid one."""
    for thread in range(program.team_size):
        store_release(program.meeting + (_PLACES + thread) * _LINE, program.num_calls)
    for call in carray(pointer(program.calls), (program.num_calls,), _CALL):
        mode = program.run * RUN + (UNTIL_COMPUTED if call.num_met < 0 else 0)
        renew(call.claims, program.num_threads, mode, program.patience)


@njit(error_model="numpy")
def _wait_until(place, value):
    spins = 0
    while load_in_order(place) < value:
        spins += 1
        if spins < _NUM_SPINS:
            pause()
        else:
            give_way()


def _walk(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address):
        """One thread. It goes where the others are when it has been away, or comes late."""
        sources  # noqa: B018 (likewise)
        program = carray(pointer(address), (1,), _PROGRAM)[0]
        num_calls = program.num_calls
        calls = carray(pointer(program.calls), (num_calls,), _CALL)
        num_threads = program.team_size
        come, over = program.meeting, program.meeting + _LINE
        begun, ready = program.meeting + 2 * _LINE, program.meeting + 3 * _LINE
        places = program.meeting + _PLACES * _LINE
        number = fetch_add(begun, 1)
        if number == 0:  # who comes first, while the others may have something else to do
            _make_ready(program)
            store_release(ready, 1)
        _wait_until(ready, 1)
        own = places + _LINE * number
        exchange(own, 0)  # first, so that nobody goes on too far without it from where it finds them
        index = load_in_order(over)
        while index < num_calls:
            call = calls[index]
            store_release(own, index)
            for thread in range(num_threads if call.begins_after > 0 else 0):
                _wait_until(places + _LINE * thread, call.begins_after)  # behind `over`: see who comes late
            if call.rows == 0 or carray(pointer(call.rows), (1,), np.int64)[0] > 0:
                call_address(call.function, call.argument)
            if call.num_met < 0:
                fetch_max(over, index + 1)
            elif fetch_add(come, 1) == (call.num_met + 1) * num_threads - 1:
                store_release(over, index + 1)
            else:
                _wait_until(over, index + 1)
            index = max(index + 1, load_acquire(over))
        store_release(own, num_calls)

    return worker


_SOURCES = digest_of("claims", "intrinsics", "team")
_WRITER = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_write_rows = _WRITER(_rows_writer(_SOURCES).address)
_walker = _walk(_SOURCES)
