"""A forward as a graph on CPU: recorded once, then repeated on the same memory without Python between its calls.

    | look up  angles  norm  linear  rotate  attend  linear  norm ... linear  add  norm  linear  likeliest  copy |
    |                           one program of compiled calls, of a decode step                                  |

What a forward asks torch for is seen by a dispatch mode, and what it compiles by `recording`. All memory comes from a
pool and goes back when the forward drops it, so that what is repeated stays in the caches as the forward itself did. An
operator that makes a new tensor is called again to write where the first one was; amid compiled calls some are such
calls themselves (`operators`).

A forward is fit for it when it makes the same calls with the same shapes whatever the numbers are, and reads those that
change from memory that stays where it is. Operators whose shapes depend on numbers, or that give one to Python, are
found; `recording.only_unrecorded` is for what no operator tells.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import operators
from .kv_prefetch import share_out
from .program import Program
from .recording import CompiledCall, NotCapturableError, borrowed, recorded_by, recorder, span_bytes

_ALIGNMENT = 64  # bytes
_SMALLEST = 4096  # bytes of a block
_ONCE = Fraction(1)
LAG = 27  # calls that a thread may stay behind the others: three layers of most models, some milliseconds
_ATEN = torch.ops.aten
_ALLOCATIONS = {
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
_COPIES = {_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN.clone.default}
_UNFIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Pool:
    """Memory of what lives within a forward. Graphs that never run at the same time share one.

    What a call has used rests for the next `rest` calls, before others get it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)  # by bytes
        self._resting: deque[tuple[int, int, np.ndarray]] = deque()  # until which call, and bytes
        self._num_calls = 0
        self.rest = 0

    def count_call(self) -> None:
        self._num_calls += 1

    def wake(self) -> None:
        """Nobody computes any more: all that nobody has is free."""
        while self._resting:
            _, size, block = self._resting.popleft()
            self._free[size].append(block)

    def like(self, tensor: Tensor, times: Fraction = _ONCE) -> Tensor:
        """An uninitialized tensor of the same dtype, shape and strides, in memory that has room for `times` as much.
        The memory is free again when nobody has it."""
        num_bytes = math.ceil(span_bytes(tensor) * times / _ALIGNMENT) * _ALIGNMENT
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST
        while self._resting and self._resting[0][0] <= self._num_calls:
            _, rested, block = self._resting.popleft()
            self._free[rested].append(block)
        free = self._free[size]
        block = free.pop() if free else np.empty(size + _ALIGNMENT, np.uint8)
        begin = -block.ctypes.data % _ALIGNMENT
        lent = block[begin : begin + num_bytes]
        weakref.finalize(lent, self._give_back, size, block)
        return torch.from_numpy(lent).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _give_back(self, size: int, block: np.ndarray) -> None:
        self._resting.append((self._num_calls + self.rest, size, block))


class Graph:
    """Calling it repeats what was recorded."""

    def __init__(
        self, preparations: Sequence[Callable[[], object]], actions: Sequence[Callable[[], object]], pool: Pool
    ) -> None:
        self._preparations = preparations
        self._actions = actions
        self._pool = pool  # whose memory the calls use

    def __call__(self) -> None:
        for action in (*self._preparations, *self._actions):
            action()

    def start(self) -> Callable[[], object] | None:
        """Begin with it, where a program comes first: helpers go on with that until the result is called, which takes
        part and does the rest. None, and nothing was done, where something else comes first, or nobody helps."""
        program = self._actions[0] if self._actions else None
        if not isinstance(program, Program) or not program.has_helpers:
            return None
        for action in self._preparations:
            action()
        program.start()
        return partial(_finish, program, self._actions[1:])


def _finish(program: Program, others: Sequence[Callable[[], object]]) -> None:
    program.join()
    for action in others:
        action()


