"""Normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parameter import WHOLE, Piece, ShardedParameter, whole


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._shape = (size,)
        self._eps = eps
        self.weight = ShardedParameter(torch.empty(size), {WHOLE: Piece((size,), whole((size,)), whole((size,)))})

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]; accumulated in float32."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)
