"""Rotary position embedding: angles are computed once per step and shared by all layers with the same spec."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from quire.kernels.elementwise import Rotation, angles

from ..models.spec import (
    ChannelScaling,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotarySpec,
    YarnScaling,
)


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations."""

    inv_freq: Tensor  # [rotary_dim / 2] float32

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self._spec = spec
        self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """positions: [num_tokens] int64."""
        cos, sin = angles(positions, self.inv_freq, self._spec.magnitude)
        return Rotation(cos, sin, self._spec.interleaved)


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
