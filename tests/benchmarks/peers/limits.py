"""What the machine can do at most: memory bandwidth (in huge pages where there are any) and matrix products, with all
cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from quire.workers.host_memory import zeros

GIB = 1 << 30
GEMM_SIZE = 2048
REPEATS = 5
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of some repeats each. GB are 10^9 bytes."""

    num_threads: int
    copy_gb_per_s: float  # bytes read and bytes written
    sum_gb_per_s: float  # bytes read
    float32_tflop_per_s: float
    bfloat16_tflop_per_s: float


def measure(num_threads: int) -> Limits:
    """Takes some seconds and 2 GiB."""
    torch.set_num_threads(num_threads)
    source, target = (zeros(GIB).view(torch.float32) for _ in range(2))
    source.fill_(1.0)
    copy_s = _best_s(lambda: target.copy_(source))
    sum_s = _best_s(lambda: source.sum())
    return Limits(num_threads, 2 * GIB / copy_s / 1e9, GIB / sum_s / 1e9, _gemm(torch.float32), _gemm(torch.bfloat16))


def readable(num_bytes: int) -> Tensor:
    """Memory for `reading_gb_per_s`: more than the caches hold."""
    return zeros(num_bytes).view(torch.float32).fill_(1.0)


def reading_gb_per_s(memory: Tensor, num_threads: int) -> float:
    """The speed of a sum right now, the median of half a second: where others share a machine's memory it may double
    from one second to the next, and what ran in a slow one is not to be held against a fast one."""
    torch.set_num_threads(num_threads)
    num_bytes, rates, end_s = memory.numel() * memory.itemsize, [], time.perf_counter() + _LOOK_S
    while not rates or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        memory.sum()
        rates.append(num_bytes / (time.perf_counter() - start_s) / 1e9)
    return median(rates)


def _gemm(dtype: torch.dtype) -> float:
    a = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    b = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype)
    return 2 * GEMM_SIZE**3 / _best_s(lambda: a @ b) / 1e12


def _best_s(work: Callable[[], object]) -> float:
    work()  # pages are there, threads are up
    best_s = float("inf")
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
