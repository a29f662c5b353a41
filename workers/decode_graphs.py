"""Decode steps as graphs: what a forward launches is recorded once per size of batch, and then launched at once.

A graph repeats the same kernels on the same addresses. Here that is right for every batch of one size: its inputs lie
where its shape says (`InputBuffers`), weights, cache and what the device keeps by row never move, and what a forward
needs in between comes from a pool that all graphs share, for only one runs at a time. A batch takes the smallest size
that holds it:

    size 4:   request 0   request 1   request 2   padding        computes one token too many, which is stored nowhere

They go on beyond the hidden states, as far as a step asks (`End`). On a GPU they are CUDA's, all captured at start; on
CPU they are recorded when a size first comes with such an end (`cpu_graphs`).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

logger = logging.getLogger(__name__)

_LARGEST = 512  # beyond it, a step takes longer to compute than to launch
_NUM_WARMUPS = 2  # the first compiles kernels and picks algorithms, the second shows that nothing is left to do


class Started(NamedTuple):
    """What is repeated. `is_under_way`: by others, meanwhile; else by `finish`, called when it must be over."""

    is_under_way: bool
    finish: Callable[[], object]


Replay = Callable[[], Started]


class End(Enum):
    """How far a graph goes."""

    HIDDEN = auto()  # the last hidden state, on ranks that sample
    LOGITS = auto()
    TOKENS = auto()  # the likeliest
    DRAWN = auto()  # tokens, as the parameters in the inputs say

    @property
    def gives_tokens(self) -> bool:
        """Of all requests, and keeps them on the device where the next step may read them."""
        return self in (End.TOKENS, End.DRAWN)


class Decoded(NamedTuple):
    """What is computed of each token, as far as it goes."""

    hidden: Tensor | None = None  # [num_tokens, hidden_size], the last hidden state
    logits: Tensor | None = None  # [num_tokens, vocab] float32
    token_ids: Tensor | None = None  # [num_tokens] int64

    def map(self, function: Callable[[Tensor], Tensor]) -> Decoded:
        return Decoded(*(None if each is None else function(each) for each in self))


class Begun(NamedTuple):
    """A forward. `is_under_way`: as of `Started`."""

    is_under_way: bool
    end: Callable[[], Decoded]  # valid until the next forward begins


# Of the inputs that lie in the buffers for a batch of some size: it launches the same kernels whatever they are.
Forward = Callable[[int, End], Decoded]


class GraphBackend(Protocol):
    """How a graph is made."""

    def capture(self, run: Callable[[], None]) -> Replay | None:
        """Run `run`, once or more, and record it, to be repeated on the same tensors.

        None where what it does cannot be repeated.
        """
        ...


class CudaGraphBackend:
    """Graphs of one device, in one pool of memory (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

    Captured on a stream of their own, as captures must be, and launched on whichever is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

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

        def replay() -> Started:
            graph.replay()
            return Started(True, _nothing)

        return replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs of a device: for each stream that is used, libraries keep memory to the end of the process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DecodeGraphs:
    """The graphs of steps in which every request computes one token. Owned by the model runner.

    They do not keep the runner, whose cache is to be freed before the next one is made.
    """

    def __init__(self, backend: GraphBackend, sizes: list[int]) -> None:
        self._backend = backend
        self._sizes = sizes
        self._largest = sizes[-1]
        self._replays: dict[tuple[int, End], tuple[Replay, Decoded]] = {}  # with views of `_outputs`, of its size
        # One output for all of an end: what a graph leaves in the pool, the next one overwrites.
        self._outputs: dict[End, Decoded] = {}

    def capture_all(
        self, forward: Forward, prepare: Callable[[int], None], ends: Sequence[End], *, progress: bool = False
    ) -> None:
        """Capture every size now, with each of the ends; `prepare(size)` writes inputs that do no harm.

        The largest comes first, so that the pool has all memory that the others need.
        """
        prepare(self._sizes[-1])
        for end in ends:  # kernel by kernel: the output for all is no part of the pool
            self._run(forward, self._sizes[-1], end)
        started = time.monotonic()
        console = Console(stderr=True)
        hidden = not progress or not console.is_terminal
        for size in track(self._sizes[::-1], "Capturing graphs", transient=True, console=console, disable=hidden):
            prepare(size)
            for end in ends:
                self._capture(forward, size, end)
        count = len(self._replays)
        logger.info("captured %d graphs in %.1f s", count, time.monotonic() - started)

    def size_for(self, num_reqs: int, num_tokens: int) -> int | None:
        """The size whose graph computes so many tokens of so many requests; None where none does."""
        if not self._sizes or num_tokens > num_reqs or num_reqs > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, num_reqs)]

    def begin(self, forward: Forward, size: int, end: End) -> Begun:
        """A forward of `size` tokens. What was not captured yet is, by this step."""
        captured = self._replays.get((size, end))
        if captured is None:
            return Begun(False, partial(self._capture, forward, size, end))
        replay, decoded = captured
        started = replay()

        def wait() -> Decoded:
            started.finish()
            return decoded

        return Begun(started.is_under_way, wait)

    def _capture(self, forward: Forward, size: int, end: End) -> Decoded:
        replay = self._backend.capture(partial(self._run, forward, size, end))
        decoded = self._outputs[end].map(lambda each: each[:size])
        if replay is None:
            self._sizes = []
        else:
            self._replays[size, end] = replay, decoded
        return decoded

    def _run(self, forward: Forward, size: int, end: End) -> None:
        computed = forward(size, end)
        if end not in self._outputs:
            self._outputs[end] = computed.map(lambda each: each.new_empty(self._largest, *each.shape[1:]))
        for output, each in zip(self._outputs[end], computed, strict=True):
            if output is not None and each is not None:
                output[:size].copy_(each)


def _nothing() -> None:
    """The host has no part in it."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sizes of batches up to `max_num_seqs`, ascending: padding adds at most 7 tokens, and an eighth to large ones."""
    most = min(max_num_seqs, _LARGEST)
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, _LARGEST + 1, 32), most}
    return sorted(size for size in sizes if size <= most)
