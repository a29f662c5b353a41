"""Rotary position embedding: angles are computed once per step and shared by all layers with the same spec."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.spec import (
    ChannelScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnScaling,
)


class Rotation(NamedTuple):
    """The rotations of the tokens of one step, in the dtype of the model."""

    cos: Tensor  # [num_tokens, 1, rotary_dim]
    sin: Tensor  # [num_tokens, 1, rotary_dim], negated for the first channel of each pair
    interleaved: bool  # pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations."""

    inv_freq: Tensor  # [rotary_dim / 2] float32

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self._spec = spec
        self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: [num_tokens] int64."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos() * self._spec.magnitude, angles.sin() * self._spec.magnitude
        if self._spec.interleaved:
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1), self._spec.interleaved)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """heads: [num_tokens, num_heads, head_dim] -> the same shape, contiguous; channels from rotary_dim on are kept.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    cos, sin, interleaved = rotation
    rotary_dim = cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        rotated = rotate(heads[..., :rotary_dim], rotation)
        return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
    if not interleaved:
        return torch.addcmul(heads * cos, heads.roll(rotary_dim // 2, dims=-1), sin)
    pairs = heads.reshape(*heads.shape[:-1], -1, 2)
    return torch.addcmul(heads * cos, pairs.flip(-1).flatten(-2), sin)


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """[rotary_dim / 2] float32."""
    scaling = spec.scaling
    base = _dynamic_base(spec, scaling) if isinstance(scaling, DynamicScaling) else spec.base
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64, device="cpu").float() / spec.rotary_dim
    inv_freq = 1.0 / (base**exponents)
    match scaling:
        case LinearScaling(factor):
            return inv_freq / factor
        case Llama3Scaling():
            return _llama3(inv_freq, scaling)
        case YarnScaling():
            return _yarn(inv_freq, spec, scaling)
        case ChannelScaling(factors):
            return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * base**exponents)
        case _:
            return inv_freq


def _dynamic_base(spec: RotarySpec, scaling: DynamicScaling) -> float:
    length = max(scaling.max_model_len, scaling.original_max_position)
    stretch = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
    return float(spec.base * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Wavelengths up to original / high_freq_factor stay, those from original / low_freq_factor on are stretched by
    `factor`, and between the two it is interpolated (the reference is in Meta's llama-models repository)."""
    wavelengths = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)  # 0: long wavelengths, 1: short ones
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


def _yarn(inv_freq: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    def channel(num_turns: float) -> float:
        """The channel whose wave turns this often within the original context."""
        turns = scaling.original_max_position / (num_turns * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.base))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # a step, where both ends fall on one channel
    ramp = ((torch.arange(len(inv_freq), dtype=torch.float32, device="cpu") - low) / width).clamp(0.0, 1.0)
    return inv_freq / scaling.factor * ramp + inv_freq * (1 - ramp)
