# mypy: disable-error-code="type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions are not Python to a type checker)
"""How threads divide the items of a compiled call, and do without one that has lost its core.

Each thread has a contiguous part of the items, so that it goes forwards through memory; when it is done it takes from
the parts of the others. Which part depends on the core that it runs on, so that in call after call a core reads what it
has written itself, as long as there is a core for each thread. What a thread computes just now it holds:

    thread 0   0 1 2 3      |  7    |  5, once more  |  the next call ...
    thread 1   4  5 - - - - - - - - - - - - - - - - - - 5
                  ^ another process has its core

Whoever finds nothing left to take waits a moment for what is held, and then computes that itself: an item gives the
same bits to the same place, whoever computes it and however often. So a call is over when its items are, not when all
threads have come. That holds where `mode` says so (see `program`) and there is a clock (`ticks`); without one it waits
for what is held, and in the other mode it just returns.

Memory of a call, int64: on one line mode, patience, the number of threads and the address of `PLACES`, and on a line
of its own for each thread what `_HELD` and those behind it name.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numba import njit

from .cores import PLACES
from .intrinsics import compare_exchange, current_core, fetch_add, give_way, load_acquire, pause, store_release, ticks

# In mode, behind the number of the run: whether who finds nothing left to take waits until all items are computed.
UNTIL_COMPUTED = 1
RUN = 2

_LINE = 64  # bytes that cores hand to each other as one
_PATIENCE, _NUM_THREADS, _PLACES = 8, 16, 24  # in the first line
# And in a thread's: the item that it holds + 1, or 0; how many others and it have taken of its part.
_HELD, _TAKEN = 0, 8
# For itself: the part that it takes from (the items in it, and where it is counted who took some), its items so far,
# when it took the first, and whether there is such a thread.
_FIRST, _STOP, _COUNTER, _NUM_OWN, _SINCE, _HAS_COME = 16, 24, 32, 40, 48, 56
_TAKING = -1  # held by a thread that is about to take an item
_WITHOUT_ITEM = 8  # times the least patience
_NUM_SPINS = 2_000
_OWN_ROWS = 128  # of a chunk. With half of them to unpack a weight for each thread takes longer.


def new_claims(num_threads: int) -> ctypes.Array[ctypes.c_int64]:
    """Memory for a call, for which nobody has come yet."""
    size = _LINE * (1 + num_threads) // 8
    memory = (ctypes.c_int64 * (size + _LINE // 8 - 1))()
    claims = (ctypes.c_int64 * size).from_buffer(memory, -ctypes.addressof(memory) % _LINE)
    claims[_NUM_THREADS // 8], claims[_PLACES // 8] = num_threads, PLACES.ctypes.data
    return claims


@njit(error_model="numpy")
def renew(claims: int, num_threads: int, mode: int, patience: int) -> None:
    """Nobody has come yet. Before a run: amid it, who comes back late may still look."""
    store_release(claims, mode)
    store_release(claims + _PATIENCE, patience)
    for thread in range(num_threads):
        store_release(_place(claims, thread) + _TAKEN, 0)
        store_release(_place(claims, thread) + _HAS_COME, 0)


@njit(error_model="numpy")
def enter(claims: int) -> int:
    """The number of the calling thread in this call: the place of its core, or the next one behind it that no other
    thread has. `claims` is the address of its memory; 0 where it is alone."""
    if claims == 0:
        return 0
    num_threads: Any = load_acquire(claims + _NUM_THREADS)
    number = _place_of_core(load_acquire(claims + _PLACES))
    while True:
        number %= num_threads
        has_come = _place(claims, number) + _HAS_COME
        if load_acquire(has_come) == 0 and compare_exchange(has_come, 0, 1):
            return number
        number += 1


@njit(error_model="numpy")
def _place_of_core(places: int) -> int:
    """Of the core that the calling thread runs on just now. `places`: the address of `PLACES`."""
    core: Any = current_core()
    place: Any = load_acquire(places + 8 * (1 + core)) if core < load_acquire(places) else core
    return place


@njit(error_model="numpy")
def even_chunks(num_chunks: int, num_rows: int, num_threads: int) -> int:
    """So many chunks of rows or some more: as many for each thread, where they have enough rows.

    Items that go by chunks are then, but for what is rounded, of a thread's own rows: it reads what it has written, but
    all of a weight. Between cores that do not share a cache that takes less time.
    """
    even = (num_chunks + num_threads - 1) // num_threads * num_threads
    return even if num_rows >= _OWN_ROWS * even else num_chunks


@njit(error_model="numpy")
def _place(claims: int, thread: int) -> int:
    """A thread's own line."""
    return claims + _LINE * (1 + thread)


