"""Normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.elementwise import add_rms_norm, rms_norm

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
        """[num_rows, size] or [num_tokens, num_heads, size] -> the same shape; accumulated in float32."""
        spec = self._spec
        if spec.kind == "layer":
            return F.layer_norm(x, self._shape, self.weight, self.bias, spec.eps)
        return rms_norm(x, self.weight, spec.eps, unit_offset=spec.unit_offset)

    def after_adding(self, x: Tensor, stream: Tensor, multiplier: float) -> tuple[Tensor, Tensor]:
        """The norm of stream + multiplier * x, and that itself, maybe where the stream was: each [num_tokens, size]."""
        spec = self._spec
        if spec.kind == "layer":
            stream = stream.add(x, alpha=multiplier)
            return F.layer_norm(stream, self._shape, self.weight, self.bias, spec.eps), stream
        return add_rms_norm(x, stream, self.weight, spec.eps, unit_offset=spec.unit_offset, multiplier=multiplier)


class NoNorm(nn.Module):
    """Where a layer has no norm."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def after_adding(self, x: Tensor, stream: Tensor, multiplier: float) -> tuple[Tensor, Tensor]:
        """stream + multiplier * x, as both."""
        stream = stream.add(x, alpha=multiplier)
        return stream, stream


def optional_norm(spec: NormSpec | None, size: int) -> Norm | NoNorm:
    return NoNorm() if spec is None else Norm(spec, size)
