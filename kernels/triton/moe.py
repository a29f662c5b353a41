"""A mixture of experts as two grouped matrix products.

The assignments of tokens to experts are sorted by expert, and each expert's are cut into tiles of rows:

    order      expert 0: a3 a7 a9 | expert 2: a0 a1 a2 a4 a8 | ...         (a: assignment t * EXPERTS_PER_TOKEN + i)
    ends       3                  | 3 (expert 1) 8           | ...
    tiles      0                  | 1            2           | ...         (BLOCK_M = 4)

A program finds its expert by the number of its tile. How many tiles there are is known on the device alone: the grid
has as many as there could be, and those too many return at once. So nothing waits for the device, and a launch can be
captured in a CUDA graph. An expert's weights are read once per tile of its rows.

Each assignment has a row of its own until the end, when those of a token are added in the order of its experts: sums do
not depend on which program was first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import fp8
from . import tiles
from .moe_kernels import add_kernel, choose_kernel, down_kernel, gate_up_kernel, sort_kernel
from .numbers import PLAIN, dot_options, e4m3_format, group_options
from .packed_kernels import form_of
from .sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from ..ops import ExpertMatrices

_FEW, _MANY = 512, 4096  # assignments that a program sorts at a time
_FEATURES = 1024  # that a program adds


def choose_experts(
    logits: Tensor, experts_per_token: int, *, renormalize: bool, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `ops.choose_experts`. Padding chooses none: a graph reads no expert for it."""
    num_tokens, num_experts = logits.shape
    routing = torch.empty(num_tokens, experts_per_token, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, experts_per_token, dtype=torch.int64, device=logits.device)
    if num_tokens:
        choose_kernel[(num_tokens,)](
            chosen, routing, logits, slots, logits.stride(0), num_experts, EXPERTS_PER_TOKEN=experts_per_token,
            PLACES_PADDED=next_power_of_2(experts_per_token), EXPERTS_PADDED=next_power_of_2(num_experts),
            RENORMALIZE=renormalize, HAS_SLOTS=slots is not None, num_warps=1,
        )  # fmt: skip
    return chosen, routing


def experts(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str,
    num_experts_in_all: int | None,
) -> Tensor:
    """See `ops.experts`."""
    num_tokens, experts_per_token = chosen.shape
    num_experts, hidden_size, size = down.shape
    num_assignments = num_tokens * experts_per_token
    chosen = chosen.contiguous()
    if num_tokens == 0:
        return torch.empty_like(x)
    order, ends = _sorted_by_expert(chosen, num_experts)
    rows_each = num_assignments // (num_experts_in_all or num_experts)

    def options(of: ExpertMatrices, features: int) -> tuple[tuple[int, int], dict[str, Any]]:
        """A grid for so many features of each expert, and what a kernel is compiled for."""
        tile = tiles.gemm(x.device, "packed_moe" if of.packing else "moe", num_rows=rows_each, dtype=x.dtype)
        most_tiles = min(num_assignments, num_assignments // tile.block_m + num_experts)
        return (most_tiles, cdiv(features, tile.block_n)), {
            "NUM_EXPERTS": num_experts,
            "EXPERTS_PADDED": next_power_of_2(num_experts),
            "HAS_SCALES": of.scales is not None,
            "HAS_BIAS": of.bias is not None,
            "WEIGHT_FORMAT": e4m3_format(x.device) if of.weight.dtype == fp8.DTYPE else PLAIN.value,
            "FORM": None if of.packing is None else form_of(of.packing),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **group_options(of.scales, 2, of.shape[2], tile.block_k),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            **dot_options(x.dtype),
        }

    grid, compiled_for = options(gate_up, size)
    inner = x.new_empty(num_assignments, size)
    gate_up_kernel[grid](
        inner, x, *_tensors(gate_up, ends), order, ends, x.stride(0), size, hidden_size,
        EXPERTS_PER_TOKEN=experts_per_token, ACTIVATION=activation, **compiled_for,
    )  # fmt: skip
    grid, compiled_for = options(down, hidden_size)
    parts = torch.empty(num_assignments, hidden_size, dtype=torch.float32, device=x.device)
    down_kernel[grid](
        parts, inner, *_tensors(down, ends), routing.contiguous(), order, ends, size, hidden_size, **compiled_for
    )
    out = torch.empty(num_tokens, hidden_size, dtype=x.dtype, device=x.device)
    add_kernel[(num_tokens, cdiv(hidden_size, _FEATURES))](
        out, parts, chosen, hidden_size, NUM_EXPERTS=num_experts, EXPERTS_PER_TOKEN=experts_per_token, BLOCK=_FEATURES
    )
    return out


def _tensors(of: ExpertMatrices, anything: Tensor) -> list[Tensor]:
    """The weight, the float16 of a packed one, scales and biases, or anything in their place."""
    weight = of.weight.view(torch.uint8) if of.weight.dtype == fp8.DTYPE else of.weight
    float16s = None if of.packing is None else weight.view(torch.float16)
    return [anything if each is None else each for each in (weight, float16s, of.scales, of.bias)]


def _sorted_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`order` and `ends`, see above. Assignments to none of the experts have no place."""
    num_assignments = chosen.numel()
    order = torch.empty(num_assignments, dtype=torch.int64, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    block = _FEW if num_assignments <= _FEW else _MANY
    sort_kernel[(num_experts,)](order, ends, chosen, num_assignments, BLOCK=block, num_warps=4 if block == _FEW else 8)
    return order, ends
