"""Whether the calls of this thread are being recorded, and what a compiled call has to say of itself for that."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class NotCapturableError(Exception):
    """What is being recorded would not be the same for other numbers, or cannot be repeated."""


class Rows(NamedTuple):
    """A number among the arguments of a call that follows from the rows it is given: ceil(rows * times / per), or
    `most`."""

    offset: int  # where it is, in bytes
    times: int = 1
    per: int = 1
    most: int = sys.maxsize


class CallPlaces(NamedTuple):
    """Where a call has what it may be told when all others have been made (`moe`): bytes from its first argument."""

    x: int
    out: int
    num_rows: int
    claims: int
    weight: int | None = None
    bias: int | None = None


class CompiledCall(NamedTuple):
    """`function(address of the arguments)`, called by every thread at once; they divide the work by `claims`.

    An idempotent call computes the same however often a part of it is computed, as long as nobody overwrites what it
    reads: it writes nothing that it reads, but what it has just written itself.
    """

    function: Any  # ctypes function pointer: void (void *)
    arguments: Any  # ctypes structure or array
    claims: Any  # ctypes array, of this call alone
    rows: tuple[Rows, ...] | None = None  # all that makes it a call for other rows; None: it is for these alone
    is_idempotent: bool = False
    scratch: int = 0  # address of memory that it shares with other calls, for what none of them keeps; 0: none
    prefetch: Any = None  # `kv_prefetch.Reads`, `Lists` or `Fetches`; None: it takes no part in that
    least_rows: int = 1  # with fewer, another function would be called,
    most_rows: int = sys.maxsize  # and with more
    places: CallPlaces | None = None  # of a call that is of any rows up to `most_rows`, or none


def place_of_rows(call: CompiledCall) -> int:
    """The address of the number of rows that a call is told, 0 of those that are told nothing."""
    return 0 if call.places is None else ctypes.addressof(call.arguments) + call.places.num_rows


class Recorder(Protocol):
    """What listens while a forward is recorded. What it is told of is done all the same.

    The record is of as many rows (tokens) as there are; or of any number up to `most_rows`.
    """

    most_rows: int | None

    def add_call(self, call: CompiledCall) -> None: ...

    def add_preparation(self, action: Callable[[], object]) -> None:
        """Python code that has to run before all that is repeated, of which it reads nothing."""
        ...

    def add_action(self, action: Callable[[], object]) -> None:
        """Python code that has to run at this place whenever the record is repeated."""
        ...


_of_thread = threading.local()


def recorder() -> Recorder | None:
    """The recorder of this thread, if there is one."""
    found: Recorder | None = getattr(_of_thread, "recorder", None)
    return found


@contextmanager
def recorded_by(listener: Recorder | None) -> Iterator[None]:
    before = recorder()
    _of_thread.recorder = listener
    try:
        yield
    finally:
        _of_thread.recorder = before


def as_one_action(action: Callable[..., object], *tensors: Tensor) -> None:
    """`action(*tensors)`, which are not empty.

    In a record it is one action, which keeps neither its intermediate results nor, as compiled calls do not, the memory
    of these tensors.
    """
    listener = recorder()
    with recorded_by(None):
        action(*tensors)
        if listener is not None:
            listener.add_action(partial(action, *map(borrowed, tensors)))


def calls_of(action: Callable[[], object]) -> list[CompiledCall]:
    """The compiled calls of `action`, which is done; none if it is Python that has to run anew. Operators of torch
    between them are not seen."""
    listener = _OnlyCalls([])
    with recorded_by(listener):
        action()
    return listener.calls


@dataclass(slots=True)
class _OnlyCalls:
    """Implements `Recorder`."""

    calls: list[CompiledCall]
    most_rows: int | None = None
    is_more: bool = False

    def add_call(self, call: CompiledCall) -> None:
        if not self.is_more:
            self.calls.append(call)

    def add_preparation(self, action: Callable[[], object]) -> None:
        self.add_action(action)

    def add_action(self, action: Callable[[], object]) -> None:  # noqa: ARG002 (a name of the protocol)
        self.is_more = True
        self.calls.clear()


def borrowed(tensor: Tensor, num_rows: int | None = None) -> Tensor:
    """The same tensor, not empty, which does not keep its memory; or as if it had another number of rows."""
    shape = tensor.shape if num_rows is None else torch.Size((num_rows, *tensor.shape[1:]))
    memory = (ctypes.c_uint8 * span_bytes(tensor, shape)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(shape, tensor.stride())


def span_bytes(tensor: Tensor, shape: torch.Size | None = None) -> int:
    """From its first element to its last, if it has its own shape or another."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(shape or tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def only_unrecorded(reason: str) -> None:
    """Raises `NotCapturableError` while somebody records: what follows looks at numbers."""
    if recorder() is not None:
        raise NotCapturableError(reason)
