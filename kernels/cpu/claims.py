# mypy: disable-error-code="type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions are not Python to a type checker)
"""How threads divide the items of a compiled call, and do without one that has lost its core.

Each thread has a contiguous part of the items, so that it goes forwards through memory; when it is done it takes from
the parts of the others. What it computes just now it holds:

    thread 0   0 1 2 3      |  7    |  5, once more  |  the next call ...
    thread 1   4  5 - - - - - - - - - - - - - - - - - - 5
                  ^ another process has its core

Whoever finds nothing left to take waits a moment for what is held, and then computes that itself: an item gives the
same bits to the same place, whoever computes it and however often. So a call is over when its items are, not when all
threads have come. That holds where `mode` says so (see `program`) and there is a clock (`ticks`); without one it waits
for what is held, and in the other mode it just returns.

Memory of a call, int64: mode, patience, threads that have come, items taken of each part; and on a line of its own for
each thread, what it holds and since when.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numba import njit

from .intrinsics import compare_exchange, fetch_add, give_way, load_acquire, pause, store_release, ticks

# In mode, behind the number of the run: whether who finds nothing left to take waits until all items are computed.
UNTIL_COMPUTED = 1
RUN = 2

_LINE = 8  # words that cores hand to each other as one
_TAKING = -1  # held by a thread that is about to take an item; else it is the item + 1, or 0
_WITHOUT_ITEM = 8  # times the least patience
_NUM_SPINS = 2_000


FIRST_COUNTER = 2


def num_counters(num_threads: int) -> int:
    """Words that are zero before a call and anything behind it; from FIRST_COUNTER on."""
    return 1 + num_threads


def new_claims(num_threads: int) -> ctypes.Array[ctypes.c_int64]:
    """Memory for a call, for which nobody has come yet."""
    return (ctypes.c_int64 * (_first_line(num_threads) + _LINE * num_threads))()


def _first_line(num_threads: int) -> int:
    return (3 + num_threads + _LINE - 1) // _LINE * _LINE


@njit(error_model="numpy")
def enter(claims: int) -> int:
    """The number of the calling thread in this call. `claims` is the address of its memory; 0 where it is alone."""
    return fetch_add(claims + 16, 1) if claims != 0 else 0


@njit(error_model="numpy")
def _place(claims: int, num_threads: int, thread: int) -> int:
    """Where it is written what a thread holds."""
    return claims + 8 * ((3 + num_threads + _LINE - 1) // _LINE * _LINE + _LINE * thread)


@njit(error_model="numpy")
def take_item(claims: int, num_threads: int, num_items: int, thread: int, item: int, lap: int) -> tuple[int, int]:
    """The next of `num_items` items for a thread that is done with `item`, and the lap to go on in.

    Both are -1 and 0 to begin with; the item is -1 behind the last. In lap 1 and later ones it is from the parts of
    others, in those behind them one that another holds.
    """
    if claims == 0:
        return (item + 1 if item + 1 < num_items else -1), 0
    own = _place(claims, num_threads, thread)
    least: Any = load_acquire(claims + 8)
    # One who had no item does not know how long they take.
    patience = max(ticks() - load_acquire(own + 8), least) if item >= 0 else _WITHOUT_ITEM * least
    if lap <= num_threads:
        store_release(own, _TAKING)
        while lap < num_threads:
            owner = (thread + lap) % num_threads
            item = owner * num_items // num_threads + fetch_add(claims + 24 + 8 * owner, 1)
            if item < (owner + 1) * num_items // num_threads:
                store_release(own + 8, ticks())
                store_release(own, item + 1)
                return item, lap
            lap += 1
        store_release(own, 0)
    else:
        compare_exchange(_place(claims, num_threads, lap - num_threads - 1), item + 1, 0)
    if load_acquire(claims) & UNTIL_COMPUTED == 0:
        return -1, num_threads
    return _held_by_another(claims, num_threads, thread, patience)


@njit(error_model="numpy")
def _held_by_another(claims: int, num_threads: int, thread: int, patience: int) -> tuple[int, int]:
    """An item that another thread has held for longer than `patience` ticks from now, and its lap; -1 when all items
    are computed."""
    begin: Any = ticks()
    spins = 0
    while True:
        is_over = True
        for other in range(num_threads):
            held = load_acquire(_place(claims, num_threads, other)) if other != thread else 0
            if held > 0 and ticks() - begin > patience:
                store_release(_place(claims, num_threads, thread) + 8, ticks())
                return held - 1, num_threads + 1 + other
            is_over = is_over and held == 0
        if is_over:
            return -1, num_threads
        spins += 1
        if spins < _NUM_SPINS:
            pause()
        else:
            give_way()
