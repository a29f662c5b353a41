"""Normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.spec import NormSpec
from .parameter import ShardedParameter, replicated


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (https://arxiv.org/abs/1910.07467), or layer norm."""

    def __init__(self, spec: NormSpec, size: int) -> None:
        super().__init__()
        self._spec = spec
        self._shape = (size,)
        self.weight = ShardedParameter(torch.empty(size), replicated((size,)))
        self.bias = ShardedParameter(torch.empty(size), replicated((size,))) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., size]; accumulated in float32."""
        if self._spec.kind == "layer":
            return F.layer_norm(x, self._shape, self.weight, self.bias, self._spec.eps)
        if self._spec.unit_offset:
            # In float32: one plus a small weight would lose most of it in a short type.
            return F.rms_norm(x.float(), self._shape, 1.0 + self.weight.float(), self._spec.eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self._spec.eps)


def norm_or_identity(spec: NormSpec | None, size: int) -> nn.Module:
    return nn.Identity() if spec is None else Norm(spec, size)
