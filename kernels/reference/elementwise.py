"""Reference of norms, gated activations and rotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..activation import gated
from .attention import write_kv

if TYPE_CHECKING:
    from ..elementwise import HeadNorms, Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See `elementwise.rms_norm`; `offset` is what the weight is stored minus."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype).contiguous()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, multiplier: float
) -> tuple[Tensor, Tensor]:
    """See `elementwise.add_rms_norm`."""
    total = (residual.float() + multiplier * x.float()).to(residual.dtype)
    return rms_norm(total, weight, eps, offset), total


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """See `elementwise.activate_and_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gated(activation, gate, up).to(gate_up.dtype)


def angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """See `elementwise.angles`."""
    found = positions[:, None].float() * inv_freq
    cos, sin = found.cos(), found.sin()
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """See `elementwise.rotate`."""
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    num_pairs = cos.shape[-1]
    if rotation.interleaved:
        first, second = heads[..., 0 : 2 * num_pairs : 2], heads[..., 1 : 2 * num_pairs : 2]
    else:
        first, second = heads[..., :num_pairs], heads[..., num_pairs : 2 * num_pairs]
    a, b = first.float(), second.float()
    turned = a * cos - b * sin, b * cos + a * sin  # both, before either overwrites what it is made of
    first.copy_(turned[0])
    second.copy_(turned[1])


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
    norms: HeadNorms | None,
) -> Tensor:
    """See `elementwise.rotate_and_write_kv`."""
    if norms is not None:
        query, key = norms.apply(rms_norm, query, key)
    rotate(query, rotation)
    key = key.clone()
    rotate(key, rotation)
    write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return query
