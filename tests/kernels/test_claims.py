"""Threads do without one that has lost its core, and what it was to write is written once or to the same bits."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc, types

from quire.kernels.cpu.claims import (
    _PLACES,
    RUN,
    UNTIL_COMPUTED,
    _patience,
    _place,
    enter,
    even_chunks,
    new_claims,
    renew,
    take_item,
)
from quire.kernels.cpu.cores import PLACES, place_cores
from quire.kernels.cpu.graph import Pool
from quire.kernels.cpu.intrinsics import IS_X86, fetch_add, give_way, load_acquire, pointer, store_release
from quire.kernels.cpu.program import Program, _begins_after
from quire.kernels.cpu.recording import CompiledCall
from quire.kernels.cpu.team import Team

NUM_THREADS, NUM_ITEMS, LAG = 2, 12, 4
NUM_CALLS = 3 * LAG
STALLED_ITEM = 7
MANY = 20_000_000  # times a core is given up: some seconds
_FIELDS = ("claims", "num_threads", "number", "adds", "x", "out", "shared", "seen", "stalls", "releases")
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])
_STALLED, _RELEASED, _OVER, _GAVE_UP = range(0, 32, 8)  # bytes, in what all calls share

pytestmark = pytest.mark.skipif(
    Team(NUM_THREADS).num_threads < NUM_THREADS or not IS_X86, reason="one thread, or no clock"
)


@cfunc(types.void(types.int64))
def _call(address: int) -> None:
    """out = x + number, or out += number; whoever first takes one item of one call is then away for a while."""
    a = carray(pointer(address), (1,), _ARGUMENTS)[0]
    x, out = carray(pointer(a.x), (NUM_ITEMS,), np.int64), carray(pointer(a.out), (NUM_ITEMS,), np.int64)
    thread, item, lap = enter(a.claims), -1, 0
    while True:
        item, lap = take_item(a.claims, a.num_threads, NUM_ITEMS, thread, item, lap)
        if item < 0:
            return
        if load_acquire(a.seen) < 0:  # whichever item is taken first
            store_release(a.seen, load_acquire(a.shared + _OVER))
        if a.releases:
            store_release(a.shared + _RELEASED, 1)
        before = out[item]
        if a.stalls and item == STALLED_ITEM and fetch_add(a.shared + _STALLED, 1) == 0:
            count = 0
            while load_acquire(a.shared + _RELEASED) == 0 and count < a.stalls:
                give_way()
                count += 1
            store_release(a.shared + _GAVE_UP, count == a.stalls)
            store_release(a.shared + _OVER, 1)
        out[item] = (before if a.adds else x[item]) + a.number


class Calls:
    """`stalls`: how often the one who is away gives up its core, at most, until another call lets it come back."""

    def __init__(self, stalled: int, stalls: int, releasing: int | None, in_place: bool = False) -> None:
        self.values = np.zeros((NUM_CALLS + 1, NUM_ITEMS), np.int64)
        self.shared, self.seen = np.zeros(4, np.int64), np.full(NUM_CALLS, -1)
        self.calls = [self._call(i, stalls if i == stalled else 0, i == releasing, in_place) for i in range(NUM_CALLS)]

    def _call(self, index: int, stalls: int, releases: bool, in_place: bool) -> CompiledCall:
        claims, out = new_claims(NUM_THREADS), self.values[0 if in_place else index + 1]
        arguments = (ctypes.c_int64 * len(_FIELDS))(
            ctypes.addressof(claims), NUM_THREADS, index + 1, in_place, self.values[index].ctypes.data, out.ctypes.data,
            self.shared.ctypes.data, self.seen[index:].ctypes.data, stalls, releases,
        )  # fmt: skip
        return CompiledCall(_call.ctypes, arguments, claims, is_idempotent=not in_place)

    def shared_at(self, place: int) -> Any:
        return self.shared[place // 8]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


def test_the_others_go_on_without_one_that_is_away_but_not_too_far() -> None:
    """It comes back when they have come as far as they may: to the call that lets it."""
    stalled = 2
    calls = Calls(stalled, MANY, releasing=stalled + LAG)
    program = Program(calls.calls, LAG)
    for _ in range(20):
        calls.values[:], calls.shared[:], calls.seen[:] = 0, 0, -1
        program()
        assert calls.shared_at(_STALLED) == 2  # one was away, and somebody did its work
        assert calls.shared_at(_GAVE_UP) == 0
        assert calls.seen.tolist() == [0] * (stalled + LAG + 1) + [1] * (NUM_CALLS - stalled - LAG - 1)
        assert calls.values.tolist() == [[sum(range(1, i + 1))] * NUM_ITEMS for i in range(NUM_CALLS + 1)]


def test_who_only_helps_waits_no_longer_than_that_took() -> None:
    """Two hold an item each and do not come back; a third, which has none of its own, computes both."""
    claims = new_claims(3)
    address, thread, num_items = ctypes.addressof(claims), [0, 1, 2], 2
    renew(address, 3, RUN + UNTIL_COMPUTED, 1000)
    assert sorted(enter(address) for _ in thread) == thread
    assert [take_item(address, 3, num_items, other, -1, 0) for other in (1, 2)] == [(0, 0), (1, 0)]
    first, lap = take_item(address, 3, num_items, 0, -1, 0)
    assert 1000 <= _patience(address, _place(address, 0)) < 10**11, "not since the machine was started"
    second, lap = take_item(address, 3, num_items, 0, first, lap)
    assert {first, second} == {0, 1}, "in either order: the clock may run out between two looks"
    assert take_item(address, 3, num_items, 0, second, lap)[0] == -1


def test_cores_that_share_their_hardware_come_last() -> None:
    """However they are numbered: threads, one for each piece of hardware, are in different places."""
    far = place_cores(range(8), {core: [core % 4, core % 4 + 4] for core in range(8)})
    beside = place_cores(range(8), {core: [core // 2 * 2, core // 2 * 2 + 1] for core in range(8)})
    assert far == [0, 1, 2, 3, 4, 5, 6, 7]
    assert beside == [0, 4, 1, 5, 2, 6, 3, 7]
    assert place_cores({2, 6, 7}, {}) == [0, 0, 0, 0, 0, 0, 1, 2]
    alone = place_cores({1, 5, 6}, {core: [core % 4, core % 4 + 4] for core in range(8)})
    assert [alone[core] for core in (1, 6, 5)] == [0, 1, 2], "6 shares with nobody that may be used"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be bound to a core")
def test_a_core_has_the_same_part_of_each_call() -> None:
    """Whoever comes first; who comes with a core whose part is taken gets the next one."""
    allowed, num_threads = os.sched_getaffinity(0), 3
    claims, seen = new_claims(num_threads), {}
    address, places = ctypes.addressof(claims), PLACES[1:].tolist()
    told = np.array([len(places), *(place + 1 for place in places)])  # others than they have
    claims[_PLACES // 8] = told.ctypes.data
    first, *others = sorted(allowed, key=lambda core: places[core])[:2]
    try:
        for core in (first, *others, first):
            os.sched_setaffinity(0, {core})
            for _ in range(3):
                renew(address, num_threads, RUN, 1000)
                numbers = [enter(address) for _ in range(num_threads)]
                assert numbers == [(numbers[0] + i) % num_threads for i in range(num_threads)]
                assert seen.setdefault(core, numbers) == numbers
    finally:
        os.sched_setaffinity(0, allowed)
    assert [numbers[0] for numbers in seen.values()] == [1, 2][: len(seen)]


def test_threads_have_as_many_chunks_of_rows() -> None:
    """Where these have 128 rows: else there are no more than have to be."""
    assert [even_chunks(1, rows, 2) for rows in (1, 255, 256, 512)] == [1, 1, 2, 2]
    assert [even_chunks(3, rows, 2) for rows in (511, 512)] == [3, 4]
    assert [even_chunks(chunks, 512, 4) for chunks in (1, 3, 4, 5)] == [4, 4, 4, 5]
    assert even_chunks(3, 1024, 1) == 3


@pytest.mark.parametrize("lag", [0, LAG])
def test_what_is_changed_in_place_is_changed_once(lag: int) -> None:
    """However long one is away, the others wait."""
    calls = Calls(stalled=2, stalls=5_000, releasing=None, in_place=True)
    Program(calls.calls, lag)()
    assert calls.shared_at(_STALLED) == 1
    assert calls.seen.tolist() == [0, 0, 0] + [1] * (NUM_CALLS - 3)
    assert calls.values[0].tolist() == [sum(range(1, NUM_CALLS + 1))] * NUM_ITEMS


def test_without_lag_nobody_goes_on() -> None:
    calls = Calls(stalled=2, stalls=5_000, releasing=None)
    Program(calls.calls)()
    assert calls.shared_at(_STALLED) == 1
    assert calls.seen.tolist() == [0, 0, 0] + [1] * (NUM_CALLS - 3)


def test_calls_that_share_scratch_do_not_overlap() -> None:
    calls = [
        call._replace(scratch=scratch)
        for call, scratch in zip(Calls(0, 0, None).calls[:6], [0, 8, 16, 8, 0, 16], strict=True)
    ]
    assert _begins_after(calls, [False] * 6, 100) == [0, 0, 0, 2, 0, 3]
    assert _begins_after(calls, [False, False, False, True, False, False], 2) == [0, 0, 0, 3, 2, 3]


def test_memory_rests_before_others_get_it() -> None:
    pool = Pool()
    pool.rest = 2
    first = pool.like(torch.empty(5, 7))
    address = first.data_ptr()
    del first
    held = []
    for _ in range(2):
        held.append(pool.like(torch.empty(5, 7)))
        assert held[-1].data_ptr() != address
        pool.count_call()
    assert pool.like(torch.empty(5, 7)).data_ptr() == address