def capture(run: Callable[[], None], pool: Pool) -> Graph:
    """Call `run`, which is done when this returns, and record it. Raises `NotCapturableError`."""
    listener = Recorder(pool, LAG)
    with listener, recorded_by(listener):
        run()
    return Graph(*listener.finish(), pool)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Implements `recording.Recorder`."""

    most_rows: int | None = None

    def __init__(self, pool: Pool, lag: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._pool, self._lag = pool, lag
        pool.wake()
        pool.rest = lag
        self._lent: set[int] = set()  # addresses of the pool's memory
        self._preparations: list[Callable[..., object]] = []
        self._actions: list[Callable[..., object]] = []
        self._calls: list[CompiledCall] = []
        self._all_calls: list[CompiledCall] = []  # of programs that have ended

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise the first operator that is recorded imports all of `torch._dynamo`, to keep it from compiling what
        nobody compiles here: one to two seconds in the middle of a service's first answer."""
        return False

    def add_call(self, call: CompiledCall) -> None:
        self._pool.count_call()
        self._calls.append(call)

    def add_preparation(self, action: Callable[[], object]) -> None:
        self._preparations.append(action)

    def add_action(self, action: Callable[[], object]) -> None:
        self._end_program()
        self._actions.append(action)

    def finish(self) -> tuple[list[Callable[..., object]], list[Callable[..., object]]]:
        """What prepares for all that is repeated, and that."""
        self._end_program()
        if self.most_rows is None:  # of decodes: who reads what is known
            share_out(self._all_calls)
        self._pool.wake()
        return self._preparations, self._actions

    def _end_program(self) -> None:
        if self._calls:
            self._all_calls += self._calls
            self._actions.append(self._run_program(Program(self._calls, self._lag)))
            self._calls = []

    def _run_program(self, program: Program) -> Callable[..., object]:
        return program

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if recorder() is not self:  # within an action
            return func(*args, **kwargs)
        if not _UNFIT.isdisjoint(func.tags):
            raise NotCapturableError(f"{func} depends on numbers")
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._lend(result)
        if func._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, self._as_recorded, (args, kwargs))
            self._add_operator(partial(func, *args, **kwargs))
        elif not _are_views(_tensors(result), of=_tensors((args, kwargs))):
            result = tree_map_only(Tensor, lambda tensor: self._lend(tensor).copy_(tensor), result)
            self._add_operator(_repeat(func, *tree_map_only(Tensor, self._as_recorded, (args, kwargs, result))))
        return result

    def _add_operator(self, operator: partial[object]) -> None:
        """Within a program some are compiled calls; alone, they would take longer than torch."""
        call = self._compiled(operator) if self._calls or operators.begins(operator) else None
        if call is None:
            self.add_action(operator)
        else:
            self.add_call(call)

    def _compiled(self, operator: partial[object]) -> CompiledCall | None:
        return operators.compiled(operator)

    def _lend(self, like: Tensor) -> Tensor:
        return self._keep(self._pool.like(like))

    def _keep(self, tensor: Tensor) -> Tensor:
        self._lent.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _as_recorded(self, tensor: Tensor) -> Tensor:
        """Memory of the pool goes back when the forward drops it, whatever a record still does with it."""
        is_lent = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._lent
        return borrowed(tensor) if is_lent else tensor


def _are_views(tensors: Sequence[Tensor], of: Sequence[Tensor]) -> bool:
    """Whether none of them has memory of its own."""
    known = {tensor.untyped_storage().data_ptr() for tensor in of}
    return all(tensor.numel() == 0 or tensor.untyped_storage().data_ptr() in known for tensor in tensors)


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> partial[Any]:
    """Calls `func` again and has what it gives in `result`: written there at once, by operators that can."""
    if func in _COPIES:
        return partial(_ATEN.copy_.default, result, args[0])
    writes = _variant_with_out(func)
    if writes is None:
        return partial(_call_again, func, args, kwargs, _tensors(result))
    return partial(writes, *args, **kwargs, out=result)


def _variant_with_out(func: Any) -> Any | None:
    """The overload of an operator that takes the same arguments and, for its one result, `out`."""
    wanted = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        out = [each.name for each in overload._schema.arguments if each.is_out]
        if out == ["out"] and wanted == [(e.name, str(e.type)) for e in overload._schema.arguments if not e.is_out]:
            return overload
    return None


def _call_again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]) -> None:
    for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
        old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
