"""Decode steps as CUDA graphs: what a forward launches is recorded once per size of batch, and then launched at once.

A graph repeats the same kernels on the same addresses. Here that is right for every batch of one size: its inputs lie
where its shape says (`InputBuffers`), weights, cache and what the device keeps by row never move, and what a forward
needs in between comes from a pool that all graphs share, for only one runs at a time. A batch takes the smallest size
that holds it:

    size 4:   request 0   request 1   request 2   padding        computes one token too many, which is stored nowhere
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from quire.engine.outputs import SchedulerOutput

logger = logging.getLogger(__name__)

_LARGEST = 512  # beyond it, a step takes longer to compute than to launch
_NUM_WARMUPS = 2  # the first compiles kernels and picks algorithms, the second shows that nothing is left to do

Replay = Callable[[], None]


class GraphBackend(Protocol):
    """How a graph is made."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run `run` to warm up, and record it. Calling the result repeats it on the same tensors."""
        ...


class CudaGraphBackend:
    """Graphs of one device, in one pool of memory (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Captured on a stream of their own, as captures must be, and launched on whichever is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARMUPS):
                run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads of the process ask the device meanwhile (a watchdog of NCCL) does no harm.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        replay: Replay = graph.replay
        return replay


class DecodeGraphs:
    """The graphs of steps in which every request computes one token. Owned by the model runner.

    `forward(size)` computes the hidden states [size, hidden_size] of the inputs that lie in the buffers for a batch of
    that size, and launches the same kernels whatever these inputs are; `prepare(size)` writes some that do no harm. The
    largest graph comes first, so that the pool has all memory that the others need.
    """

    def __init__(
        self,
        backend: GraphBackend,
        prepare: Callable[[int], None],
        forward: Callable[[int], Tensor],
        sizes: list[int],
        *,
        progress: bool = False,
    ) -> None:
        self._sizes = sizes
        self._forward = forward
        # One output for all: what a graph leaves in the pool, the next one overwrites.
        prepare(sizes[-1])
        self._hidden = torch.empty_like(forward(sizes[-1]))
        started = time.monotonic()
        console = Console(stderr=True)
        hidden = not progress or not console.is_terminal
        self._replays: dict[int, Replay] = {}
        for size in track(sizes[::-1], "Capturing graphs", transient=True, console=console, disable=hidden):
            prepare(size)
            self._replays[size] = backend.capture(partial(self._run, size))
        logger.info("captured graphs of %d sizes up to %d in %.1f s", len(sizes), sizes[-1], time.monotonic() - started)

    def size_for(self, step: SchedulerOutput) -> int | None:
        """The size whose graph computes this step; None where none does."""
        num_reqs = len(step.rows)
        if step.total_num_scheduled_tokens > num_reqs or num_reqs > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_reqs)]

    def replay(self, size: int) -> Tensor:
        """[size, hidden_size], valid until the next replay."""
        self._replays[size]()
        return self._hidden[:size]

    def _run(self, size: int) -> None:
        self._hidden[:size].copy_(self._forward(size))


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sizes of batches up to `max_num_seqs`, ascending: padding adds at most 7 tokens, and an eighth to large ones."""
    most = min(max_num_seqs, _LARGEST)
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, _LARGEST + 1, 32), most}
    return sorted(size for size in sizes if size <= most)
