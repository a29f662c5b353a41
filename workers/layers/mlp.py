"""The feed-forward block of a decoder layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..models.spec import MLPSpec
from ..parallel import ParallelContext
from .linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix product."""

    def __init__(self, spec: MLPSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        size = spec.intermediate_size
        part = parallel.split(size)
        self._own_size = len(part)
        self.gate_up = MergedColumnParallelLinear(hidden_size, size, ("gate", "up"), parallel, bias=spec.bias)
        self.down = RowParallelLinear(size, hidden_size, part, parallel, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        gate, up = self.gate_up(x).split(self._own_size, dim=-1)
        out: Tensor = self.down(F.silu(gate).mul_(up))
        return out
