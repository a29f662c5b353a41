"""Times on a device, and the limits to compare them with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cases import Case, Run

_HEAD_START_CYCLES = 2_000_000  # of the GPU's clock: about a millisecond


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device reached in this run."""

    copy_gb_per_s: float  # bytes read and bytes written
    matmul_tflop_per_s: float  # in the dtype of the run


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of a case. `share` is of the limit that leaves it the most time: that of `bound`."""

    group: str
    name: str
    us: float
    gb_per_s: float
    tflop_per_s: float
    bound: str  # "copy" or "matmul"
    share: float


class Timer:
    """Median seconds of a call, with caches that hold none of its inputs."""

    def __init__(self, device: torch.device, min_s: float, most_runs: int = 200) -> None:
        self._device, self._min_s, self._most_runs = device, min_s, most_runs
        # Goes through the caches between two calls: larger than any of them.
        self._flushed = torch.zeros((256 if device.type == "cuda" else 64) << 18, dtype=torch.float32, device=device)

    def seconds(self, run: Run) -> float:
        """At least three calls, after one that compiles and allocates."""
        run()
        once = self._calls(run, 1)[0]
        return statistics.median(self._calls(run, max(3, min(self._most_runs, int(self._min_s / max(once, 1e-7))))))

    def _calls(self, run: Run, count: int) -> list[float]:
        if self._device.type == "cuda":
            return self._calls_on_gpu(run, count)
        times = []
        for _ in range(count):
            self._flushed.zero_()
            start_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - start_s)
        return times

    def _calls_on_gpu(self, run: Run, count: int) -> list[float]:
        """Time on the GPU's own clock. Before it begins, the host has time to launch all of the call: what that takes
        is no part of the time, as in a graph. What is flushed is read, and leaves nothing to be written back."""
        pairs = []
        for _ in range(count):
            self._flushed.sum()
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            run()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def measure_limits(timer: Timer, device: torch.device, dtype: torch.dtype, *, num_bytes: int, size: int) -> Limits:
    """A copy of `num_bytes`, and a product of two square matrices of `size`."""
    source, target = torch.ones(2, num_bytes, dtype=torch.int8, device=device)
    copy_s = timer.seconds(lambda: target.copy_(source))
    # Random numbers: a GPU multiplies zeros at a higher clock.
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    matmul_s = timer.seconds(lambda: left @ right)
    return Limits(2 * num_bytes / copy_s / 1e9, 2 * size**3 / matmul_s / 1e12)


def rated(case: Case, seconds: float, limits: Limits) -> Measured:
    """The rates of a case that took so long, and the limit that holds for it."""
    at_copy = case.work.num_bytes / (limits.copy_gb_per_s * 1e9)
    at_matmul = case.work.flops / (limits.matmul_tflop_per_s * 1e12)
    return Measured(
        group=case.group,
        name=case.name,
        us=seconds * 1e6,
        gb_per_s=case.work.num_bytes / seconds / 1e9,
        tflop_per_s=case.work.flops / seconds / 1e12,
        bound="copy" if at_copy >= at_matmul else "matmul",
        share=max(at_copy, at_matmul) / seconds,
    )


def measure(
    all_cases: list[Case], timer: Timer, limits: Limits, on_case: Callable[[str], None] = lambda _name: None
) -> list[Measured]:
    """All of them, one after the other, each with memory of its own."""
    results = []
    for case in all_cases:
        on_case(case.name)
        results.append(rated(case, timer.seconds(case.make()), limits))
    return results
