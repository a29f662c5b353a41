"""Reference of a mixture of experts: assignment by assignment."""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation import ACTIVATIONS


def choose_experts(
    logits: Tensor,
    experts_per_token: int,
    *,
    renormalize: bool,
    slots: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """See `ops.choose_experts`. Padding chooses as others do."""
    routing, chosen = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
    return chosen, routing / routing.sum(dim=-1, keepdim=True) if renormalize else routing


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
    num_experts_in_all: int | None,  # noqa: ARG001
) -> Tensor:
    """See `ops.experts`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, places in enumerate(chosen.tolist()):
        for index, expert in enumerate(places):
            if 0 <= expert < len(down):
                both = _matrix(gate_up, gate_up_scales, expert) @ x[token].float()
                gate, up = both.chunk(2)
                inner = ACTIVATIONS[activation](gate) * up
                out[token] += routing[token, index] * (_matrix(down, down_scales, expert) @ inner)
    return out.to(x.dtype)


def _matrix(weights: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    matrix = weights[expert].float()
    return matrix if scales is None else matrix * scales[expert, :, None]
