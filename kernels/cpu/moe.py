"""A mixture of experts on CPU: each expert's tokens are one matrix.

Which experts are needed is known when a router has chosen. While nobody records, that is looked at here, and their
products are called one after the other. A record (`recording`) has to have its calls before: so it has slots, a pair
of products for each expert that may be chosen, and a call before them that fills in what each of them multiplies:

    sort | slot 0: gate_up, down | slot 1: gate_up, down | ... | add up
     |          ^                      ^
     +----------+----------------------+---- rows of x, weights, results; no rows for slots that are left over

That is for weights that are packed, and as many tokens as take one call for each product. Others are one action.
"""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import codes
from .claims import new_claims
from .elementwise import activate_and_mul
from .linear import linear, linear_fp8, linear_gated_packed, linear_int8, linear_packed
from .packed_call import CLAIMS, ProductArguments
from .recording import CompiledCall, as_one_action, calls_of, recorded_by, recorder
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
        chosen, routing = chosen.contiguous(), routing.contiguous()
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
        return activate_and_mul(_project(x, of, expert), activation)
    return linear_gated_packed(x, of.weight[expert], of.packing, None, activation, of.in_int8)


def _project(x: Tensor, of: ExpertMatrices, expert: int) -> Tensor:
    if of.packing is not None:
        return linear_packed(x, of.weight[expert], of.packing, None, torch.float32, of.in_int8)
    if of.scales is None:
        return linear(x, of.weight[expert], None)
    scaled = linear_int8 if of.weight.dtype == torch.int8 else linear_fp8
    return scaled(x, of.weight[expert], of.scales[expert], None)


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
    (num_tokens, num_chosen), num_experts, size = chosen.shape, len(down.weight), down.shape[2]
    with recorded_by(None):
        first, second = _product_of(num_tokens, x, gate_up, activation), _product_of(num_tokens, x, down, "")
        if first is None or second is None:
            return False
        num_slots = min(num_tokens * num_chosen, num_experts)
        slots = [(_copied(first), _copied(second)) for _ in range(num_slots)]
        addresses = torch.tensor([[ctypes.addressof(call.arguments) for call in slot] for slot in slots])
    num_rows = num_tokens * num_chosen
    sorted_x, rows = x.new_empty(num_rows, x.shape[1]), torch.empty_like(chosen)
    inner, parts = x.new_empty(num_rows, size), x.new_empty(num_rows, x.shape[1], dtype=torch.float32)
    sort(chosen, x, sorted_x, rows, addresses, ((gate_up.weight, inner), (down.weight, parts)))
    for slot in slots:
        for call in slot:
            run_call(call)
    add_up(parts, rows, routing, out)
    return True


def _product_of(num_rows: int, x: Tensor, of: ExpertMatrices, activation: str) -> CompiledCall | None:
    """The call that multiplies up to so many rows with an expert's matrix; None where it takes another, or several."""
    if of.packing is None or (activation and not codes.fits_gated(of.shape[1], activation)):
        return None
    rows = torch.zeros(num_rows, of.shape[2], dtype=x.dtype)
    if activation:
        calls = calls_of(partial(_gated, rows, of, 0, activation))
    else:
        calls = calls_of(partial(_project, rows, of, 0))
    is_one = len(calls) == 1 and isinstance(calls[0].arguments, ProductArguments)
    return calls[0] if is_one and calls[0].most_rows >= num_rows else None


def _copied(call: CompiledCall) -> CompiledCall:
    """With arguments of its own, which are told what it multiplies; it fetches nothing for others."""
    arguments, claims = ProductArguments(*call.arguments), new_claims(torch.get_num_threads())
    arguments[CLAIMS] = ctypes.addressof(claims)
    return call._replace(arguments=arguments, claims=claims, rows=None, prefetch=None)
