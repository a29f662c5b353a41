"""Memory that is touched before it is needed, in moments without a step."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from core_driver import Driver
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig
from quire.engine.model_source import load_model_info
from quire.workers import page_filler
from quire.workers.local_executor import LocalExecutor
from quire.workers.page_filler import PageFiller, populate

WAIT_S = 30.0
NUM_BYTES = 64 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def _untouched(num_bytes: int = NUM_BYTES) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _share_present(tensor: torch.Tensor) -> float:
    """Of the whole pages of a tensor, by mincore(2)."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    present = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), present) == 0
    return float(np.mean(np.frombuffer(present, np.uint8) & 1))


def _much() -> int:
    return 1 << 40


def _is_supported() -> bool:
    probe = _untouched(1 << 20)
    try:
        populate(probe.data_ptr(), probe.nbytes)
    except OSError:
        return False
    return True


needs_system = pytest.mark.skipif(not _is_supported(), reason="this system touches no pages ahead")


@needs_system
def test_all_of_a_cache_is_filled_and_keeps_what_it_had() -> None:
    tensors = [_untouched(), _untouched()[: NUM_BYTES // 3]]
    assert _share_present(tensors[0]) < 0.1
    tensors[0][12345] = 7
    filler = PageFiller(tensors, _much, idle_s=0.0)
    assert filler.ended.wait(WAIT_S)
    assert [_share_present(tensor) for tensor in tensors] == [1.0, 1.0]
    assert tensors[0][12345] == 7
    assert tensors[0].sum() == 7
    assert tensors[1].sum() == 0


@needs_system
def test_nothing_is_filled_beside_a_step_nor_right_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test; whenever the filler goes to sleep, it has found that it may not begin."""
    now, naps = [1000.0], threading.Semaphore(0)

    def sleep(_seconds: float) -> None:
        naps.release()
        time.sleep(0.001)

    def wait_for_naps() -> None:
        while naps.acquire(blocking=False):
            pass
        for _ in range(3):
            assert naps.acquire(timeout=WAIT_S)

    monkeypatch.setattr(page_filler, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    tensor = _untouched()
    filler = PageFiller([tensor], _much, idle_s=0.5)
    with filler:
        now[0] += 60.0
        wait_for_naps()
    now[0] += 0.4
    wait_for_naps()
    assert _share_present(tensor) < 0.1
    now[0] += 0.2
    assert filler.ended.wait(WAIT_S)
    assert _share_present(tensor) == 1.0


@needs_system
def test_a_quarter_of_the_memory_is_left_to_others() -> None:
    tensor = _untouched()
    free = iter([100, 100, 60, 25, 24])
    filler = PageFiller([tensor], lambda: next(free), idle_s=0.0)
    assert filler.ended.wait(WAIT_S)
    assert _share_present(tensor) == pytest.approx(3 * (16 << 20) / NUM_BYTES, abs=0.01)


@needs_system
def test_it_ends_with_the_cache() -> None:
    tensor = _untouched()
    filler = PageFiller([tensor], _much, idle_s=0.5)
    with filler:
        assert not filler.ended.is_set()
        del tensor
        gc.collect()
        assert filler.ended.wait(WAIT_S)


@needs_system
def test_the_cache_of_a_worker_is_filled_between_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fillers = []

    class Watched(PageFiller):
        num_entered = 0

        def __init__(self, tensors: list[torch.Tensor], free: Callable[[], int]) -> None:
            super().__init__(tensors, free, idle_s=0.0)
            self.tensors = [weakref.ref(tensor) for tensor in tensors]
            fillers.append(self)

        def __enter__(self) -> None:
            self.num_entered += 1
            super().__enter__()

    monkeypatch.setattr("quire.workers.worker.PageFiller", Watched)
    make_tiny_llama(tmp_path)
    sections = {"model": {"model": str(tmp_path), "num_threads": 1, "device": "cpu"}}
    config = EngineConfig.model_validate(sections)
    executor = LocalExecutor(config, load_model_info(config.model))
    driver = Driver(executor, 256, cache={"num_kv_blocks": 2000})
    (filler,) = fillers
    assert filler.ended.wait(WAIT_S)
    shares = [_share_present(tensor) for tensor in (reference() for reference in filler.tensors)]
    assert shares == [1.0] * 6  # keys and values of three layers
    assert filler.num_entered == 0
    driver.greedy([[1, 2, 3]], 5)
    assert filler.num_entered == 2 * 5  # each when it is launched, and when its result is asked for
    Driver(executor, 256, cache={"num_kv_blocks": 2000})
    assert [reference() for reference in filler.tensors] == [None] * 6
    executor.shutdown()