@njit(error_model="numpy")
def first_item(num_threads: int, num_items: int, thread: int) -> int:
    """The first of a thread's own part; for the thread behind the last one, how many items there are."""
    return thread * num_items // num_threads


@njit(error_model="numpy")
def _go_to_part(claims: int, num_threads: int, num_items: int, own: int, owner: int) -> None:
    """Take from that of thread `owner` from now on."""
    store_release(own + _FIRST, first_item(num_threads, num_items, owner))
    store_release(own + _STOP, first_item(num_threads, num_items, owner + 1))
    store_release(own + _COUNTER, _place(claims, owner) + _TAKEN)


@njit(error_model="numpy")
def take_item(claims: int, num_threads: int, num_items: int, thread: int, item: int, lap: int) -> tuple[int, int]:
    """The next of `num_items` items for a thread that is done with `item`, and the lap to go on in.

    Both are -1 and 0 to begin with; the item is -1 behind the last. In lap 1 and later ones it is from the parts of
    others, in those behind them one that another holds.
    """
    if claims == 0:
        return (item + 1 if item + 1 < num_items else -1), 0
    own = _place(claims, thread)
    if item < 0:
        store_release(own + _NUM_OWN, 0)
        _go_to_part(claims, num_threads, num_items, own, thread)
    if lap <= num_threads:
        store_release(own + _HELD, _TAKING)
        while lap < num_threads:
            item = load_acquire(own + _FIRST) + fetch_add(load_acquire(own + _COUNTER), 1)
            if item < load_acquire(own + _STOP):
                _begin_item(own)
                store_release(own + _HELD, item + 1)
                return item, lap
            lap += 1
            _go_to_part(claims, num_threads, num_items, own, (thread + lap) % num_threads)
        store_release(own + _HELD, 0)
    else:
        compare_exchange(_place(claims, lap - num_threads - 1) + _HELD, item + 1, 0)
    if load_acquire(claims) & UNTIL_COMPUTED == 0:
        return -1, num_threads
    return _held_by_another(claims, num_threads, thread)


@njit(error_model="numpy")
def _begin_item(own: int) -> None:
    number: Any = load_acquire(own + _NUM_OWN)
    if number == 0:
        store_release(own + _SINCE, ticks())
    store_release(own + _NUM_OWN, number + 1)


@njit(error_model="numpy")
def _patience(claims: int, own: int) -> int:
    """For how many ticks from now on a thread waits for another: as long as its items have taken on average, with
    what it may have waited in between, or more."""
    least: Any = load_acquire(claims + _PATIENCE)
    number: Any = load_acquire(own + _NUM_OWN)
    # One who had no item does not know how long they take.
    return max((ticks() - load_acquire(own + _SINCE)) // number, least) if number > 0 else _WITHOUT_ITEM * least


@njit(error_model="numpy")
def _held_by_another(claims: int, num_threads: int, thread: int) -> tuple[int, int]:
    """An item that another thread has held for too long, and its lap; -1 when all items are computed."""
    own = _place(claims, thread)
    begin: Any = ticks()
    patience = _patience(claims, own)
    spins = 0
    while True:
        is_over = True
        for other in range(num_threads):
            held = load_acquire(_place(claims, other) + _HELD) if other != thread else 0
            if held > 0 and ticks() - begin > patience:
                _begin_item(own)
                return held - 1, num_threads + 1 + other
            is_over = is_over and held == 0
        if is_over:
            return -1, num_threads
        spins += 1
        if spins < _NUM_SPINS:
            pause()
        else:
            give_way()
