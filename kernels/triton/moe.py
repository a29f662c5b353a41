"""A mixture of experts as two grouped matrix products.

The assignments of tokens to experts are sorted by expert, and each expert's are cut into tiles of rows:

    order      expert 0: a7 a3 a9 | expert 2: a0 a1 a2 a4 a8 | ...         (a: assignment t * EXPERTS_PER_TOKEN + i)
    tiles      0                  | 1            2           | ...         (BLOCK_M = 4)
    tile_ends  1                  | 1 (expert 1) 3           | ...

A program finds its expert by the number of its tile. How many tiles there are is known on the device alone: the grid
has as many as there could be, and those too many return at once. So nothing waits for the device, and a launch can be
captured in a CUDA graph. An expert's weights are read once per tile of its rows.

Each assignment has a row of its own until the end, when those of a token are added in the order of its experts: sums do
not depend on which program was first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .. import fp8
from . import tiles
from .moe_kernels import down_kernel, gate_up_kernel
from .numbers import PLAIN, dot_options, e4m3_format


def experts(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gate_up_scales: Tensor | None,
    down_scales: Tensor | None,
    num_experts_in_all: int | None,
) -> Tensor:
    """See `ops.experts`."""
    num_tokens, experts_per_token = chosen.shape
    num_experts, hidden_size, size = down.shape
    num_assignments = num_tokens * experts_per_token
    if num_tokens == 0:
        return torch.empty_like(x)
    tile = tiles.gemm(x.device, "moe", num_rows=num_assignments // (num_experts_in_all or num_experts), dtype=x.dtype)
    order, ends, tile_ends = _sorted_by_expert(chosen, num_experts, tile.block_m)
    most_tiles = min(num_assignments, num_assignments // tile.block_m + num_experts)
    shared: dict[str, Any] = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_PADDED": triton.next_power_of_2(num_experts),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "WEIGHT_FORMAT": PLAIN.value,
        **dot_options(x.dtype),
    }
    if down.dtype == fp8.DTYPE:
        gate_up, down = gate_up.view(torch.uint8), down.view(torch.uint8)
        shared["WEIGHT_FORMAT"] = e4m3_format(x.device)
    inner = x.new_empty(num_assignments, size)
    gate_up_kernel[(most_tiles, triton.cdiv(size, tile.block_n))](
        inner, x, gate_up, ends if gate_up_scales is None else gate_up_scales, order, ends, tile_ends,
        x.stride(0), size, hidden_size, EXPERTS_PER_TOKEN=experts_per_token, ACTIVATION=activation,
        HAS_SCALES=gate_up_scales is not None, **shared,
    )  # fmt: skip
    # Assignments to experts that are not here have no tile: their rows stay zero.
    allocate = torch.empty if num_experts_in_all == num_experts else torch.zeros
    parts = allocate(num_assignments, hidden_size, dtype=torch.float32, device=x.device)
    down_kernel[(most_tiles, triton.cdiv(hidden_size, tile.block_n))](
        parts, inner, down, ends if down_scales is None else down_scales, routing.contiguous(), order, ends, tile_ends,
        size, hidden_size, HAS_SCALES=down_scales is not None, **shared,
    )  # fmt: skip
    return parts.view(num_tokens, experts_per_token, hidden_size).sum(dim=1).to(x.dtype)


def _sorted_by_expert(chosen: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """`order`, `ends` and `tile_ends`, see above. Assignments to none of them come last and belong to no tile."""
    flat = chosen.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    # Not `bincount`, which waits for the device to learn how large its result is.
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    counts = counts[:num_experts]
    ends, tile_ends = counts.cumsum(0), ((counts + block_m - 1) // block_m).cumsum(0)
    return flat.argsort(stable=True), ends.to(torch.int32), tile_ends.to(torch.int32)
