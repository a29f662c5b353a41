"""A mixture of experts on CPU: each expert's tokens are one matrix.

Which experts are needed is known when a router has chosen. While nobody records, that is looked at here, and their
products are called one after the other. A record (`recording`) has to have its calls before: so it has slots, the
products of each expert that may be chosen, and a call before them that fills in what each of them multiplies:

    sort | slot 0: gate_up, down | slot 1: gate_up, down | ... | add up
     |          ^                      ^
     +----------+----------------------+---- rows of x, weights, results; no rows for slots that are left over

That is for as many tokens as take one call for each product, by a kernel that takes x as it is. Others are one action.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .claims import new_claims
from .elementwise import activate_and_mul
from .linear import linear, linear_fp8, linear_gated_packed, linear_int8, linear_packed
from .recording import CompiledCall, as_one_action, calls_of, place_of_rows, recorded_by, recorder
from .routing import add_up, sort
from .threads import run_call

if TYPE_CHECKING:
    from ..ops import ExpertMatrices


def experts(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str,
    num_experts_in_all: int | None,  # noqa: ARG001 (rows are sorted either way)
) -> Tensor:
    """See `ops.experts`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if len(x) > 0:
        x, chosen, routing = x.contiguous(), chosen.contiguous(), routing.contiguous()
        if not _record_slots(x, chosen, routing, gate_up, down, activation, out):
            as_one_action(partial(_one_by_one, gate_up, down, activation), x, chosen, routing, out)
    return out


def _one_by_one(
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    activation: str,
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    out: Tensor,
) -> None:
    """Fill `out`."""
    num_experts = len(down.weight)
    # Assignments sorted by expert; those to experts that are not here come last.
    flat = chosen.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = flat.bincount(minlength=num_experts + 1).tolist()
    order = flat.argsort(stable=True)[: sum(counts[:num_experts])]
    sorted_x = x[order // chosen.shape[1]]
    parts = torch.empty(len(order), x.shape[1], dtype=torch.float32)
    for expert, end in enumerate(accumulate(counts[:num_experts])):
        if counts[expert]:
            own = slice(end - counts[expert], end)
            parts[own] = _project(_gated(sorted_x[own], gate_up, expert, activation), down, expert)
    rows = torch.full_like(flat, -1)
    rows[order] = torch.arange(len(order))
    add_up(parts, rows.view(chosen.shape), routing, out)


def _gated(x: Tensor, of: ExpertMatrices, expert: int, activation: str) -> Tensor:
    if of.packing is None:
        return activate_and_mul(_project(x, of, expert, x.dtype), activation)
    return linear_gated_packed(x, of.weight[expert], of.packing, _bias(of, expert), activation, of.in_int8)


def _project(x: Tensor, of: ExpertMatrices, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """In the dtype of x; of packed weights, which may be left in float32, in `dtype`."""
    bias = _bias(of, expert)
    if of.packing is not None:
        return linear_packed(x, of.weight[expert], of.packing, bias, dtype, of.in_int8)
    if of.scales is None:
        return linear(x, of.weight[expert], bias)
    if of.weight.dtype == torch.int8:
        return linear_int8(x, of.weight[expert], of.scales[expert], bias, False)
    return linear_fp8(x, of.weight[expert], of.scales[expert], bias)


def _bias(of: ExpertMatrices, expert: int) -> Tensor | None:
    return None if of.bias is None else of.bias[expert]


class _Stage(NamedTuple):
    """One call of a slot, made for rows that nobody needs."""

    call: CompiledCall
    of: ExpertMatrices | None  # of all experts, of one of which a call has the addresses
    result: Tensor  # of the call


def _record_slots(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    activation: str,
    out: Tensor,
) -> bool:
    """Fill `out` by calls that are recorded. False, and nothing was done, where nobody records those of so many rows,
    or there are none."""
    listener = recorder()
    if listener is None or listener.most_rows is not None:
        return False
    (num_tokens, num_chosen), num_experts = chosen.shape, len(down.weight)
    num_rows = num_tokens * num_chosen
    with recorded_by(None):
        stages = _stages(x, gate_up, down, activation)
        slots = [[_copied(stage.call) for stage in stages] for _ in range(min(num_rows, num_experts))]
    if not stages:
        return False
    sorted_x, rows = x.new_empty(num_rows, x.shape[1]), torch.empty_like(chosen)
    results = [x.new_empty(num_rows, stage.result.shape[1], dtype=stage.result.dtype) for stage in stages]
    sort(chosen, num_experts, x, sorted_x, rows, slots, [stage.of for stage in stages], results)
    for call in chain.from_iterable(slots):
        if ctypes.c_int64.from_address(place_of_rows(call)).value > 0:
            run_call(call)
        else:  # this time
            listener.add_call(call)
    add_up(results[-1], rows, routing, out)
    return True


def _stages(x: Tensor, gate_up: ExpertMatrices, down: ExpertMatrices, activation: str) -> list[_Stage]:
    """The calls of a slot that has up to as many rows as `x`; none where others may be needed."""
    rows, both = torch.zeros_like(x), torch.zeros(len(x), gate_up.shape[1], dtype=x.dtype)
    inner = torch.zeros(len(x), down.shape[2], dtype=x.dtype)
    gated = _stage(partial(_gated, of=gate_up, expert=0, activation=activation), rows, gate_up)
    found = [gated]
    if gated is None:  # it takes two
        found = [
            _stage(partial(_project, of=gate_up, expert=0, dtype=x.dtype), rows, gate_up),
            _stage(partial(activate_and_mul, activation=activation), both, None),
        ]
    found.append(_stage(partial(_project, of=down, expert=0), inner, down))
    stages = [stage for stage in found if stage is not None]
    return stages if len(stages) == len(found) else []


def _stage(function: Callable[[Tensor], Tensor], rows: Tensor, of: ExpertMatrices | None) -> _Stage | None:
    """None where it is not one call that takes the rows, and the first expert's weight and bias, as they are, and gives
    what is the result: no operator of torch was before or behind it."""
    results: list[Tensor] = []
    calls = calls_of(lambda: results.append(function(rows)))
    places = calls[0].places if len(calls) == 1 else None
    if places is None or calls[0].most_rows < len(rows):
        return None
    given: dict[int | None, Tensor | None] = {places.x: rows, places.out: results[0]}
    if of is not None:
        given |= {places.weight: of.weight, places.bias: of.bias}
    first = ctypes.addressof(calls[0].arguments)
    has_them = all(
        place is not None and ctypes.c_int64.from_address(first + place).value == tensor.data_ptr()
        for place, tensor in given.items()
        if tensor is not None
    )
    return _Stage(calls[0], of, results[0]) if has_them else None


def _copied(call: CompiledCall) -> CompiledCall:
    """With arguments of its own, which are told what it multiplies; it fetches nothing for others."""
    assert call.places is not None
    arguments, claims = type(call.arguments)(), new_claims(torch.get_num_threads())
    ctypes.memmove(ctypes.addressof(arguments), ctypes.addressof(call.arguments), ctypes.sizeof(arguments))
    ctypes.c_int64.from_address(ctypes.addressof(arguments) + call.places.claims).value = ctypes.addressof(claims)
    return call._replace(arguments=arguments, claims=claims, rows=None, prefetch=None)
