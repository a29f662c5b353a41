"""The inputs of a step in one piece of memory: written in place on the host, and one copy to the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.outputs import FloatArray, IntArray
from quire.kernels.sampling import Draws

Int64Array = npt.NDArray[np.int64]

_ALIGNMENT = 16  # bytes; what kernels may assume of a pointer
_MAX_CACHED = 256  # layouts whose views are kept


class BatchShape(NamedTuple):
    """Counts of a step, perhaps padded: rows and tokens beyond the real ones belong to nobody."""

    num_reqs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HostInputs:
    """The sections of the inputs, to be written."""

    token_ids: Int64Array  # [num_tokens]; -(row + 1): the last token that a row has sampled
    positions: Int64Array  # [num_tokens]
    slot_mapping: Int64Array  # [num_groups, num_tokens]; -1 for padding
    rows: Int64Array  # [num_reqs]
    sampling_rows: Int64Array  # [num_reqs], the first ones of it; then no row
    logits_indices: Int64Array  # [num_reqs], the first ones of it: tokens whose logits are sampled from
    query_start_loc: IntArray  # [num_reqs + 1]
    seq_lens: IntArray  # [num_reqs]
    block_entries: Int64Array  # [max_changes], the first ones of it: which entries of the block tables change
    block_ids: IntArray  # [max_changes], the first ones of it: and what they become
    # [num_reqs] all below, the first ones of it, as of `sampling_rows`; then temperatures of 0, and anything.
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    numbers: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """The same sections on the device: what the model and the sampler read."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    rows: Tensor
    sampling_rows: Tensor
    logits_indices: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_entries: Tensor
    block_ids: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    numbers: Tensor

    def draws(self, num_sampling: int) -> Draws:
        """How the first rows that sample draw their tokens."""
        sections = (self.temperature, self.top_k, self.top_p, self.min_p, self.numbers)
        return Draws(*(section[:num_sampling] for section in sections))


class _Views(NamedTuple):
    """The sections for one shape of batch."""

    host: list[HostInputs]  # one per staging
    copies: list[Callable[[], object]]  # likewise: what brings them to the device
    device: DeviceInputs
    readable: list[HostInputs]  # by the host while the device reads `device`, one per staging


class _Staging:
    """One piece of host memory, and when the device has read it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it may be written."""
        if self._copied is not None:
            self._copied.synchronize()

    def note_copy(self) -> None:
        """It is read by what was launched last."""
        if self._copied is not None:
            self._copied.record()


class InputBuffers:
    """Where the inputs of every step lie, allocated once.

    Where a section begins follows from the shape of the batch alone, so a captured graph finds the inputs of every
    batch of its shape at the addresses that it has recorded. There are as many pieces of host memory as steps in
    flight, used in turns: writing the next step does not wait until the device has read the last. On CPU, where a copy
    is made at once, there is one.
    """

    def __init__(
        self, max_num_seqs: int, max_num_tokens: int, num_groups: int, num_stagings: int, device: torch.device
    ) -> None:
        self._num_groups = num_groups
        self.max_changes = max_num_seqs * num_groups  # a decode step adds at most one block to each table
        self._largest = BatchShape(max_num_seqs, max_num_tokens)
        num_bytes = sum(_padded_bytes(*section) for section in self._sections(self._largest).values())
        is_cpu = device.type == "cpu"
        self._stagings = [_Staging(num_bytes, device) for _ in range(1 if is_cpu else num_stagings)]
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._by_shape: dict[BatchShape, _Views] = {}
        self._turn = 0

    def begin(self, shape: BatchShape) -> HostInputs:
        """Where to write the inputs of the next step. Raises `ValueError` where it is larger than there is room for."""
        if shape.num_reqs > self._largest.num_reqs or shape.num_tokens > self._largest.num_tokens:
            raise ValueError(f"a step of {shape} was given, but the largest was said to be {self._largest}")
        self._turn = (self._turn + 1) % len(self._stagings)
        self._stagings[self._turn].wait()
        return self._views(shape).host[self._turn]

    def upload(self, shape: BatchShape) -> tuple[HostInputs, DeviceInputs]:
        """Copy what `begin` gave to the device; the copy runs before whatever is launched next. See `current`."""
        self._views(shape).copies[self._turn]()
        self._stagings[self._turn].note_copy()
        return self.current(shape)

    def current(self, shape: BatchShape) -> tuple[HostInputs, DeviceInputs]:
        """What was last uploaded, read as a batch of this shape: on the host, and the same numbers on the device. On
        CPU they are the same memory."""
        views = self._views(shape)
        return views.readable[self._turn], views.device

    def _views(self, shape: BatchShape) -> _Views:
        views = self._by_shape.get(shape)
        if views is None:
            if len(self._by_shape) >= _MAX_CACHED:  # prompts come in many shapes: the oldest goes
                del self._by_shape[next(iter(self._by_shape))]
            sections = self._sections(shape)
            num_bytes = sum(_padded_bytes(*section) for section in sections.values())
            host, device = [_host(_cut(each.memory, sections)) for each in self._stagings], _cut(self._memory, sections)
            readable = host if self._memory.device.type == "cuda" else [_host(device)]
            copies = [_copy(each.memory[:num_bytes], self._memory[:num_bytes]) for each in self._stagings]
            views = _Views(host, copies, DeviceInputs(**device), readable)
            self._by_shape[shape] = views
        return views

    def _sections(self, shape: BatchShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        num_reqs, num_tokens = shape
        return {
            "token_ids": (torch.int64, (num_tokens,)),
            "positions": (torch.int64, (num_tokens,)),
            "slot_mapping": (torch.int64, (self._num_groups, num_tokens)),
            "rows": (torch.int64, (num_reqs,)),
            "sampling_rows": (torch.int64, (num_reqs,)),
            "logits_indices": (torch.int64, (num_reqs,)),
            "query_start_loc": (torch.int32, (num_reqs + 1,)),
            "seq_lens": (torch.int32, (num_reqs,)),
            "block_entries": (torch.int64, (self.max_changes,)),
            "block_ids": (torch.int32, (self.max_changes,)),
            "temperature": (torch.float32, (num_reqs,)),
            "top_k": (torch.int32, (num_reqs,)),
            "top_p": (torch.float32, (num_reqs,)),
            "min_p": (torch.float32, (num_reqs,)),
            "numbers": (torch.float64, (num_reqs,)),
        }


def _cut(memory: Tensor, sections: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Views of `memory`, one section behind the other."""
    views, begin = {}, 0
    for name, (dtype, shape) in sections.items():
        views[name] = memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        begin += _padded_bytes(dtype, shape)
    return views


def _host(sections: dict[str, Tensor]) -> HostInputs:
    return HostInputs(**{name: view.numpy() for name, view in sections.items()})


def _copy(source: Tensor, target: Tensor) -> Callable[[], object]:
    """What copies the bytes. On CPU NumPy does: between two steps, when no code is in the core's caches, it takes a
    third of the time that torch takes."""
    if target.device.type == "cpu":
        return partial(np.copyto, target.numpy(), source.numpy())
    return partial(target.copy_, source, non_blocking=True)


def _padded_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
