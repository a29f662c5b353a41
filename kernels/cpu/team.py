# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, no-untyped-def"
# (compiled functions are not Python to a type checker)
"""Threads that run a compiled function beside the thread that asks for it, which may do something else meanwhile.

    this thread   start | plans the next step, sends the last one's tokens | join: helps   |
    helpers             | the function, called once by each                | ............. |

OpenMP's teams begin and end with whoever calls them. These are plain threads of the system: what they call is compiled,
so they take part in nothing of Python's. A helper with nothing to do looks for some microseconds whether there is
something, and then sleeps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import weakref
from typing import Any

from numba import cfunc, types

from .intrinsics import (
    call_address,
    compare_exchange,
    exchange,
    fetch_add,
    give_way,
    load_acquire,
    load_in_order,
    pause,
    store_release,
)
from .sources import digest_of
from .threads import has_helpers

logger = logging.getLogger(__name__)

_LINE = 64  # bytes that cores hand to each other as one
# Places in the memory of a team: how often helpers were asked for something, for what, whether somebody joins them, and
# whether they are to end; functions of the C library.
_ORDERS, _FUNCTION, _ARGUMENT, _STATE, _HAS_ENDED, _NUM_HELPERS, _SEM_WAIT, _SEM_POST = range(0, 64, 8)
_AT_REST, _ASKED, _JOINED = range(3)  # states
_NUM_DONE, _NUM_BEGUN, _HELPERS = _LINE, 2 * _LINE, 3 * _LINE  # helpers that are done with it, and that there are
_IS_ASLEEP, _SEMAPHORE, _HELPER_BYTES = 0, _LINE, 2 * _LINE  # in that of a helper; a `sem_t` has 32 bytes at most
_NUM_SPINS = 2_000  # some tens of microseconds
_NUM_YIELDS = 2_000  # then others may have the core


class Team:
    """`num_threads` - 1 helpers, or fewer where the system has no more. They end when this is dropped.

    One thread at a time asks them, for one thing. Any may join them, and one does.
    """

    def __init__(self, num_threads: int) -> None:
        size = _HELPERS + _HELPER_BYTES * (num_threads - 1)
        memory = ctypes.create_string_buffer(size + _LINE)
        self._address = ctypes.addressof(memory) + -ctypes.addressof(memory) % _LINE
        handles = _started(self._address, num_threads - 1)
        self.num_threads = 1 + len(handles)
        self._memory = memory  # longer than helpers need it: whoever is garbage with this may join them after their end
        self._owners: list[object] = []
        self._state = _at(self._address + _STATE)
        weakref.finalize(self, _end, handles, self._address, memory, self._owners)
        _teams.add(self)

    def start(self, function: int, argument: int, owner: object) -> None:
        """Each helper calls `function(argument)`, a compiled `void (int64)` at an address, from now on.

        They are at rest: nobody has asked them for something that was not joined. `owner` keeps its memory.
        """
        self._owners[:] = [owner]
        _ask(self._address, function, argument)

    def join(self) -> None:
        """Call it on this thread as well, and return when all have returned. Python's other threads run meanwhile.

        Where another thread has joined them, wait for it; where they are at rest, do nothing."""
        if self._state.value != _AT_REST:  # to call it would let others have the interpreter
            _help(self._address)
        self._owners.clear()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def join_all() -> None:
    """Nobody is asked for anything any more when this returns."""
    for team in list(_teams):
        team.join()


class _TeamOfThread(threading.local):
    team: Team | None = None
    num_threads = 0


_of_thread = _TeamOfThread()


def team_of(num_threads: int) -> Team:
    """That of the calling thread."""
    if _of_thread.team is None or _of_thread.num_threads != num_threads:
        _of_thread.team, _of_thread.num_threads = Team(num_threads), num_threads
    return _of_thread.team


def _started(address: int, count: int) -> list[ctypes.c_ulong]:
    """So many helpers, or as many as there can be."""
    if not has_helpers(1 + count):
        return []
    library = ctypes.CDLL(None)
    for place, function in ((_SEM_WAIT, library.sem_wait), (_SEM_POST, library.sem_post)):
        _at(address + place).value = ctypes.cast(function, ctypes.c_void_p).value or 0
    # A signal is for Python's threads: they are blocked in what is started here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _started_by(library, address, count)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started_by(library: ctypes.CDLL, address: int, count: int) -> list[ctypes.c_ulong]:
    handles: list[ctypes.c_ulong] = []
    for index in range(count):
        library.sem_init(ctypes.c_void_p(address + _HELPERS + _HELPER_BYTES * index + _SEMAPHORE), 0, 0)
        handle, arguments = ctypes.c_ulong(), (ctypes.c_void_p(_helper.address), ctypes.c_void_p(address))
        error = library.pthread_create(ctypes.byref(handle), None, *arguments)
        if error != 0:
            logger.warning("Kernels run on %d threads: no other could be started (%s)", 1 + index, os.strerror(error))
            break
        library.pthread_setname_np(handle, b"kernels")
        handles.append(handle)
    _at(address + _NUM_HELPERS).value = len(handles)
    return handles


def _end(handles: list[ctypes.c_ulong], address: int, memory: object, owners: list[object]) -> None:
    """The memory is theirs until they have ended."""
    _help(address)
    _at(address + _HAS_ENDED).value = 1
    _ask(address, 0, 0)
    for handle in handles:
        ctypes.CDLL(None).pthread_join(handle, None)
    _at(address + _STATE).value = _AT_REST
    del memory, owners


def _at(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _helper_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(team):
        """One helper, from its beginning to its end."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        own = team + _HELPERS + _HELPER_BYTES * fetch_add(team + _NUM_BEGUN, 1)
        num_orders = 0
        while True:
            spins = 0
            while load_acquire(team + _ORDERS) == num_orders:
                spins += 1
                if spins < _NUM_SPINS:
                    pause()
                    continue
                if spins < _NUM_SPINS + _NUM_YIELDS:
                    give_way()
                    continue
                exchange(own + _IS_ASLEEP, 1)
                # Either is seen: that it sleeps by whoever asks, or here that it was asked. Whoever takes the note
                # away wakes it up.
                if load_in_order(team + _ORDERS) == num_orders or exchange(own + _IS_ASLEEP, 0) == 0:
                    call_address(load_acquire(team + _SEM_WAIT), own + _SEMAPHORE)
                spins = 0
            if load_acquire(team + _HAS_ENDED) != 0:
                return
            num_orders += 1
            call_address(load_acquire(team + _FUNCTION), load_acquire(team + _ARGUMENT))
            fetch_add(team + _NUM_DONE, 1)

    return worker


