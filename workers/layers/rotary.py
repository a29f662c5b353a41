"""Rotary position embedding: angles are computed once per step and shared by all layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.spec import Llama3Scaling, RotarySpec


class Rotation(NamedTuple):
    """The rotations of the tokens of one step, in the dtype of the model."""

    cos: Tensor  # [num_tokens, 1, rotary_dim]
    sin: Tensor  # [num_tokens, 1, rotary_dim], the first half negated


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations."""

    inv_freq: Tensor  # [rotary_dim / 2] float32

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: [num_tokens] int64."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)
        )


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """heads: [num_tokens, num_heads, rotary_dim], rotated by halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), sin)


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """[rotary_dim / 2] float32."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / spec.rotary_dim
    inv_freq = 1.0 / (spec.base**exponents)
    return inv_freq if spec.scaling is None else _llama3(inv_freq, spec.scaling)


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths up to original / high_freq_factor stay, those from original / low_freq_factor on are stretched by
    `factor`, and between the two it is interpolated (the reference is in Meta's llama-models repository)."""
    wavelengths = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)  # 0: long wavelengths, 1: short ones
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
