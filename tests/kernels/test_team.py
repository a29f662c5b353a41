"""Helpers do what they are asked for beside the thread that asks, and a program goes on without it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import cfunc, types
from test_claims import LAG, NUM_CALLS, NUM_ITEMS, NUM_THREADS, Calls

from quire.kernels.cpu.intrinsics import IS_X86, fetch_add
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.team import Team, join_all, team_of

WAIT_S = 30.0
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not IS_X86, reason="no helpers, or no clock")


@cfunc(types.void(types.int64))
def _count(address: int) -> None:
    fetch_add(address, 1)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def _helpers() -> set[str]:
    """Threads of this process by that name."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            if (thread / "comm").read_text().strip() == "kernels":
                found.add(thread.name)
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_each_thread_calls_it_once_and_helpers_need_nobody(num_threads: int) -> None:
    team, count = Team(num_threads), np.zeros(1, np.int64)
    assert team.num_threads == num_threads
    for i in range(50):
        team.start(_count.address, count.ctypes.data, count)
        _wait_until(lambda i=i: count[0] == (i + 1) * num_threads - 1)
        team.join()
        assert count[0] == (i + 1) * num_threads


def test_helpers_that_sleep_are_woken_up() -> None:
    before, team, count = _helpers(), Team(2), np.zeros(1, np.int64)
    (helper,) = _helpers() - before

    def sleeps() -> bool:
        state = Path(f"/proc/self/task/{helper}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "S"

    for i in range(5):
        _wait_until(sleeps)
        team.start(_count.address, count.ctypes.data, count)
        team.join()
        assert count[0] == 2 * (i + 1)


def test_whoever_joins_does_so_once() -> None:
    """Several threads, and nobody who asked: it is called once by each helper, and by one of those who join."""
    team, count = Team(3), np.zeros(1, np.int64)
    for i in range(50):
        team.start(_count.address, count.ctypes.data, count)
        threads = [threading.Thread(target=each) for each in (team.join, join_all, team.join)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert count[0] == 3 * (i + 1)


def test_helpers_end_with_their_team_and_with_its_thread() -> None:
    gc.collect()
    before, count = _helpers(), np.zeros(1, np.int64)

    def use() -> None:
        team_of(3).start(_count.address, count.ctypes.data, count)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(WAIT_S)
    gc.collect()
    assert count[0] == 3, "and what was asked for is done"
    team = Team(4)
    assert len(_helpers() - before) == 3
    del team
    gc.collect()
    assert _helpers() <= before


def test_a_process_ends_amid_what_was_asked_for() -> None:
    code = (
        "import numpy as np\n"
        "from numba import cfunc, types\n"
        "from quire.kernels.cpu.intrinsics import fetch_add, give_way\n"
        "from quire.kernels.cpu.team import team_of\n"
        "@cfunc(types.void(types.int64))\n"
        "def long(address):\n"
        "    for _ in range(3_000_000):\n"
        "        give_way()\n"
        "    fetch_add(address, 1)\n"
        "memory = np.zeros(1, np.int64)\n"
        "team_of(2).start(long.address, memory.ctypes.data, memory)\n"
        "print('asked', memory[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "asked 0\n", "")


@pytest.fixture
def _two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_program_is_over_before_who_started_it_takes_part() -> None:
    calls = Calls(stalled=-1, stalls=0, releasing=None)
    program = Program(calls.calls, LAG)
    for _ in range(20):
        calls.values[:] = 0
        program.start()
        _wait_until(lambda: calls.values[-1].tolist() == [sum(range(1, NUM_CALLS + 1))] * NUM_ITEMS)
        program.join()
        assert calls.values.tolist() == [[sum(range(1, i + 1))] * NUM_ITEMS for i in range(NUM_CALLS + 1)]


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("lag", [0, LAG])
def test_what_all_must_meet_at_waits_for_who_started_it(lag: int) -> None:
    """Each call adds in place: done once, in order, whoever comes when."""
    calls = Calls(stalled=-1, stalls=0, releasing=None, in_place=True)
    program = Program(calls.calls, lag)
    program.start()
    _wait_until(lambda: bool(calls.values[0].all()))
    for _ in range(1000):
        os.sched_yield()
        assert calls.values[0].tolist() == [1] * NUM_ITEMS, "nobody is at the second call"
    program.join()
    assert calls.values[0].tolist() == [sum(range(1, NUM_CALLS + 1))] * NUM_ITEMS