def _asker(sources: str) -> Any:
    @cfunc(types.void(types.int64, types.int64, types.int64), cache=True, error_model="numpy")
    def worker(team, function, argument):
        sources  # noqa: B018 (likewise)
        store_release(team + _NUM_DONE, 0)
        store_release(team + _STATE, _ASKED)
        store_release(team + _FUNCTION, function)
        store_release(team + _ARGUMENT, argument)
        fetch_add(team + _ORDERS, 1)
        for index in range(load_acquire(team + _NUM_HELPERS)):
            own = team + _HELPERS + _HELPER_BYTES * index
            if exchange(own + _IS_ASLEEP, 0) == 1:
                call_address(load_acquire(team + _SEM_POST), own + _SEMAPHORE)

    return worker


def _helping(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(team):
        sources  # noqa: B018 (likewise)
        spins = 0
        if compare_exchange(team + _STATE, _ASKED, _JOINED):
            call_address(load_acquire(team + _FUNCTION), load_acquire(team + _ARGUMENT))
            while load_acquire(team + _NUM_DONE) < load_acquire(team + _NUM_HELPERS):
                spins += 1
                if spins < _NUM_SPINS:
                    pause()
                else:
                    give_way()
            store_release(team + _STATE, _AT_REST)
        while load_acquire(team + _STATE) == _JOINED:  # by another
            give_way()

    return worker


_SOURCES = digest_of("intrinsics")
_helper = _helper_worker(_SOURCES)
_ask = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_asker(_SOURCES).address)
_help = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_helping(_SOURCES).address)
