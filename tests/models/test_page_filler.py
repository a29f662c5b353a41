"""Memory that is touched before it is needed, in moments without a step."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from quire.workers.page_filler import PageFiller

WAIT_S = 30.0
NUM_BYTES = 8 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def _untouched() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _share_present(tensor: torch.Tensor) -> float:
    """Of the whole pages of a tensor, by mincore(2)."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    present = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), present) == 0
    return float(np.mean(np.frombuffer(present, np.uint8) & 1))


def _is_supported() -> bool:
    filler = PageFiller([probe := _untouched()], idle_s=0.0)
    filler.finished.wait(WAIT_S)
    return _share_present(probe) == 1.0


def test_all_of_a_cache_is_filled_with_what_it_had() -> None:
    if not _is_supported():
        pytest.skip("this system touches no pages ahead")
    tensors = [_untouched(), _untouched()[: NUM_BYTES // 3]]
    assert _share_present(tensors[0]) < 0.1
    tensors[0][12345] = 7
    filler = PageFiller(tensors, idle_s=0.0)
    assert filler.finished.wait(WAIT_S)
    assert [_share_present(tensor) for tensor in tensors] == [1.0, 1.0]
    assert tensors[0][12345] == 7
    assert tensors[0].sum() == 7
    assert tensors[1].sum() == 0


def test_nothing_is_filled_beside_a_step() -> None:
    tensor = _untouched()
    filler = PageFiller([tensor], idle_s=0.2)
    with filler:
        assert not filler.finished.wait(0.6)
        assert _share_present(tensor) < 0.1
    assert filler.finished.wait(WAIT_S)


def test_stop_leaves_the_rest() -> None:
    tensor = _untouched()
    filler = PageFiller([tensor], idle_s=WAIT_S)
    filler.stop()
    assert filler.finished.is_set()
    assert _share_present(tensor) < 0.1
