"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.activation import ACTIVATIONS

from ..models.spec import MLPSpec
from ..parallel import ParallelContext
from .linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one matrix product."""

    def __init__(self, spec: MLPSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        size = spec.intermediate_size
        part = parallel.split(size)
        self._activation = spec.activation
        self.gate_up = MergedColumnParallelLinear(hidden_size, size, ("gate", "up"), parallel, bias=spec.bias)
        self.down = RowParallelLinear(size, hidden_size, part, parallel, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        out: Tensor = self.down(self.gate_up.gated(x, self._activation))
        return out


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, spec: MLPSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        size = spec.intermediate_size
        self._activation = ACTIVATIONS[spec.activation]
        self.up = MergedColumnParallelLinear(hidden_size, size, ("",), parallel, bias=spec.bias)
        self.down = RowParallelLinear(size, hidden_size, parallel.split(size), parallel, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        out: Tensor = self.down(self._activation(self.up(x)))
        return out
