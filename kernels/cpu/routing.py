# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Between the products of a mixture of experts: who takes which token, and what comes of it. Compiled with Numba.

    logits --choose--> experts of each token --sort--> rows by expert --products--> parts --add up--> tokens

`sort` also tells the calls of products, which were made before anyone had chosen, what they multiply: see `moe`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from ..reference import moe as reference
from .call import Arguments, RowFunction, enter_rows, take_rows
from .intrinsics import pointer
from .recording import CompiledCall, recorded_by
from .row_vectors import copy_bytes
from .rows import load_row, store_row
from .sources import digest_of
from .threads import run_call

if TYPE_CHECKING:
    from ..ops import ExpertMatrices

_COMPILED = (torch.float32, torch.bfloat16)
_TAKEN = np.float32(-1.0)  # instead of a probability
_CHOOSE = Arguments(
    "logits", "stride", "short", "num_experts", "num_chosen", "renormalize", "slots", "chosen", "routing"
)
_SORT = Arguments(
    "chosen", "num_tokens", "num_chosen", "num_experts", "x", "x_row", "sorted", "rows", "num_slots", "num_stages",
    "told", "stages",
)  # fmt: skip
_ADD = Arguments("parts", "short_parts", "size", "num_chosen", "rows", "routing", "out", "short")
_CHOOSE_TYPE, _SORT_TYPE, _ADD_TYPE = _CHOOSE.dtype, _SORT.dtype, _ADD.dtype


