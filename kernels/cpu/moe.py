"""A mixture of experts on CPU: each expert's tokens are one matrix."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .elementwise import activate_and_mul
from .linear import linear, linear_fp8, linear_int8


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
    num_experts_in_all: int | None,  # noqa: ARG001 (rows are sorted either way)
) -> Tensor:
    """See `ops.experts`."""
    num_experts = len(down)
    # Assignments sorted by expert; those to experts that are not here come last.
    flat = chosen.flatten()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = flat.argsort(stable=True)
    tokens = order // chosen.shape[1]
    weights = routing.flatten()[order, None].to(x.dtype)
    counts = flat.bincount(minlength=num_experts + 1).tolist()
    out = torch.zeros_like(x)
    for expert, end in enumerate(accumulate(counts[:num_experts])):
        if counts[expert]:
            own = slice(end - counts[expert], end)
            gated = activate_and_mul(_project(x[tokens[own]], gate_up, gate_up_scales, expert), activation)
            part = _project(gated, down, down_scales, expert)
            out.index_add_(0, tokens[own], part.mul_(weights[own]))
    return out


def _project(x: Tensor, weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    if scales is None:
        return linear(x, weights[expert], None)
    scaled = linear_int8 if weights.dtype == torch.int8 else linear_fp8
    return scaled(x, weights[expert], scales[expert], None)
