"""Reference of a mixture of experts: assignment by assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..activation import gated
from ..packed import unpack
from .linear import scaled

if TYPE_CHECKING:
    from ..ops import ExpertMatrices


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
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str,
    num_experts_in_all: int | None,  # noqa: ARG001
) -> Tensor:
    """See `ops.experts`."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, places in enumerate(chosen.tolist()):
        for index, expert in enumerate(places):
            if 0 <= expert < len(down.weight):
                inner = gated(activation, *_project(gate_up, expert, x[token].float()).chunk(2))
                out[token] += routing[token, index] * _project(down, expert, inner)
    return out.to(x.dtype)


def _project(of: ExpertMatrices, expert: int, x: Tensor) -> Tensor:
    result = _matrix(of, expert) @ x
    return result if of.bias is None else result + of.bias[expert].float()


def _matrix(of: ExpertMatrices, expert: int) -> Tensor:
    if of.packing is not None:
        return unpack(of.weight[expert], of.packing)
    matrix = of.weight[expert]
    return matrix.float() if of.scales is None else scaled(matrix, of.scales[expert])