def choose_experts(
    logits: Tensor, experts_per_token: int, *, renormalize: bool, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `ops.choose_experts`. Padding chooses none."""
    if logits.dtype not in _COMPILED:
        return reference.choose_experts(logits, experts_per_token, renormalize=renormalize, slots=slots)
    num_tokens, num_experts = logits.shape
    chosen = torch.empty(num_tokens, experts_per_token, dtype=torch.int64)
    routing = torch.empty(num_tokens, experts_per_token, dtype=torch.float32)
    _choose(
        num_tokens, num_experts,
        logits.data_ptr(), logits.stride(0) * logits.itemsize, logits.dtype == torch.bfloat16, num_experts,
        experts_per_token, renormalize, 0 if slots is None else slots.data_ptr(), chosen.data_ptr(), routing.data_ptr(),
    )  # fmt: skip
    return chosen, routing


def sort(
    chosen: Tensor,
    num_experts: int,
    x: Tensor,
    sorted_x: Tensor,
    rows: Tensor,
    slots: Sequence[Sequence[CompiledCall]],
    matrices: Sequence[ExpertMatrices | None],
    results: Sequence[Tensor],
) -> None:
    """Tell calls what they compute (`recording.CallPlaces`). All of it is memory that stays where it is.

    Args:
        chosen: [num_tokens, experts_per_token] int64; what is none of the experts has no row.
        x: [num_tokens, size], of which `sorted_x` [num_tokens * experts_per_token, size] gets a row for each assignment
            to an expert that has several, those of an expert one behind the other.
        rows: [num_tokens, experts_per_token] int64, gets the row of each assignment in the results, or -1.
        slots: calls for one expert each, of which the first takes rows of x, and each other one what the one before it
            has computed. Those of slots that are left over get no rows.
        matrices, results: by the calls of a slot, what each expert has one of, and rows of all assignments, [n, ...].
    """
    with recorded_by(None):
        told = torch.tensor([[_addresses(call) for call in slot] for slot in slots])
        pairs = zip(matrices, results, strict=True)
        stages = torch.tensor([[*_steps_of_experts(of), *_steps(result)] for of, result in pairs])
    num_tokens, num_chosen = chosen.shape
    call = _sort.call(
        num_tokens, num_tokens * num_chosen * x.shape[1],
        chosen.data_ptr(), num_tokens, num_chosen, num_experts,
        x.data_ptr(), x.stride(0) * x.itemsize, sorted_x.data_ptr(), rows.data_ptr(), len(slots), len(stages),
        told.data_ptr(), stages.data_ptr(),
        per=num_tokens,
    )  # fmt: skip
    call.arguments.kept = told, stages  # as long as the call is
    run_call(call)


def _addresses(call: CompiledCall) -> tuple[int, ...]:
    """Of what it is told; 0 of the weight or bias that it does not have."""
    assert call.places is not None
    places, first = call.places, ctypes.addressof(call.arguments)
    weight, bias = (0 if place is None else first + place for place in (places.weight, places.bias))
    return first + places.x, weight, bias, first + places.out, first + places.num_rows


def _steps_of_experts(of: ExpertMatrices | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if of is None else (*_steps(of.weight), *_steps(of.bias))


def _steps(tensor: Tensor | None) -> tuple[int, int]:
    """Where it is, and bytes to what follows."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)


def add_up(parts: Tensor, rows: Tensor, routing: Tensor, out: Tensor) -> None:
    """Fill `out` [num_tokens, size] with sums of rows of `parts` [n, size], contiguous, in float32, in the order in
    which they lie there. `rows` [num_tokens, experts_per_token]: int64, -1 of none; `routing`: what each is multiplied
    by."""
    if out.dtype not in _COMPILED:
        total = torch.zeros(out.shape, dtype=torch.float32)
        order = rows.argsort(dim=1)
        for place in order.unbind(dim=1):
            row, count = (each.gather(1, place[:, None])[:, 0] for each in (rows, routing))
            own = row >= 0
            total[own] += parts[row[own]] * count[own, None]
        out.copy_(total)
        return
    (num_tokens, num_chosen), size = rows.shape, out.shape[1]
    _add(
        num_tokens, num_chosen * size,
        parts.data_ptr(), parts.dtype == torch.bfloat16, size, num_chosen, rows.data_ptr(), routing.data_ptr(),
        out.data_ptr(), out.dtype == torch.bfloat16,
    )  # fmt: skip


def _choose_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _CHOOSE_TYPE)[0]
        shape, num_experts = (a.num_rows, a.num_chosen), a.num_experts
        slots = carray(pointer(a.slots), (a.num_rows,), np.int64)
        chosen, routing = carray(pointer(a.chosen), shape, np.int64), carray(pointer(a.routing), shape, np.float32)
        row, counts = np.empty(num_experts, np.float32), np.empty(a.num_chosen, np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for token in range(first, stop):
                if a.slots != 0 and slots[token] < 0:
                    chosen[token], routing[token] = -1, np.float32(0.0)
                else:
                    load_row(a.logits + token * a.stride, num_experts, a.short, row)
                    _choose_row(row, a.renormalize, counts, chosen[token], routing[token])

    return worker


@njit(error_model="numpy")
def _choose_row(row: Any, renormalize: bool, counts: Any, chosen: Any, routing: Any) -> None:
    """`row` and `counts` are overwritten. The others are written once: somebody may read them already (`program`)."""
    largest = np.float32(-np.inf)
    for value in row:
        largest = max(largest, value)
    total = np.float32(0.0)
    for i in range(len(row)):
        row[i] = np.exp(row[i] - largest)
        total += row[i]
    of_chosen = np.float32(0.0)
    for place in range(len(chosen)):
        best = -1
        for i in range(len(row)):
            if row[i] != _TAKEN and (best < 0 or row[i] > row[best]):
                best = i
        chosen[place], counts[place] = best, row[best]
        of_chosen += row[best]
        row[best] = _TAKEN
    for place in range(len(chosen)):
        routing[place] = counts[place] / (of_chosen if renormalize else total)


def _sort_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """One thread does it. Where it loses its core another does the same, so that nothing is counted in place."""
        sources  # noqa: B018 (likewise)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for _ in range(first, stop):
                _sort_all(address)

    return worker


@njit(error_model="numpy")
def _sort_all(address: int) -> None:
    a = carray(pointer(address), (1,), _SORT_TYPE)[0]
    num_assignments = a.num_tokens * a.num_chosen
    chosen = carray(pointer(a.chosen), (num_assignments,), np.int64)
    rows = carray(pointer(a.rows), (num_assignments,), np.int64)
    counts, next_row = np.zeros(a.num_experts, np.int64), np.zeros(a.num_experts, np.int64)
    for expert in chosen:
        if 0 <= expert < a.num_experts:
            counts[expert] += 1
    start = 0
    for expert in range(a.num_experts):
        next_row[expert] = start
        start += counts[expert]
    only_x = np.zeros(a.num_experts, np.int64)  # where the row is of an expert that has one
    for i, expert in enumerate(chosen):
        row = -1
        if 0 <= expert < a.num_experts:
            row, x = next_row[expert], a.x + i // a.num_chosen * a.x_row
            next_row[expert] += 1
            only_x[expert] = x
            if counts[expert] > 1:
                copy_bytes(x, a.sorted + row * a.x_row, a.x_row)
        rows[i] = row
    told = carray(pointer(a.told), (a.num_slots, a.num_stages, 5), np.int64)
    stages, slot = carray(pointer(a.stages), (a.num_stages, 6), np.int64), 0
    for expert in range(a.num_experts):
        count = counts[expert]
        if count > 0:
            row = next_row[expert] - count
            taken = only_x[expert] if count == 1 else a.sorted + row * a.x_row
            for stage in range(a.num_stages):
                weight, of_expert, bias, bias_of_expert, result, result_row = stages[stage]
                _tell(told[slot, stage, 0], taken)
                if weight != 0:
                    _tell(told[slot, stage, 1], weight + expert * of_expert)
                if bias != 0:
                    _tell(told[slot, stage, 2], bias + expert * bias_of_expert)
                taken = result + row * result_row
                _tell(told[slot, stage, 3], taken)
                _tell(told[slot, stage, 4], count)
            slot += 1
    for left in range(slot, a.num_slots):
        for stage in range(a.num_stages):
            _tell(told[left, stage, 4], 0)


@njit(error_model="numpy")
def _tell(place: int, number: int) -> None:
    carray(pointer(place), (1,), np.int64)[0] = number


def _add_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """What a token is does not depend on those beside it: the order of experts is the same."""
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (1,), _ADD_TYPE)[0]
        shape, out_row = (a.num_rows, a.num_chosen), a.size * (2 if a.short else 4)
        rows, routing = carray(pointer(a.rows), shape, np.int64), carray(pointer(a.routing), shape, np.float32)
        total, part = np.empty(a.size, np.float32), np.empty(a.size, np.float32)
        part_row = a.size * (2 if a.short_parts else 4)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for token in range(first, stop):
                total[:] = np.float32(0.0)
                before = -1
                for _ in range(a.num_chosen):
                    place = _next_place(rows[token], before)
                    if place < 0:
                        break
                    before = rows[token, place]
                    load_row(a.parts + before * part_row, a.size, a.short_parts, part)
                    weight = routing[token, place]
                    for i in range(a.size):
                        total[i] += weight * part[i]
                store_row(total, a.size, a.short, a.out + token * out_row)

    return worker


@njit(error_model="numpy")
def _next_place(rows: Any, before: int) -> int:
    """Of the least row above `before`; -1 where there is none."""
    best = -1
    for place in range(len(rows)):
        if rows[place] > before and (best < 0 or rows[place] < rows[best]):
            best = place
    return best


_SOURCES = digest_of("call", "claims", "exponential", "intrinsics", "row_vectors", "rows", "vectors", "walk")
# About what an element takes, in nanoseconds.
_choose = RowFunction(partial(_choose_worker, _SOURCES), _CHOOSE, 20.0, is_idempotent=True)
_sort = RowFunction(partial(_sort_worker, _SOURCES), _SORT, 0.2, is_idempotent=True)
_add = RowFunction(partial(_add_worker, _SOURCES), _ADD, 0.3, is_idempotent=True)
