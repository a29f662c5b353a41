"""What stands between the matrix products of a layer: norms, gated activations, and rotations of queries and keys.

Each is one pass over its rows. A row's result does not depend on the rows beside it. Arithmetic is in float32 whatever
the dtype, and rounded once, when a result is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import fp8
from .activation import GATED
from .dispatch import backend_for
from .ops import DTYPES, check_cache, check_index, check_rows


class Rotation(NamedTuple):
    """How the tokens of one step are rotated (https://arxiv.org/abs/2104.09864), the same in every layer.

    Pair i of a head, (a, b), becomes (a cos[i] - b sin[i], b cos[i] + a sin[i]). Channels of a head from
    2 * num_pairs on are kept.
    """

    cos: Tensor  # [num_tokens, num_pairs] float32, contiguous
    sin: Tensor  # likewise
    interleaved: bool  # pairs are channels (2i, 2i + 1), else (i, i + num_pairs)


class HeadNorms(NamedTuple):
    """RMS norms of the heads of queries and of keys, each head by itself, all of a kind with one weight."""

    query: Tensor  # [head_dim], the weight
    key: Tensor  # likewise
    eps: float
    unit_offset: bool  # weights are stored minus one

    @property
    def offset(self) -> float:
        """What is added to a weight."""
        return 1.0 if self.unit_offset else 0.0

    def apply(
        self, rms_norm: Callable[[Tensor, Tensor, float, float], Tensor], query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys by the norm of a backend."""
        return rms_norm(query, self.query, self.eps, self.offset), rms_norm(key, self.key, self.eps, self.offset)


def angles(positions: Tensor, inv_freq: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """magnitude * cos and magnitude * sin of positions times inv_freq, which is rounded to float32 before.

    Args:
        positions: [num_tokens] int64, contiguous.
        inv_freq: [num_pairs] float32, contiguous.
    Returns two new tensors [num_tokens, num_pairs] float32, contiguous.
    """
    if positions.dim() != 1 or inv_freq.dim() != 1 or positions.stride(0) != 1 or inv_freq.stride(0) != 1:
        raise ValueError(f"positions and inv_freq must be rows, got {tuple(positions.shape)}, {tuple(inv_freq.shape)}")
    if positions.dtype != torch.int64 or inv_freq.dtype != torch.float32:
        raise TypeError(f"positions must be int64, inv_freq float32, got {positions.dtype}, {inv_freq.dtype}")
    return backend_for(positions.device).angles(positions, inv_freq, magnitude)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (https://arxiv.org/abs/1910.07467).

    Args:
        x: [num_rows, size] or [num_tokens, num_heads, size], the last dimension contiguous.
        weight: [size], contiguous, the dtype of `x`.
        unit_offset: the weight is stored minus one.
    Returns a new tensor, contiguous, of the shape and dtype of `x`.
    """
    _check_norm(x, weight)
    return backend_for(x.device).rms_norm(x, weight, eps, 1.0 if unit_offset else 0.0)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False, multiplier: float = 1.0
) -> tuple[Tensor, Tensor]:
    """total = residual + multiplier * x, in their dtype, and `rms_norm(total, weight, eps)`.

    Args:
        x: [num_rows, size], the last dimension contiguous.
        residual: the shape and dtype of `x`, likewise; shares no memory with it. Nobody may need it any more: the
            backend of a GPU stores the total there, and changes nothing else.
        weight, unit_offset: as of `rms_norm`.
    Returns the norm, a new tensor [num_rows, size], contiguous; and the total, in memory of its own or that of
    `residual`.
    """
    _check_norm(residual, weight)
    if x.dim() != 2 or x.shape != residual.shape or x.dtype != residual.dtype or x.stride(1) != 1:
        raise ValueError(
            f"x must be {list(residual.shape)} {residual.dtype} with contiguous rows, got {list(x.shape)} {x.dtype}"
        )
    return backend_for(x.device).add_rms_norm(x, residual, weight, eps, 1.0 if unit_offset else 0.0, multiplier)


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, where a row holds the gate and then up, as one matrix product gives them.

    Args:
        gate_up: [num_rows, 2 * size], the last dimension contiguous.
        activation: silu is x * sigmoid(x); gelu is by the error function, gelu_tanh its approximation by tanh.
    Returns a new tensor [num_rows, size], contiguous, the dtype of `gate_up`.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must be [num_rows, 2 * size] with contiguous rows, got {list(gate_up.shape)}")
    if activation not in GATED:
        raise ValueError(f"activation must be one of {', '.join(GATED)}, got {activation!r}")
    _check_dtype("gate_up", gate_up)
    return backend_for(gate_up.device).activate_and_mul(gate_up, activation)


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """Rotate `heads` in place.

    heads: [num_tokens, num_heads, head_dim], the last dimension contiguous.
    """
    _check_rotation(rotation, heads)
    _check_dtype("heads", heads)
    backend_for(heads.device).rotate(heads, rotation)


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate the queries, and store the rotated keys and the values in the cache.

    The same as `rotate(query)` and `write_kv` of the rotated keys; of what `rms_norm` makes of both, where there are
    `norms`.

    Args:
        query: [num_tokens, num_heads, head_dim], the last dimension contiguous. Nobody may need it any more: a backend
            may rotate it where it stands.
        key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale: as of `ops.write_kv`. The caches are
            modified, the others are not.
    Returns the rotated queries, in memory of their own or that of `query`.
    """
    check_cache(key_cache, value_cache)
    check_rows("query", query, key_cache)
    check_rows("key", key, key_cache)
    check_rows("value", value, value_cache)
    if key.shape != value.shape or key.shape[1] != key_cache.shape[2] or query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must be of the same "
            f"tokens, and key and value of the {key_cache.shape[2]} heads of the cache"
        )
    check_index("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), key_cache.device)
    _check_rotation(rotation, query)
    if norms is not None:
        _check_norm(query, norms.query)
        _check_norm(key, norms.key)
    if key_cache.dtype == fp8.DTYPE:
        key_cache, value_cache = key_cache.view(fp8.BYTES), value_cache.view(fp8.BYTES)
    return backend_for(query.device).rotate_and_write_kv(
        query, key, value, rotation, key_cache, value_cache, slot_mapping, key_scale, value_scale, norms
    )


def _check_norm(x: Tensor, weight: Tensor) -> None:
    shape = x.shape
    if len(shape) not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"x must be [rows, size] or [tokens, heads, size] with contiguous rows, got {list(shape)}")
    if weight.dim() != 1 or weight.shape[0] != shape[-1] or weight.dtype != x.dtype or weight.stride(0) != 1:
        raise ValueError(f"weight must be [{shape[-1]}] {x.dtype}, got {list(weight.shape)} {weight.dtype}")
    _check_dtype("x", x)


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be one of {DTYPES}, got {x.dtype}")


def _check_rotation(rotation: Rotation, heads: Tensor) -> None:
    cos, sin, _ = rotation
    shape = heads.shape
    if len(shape) != 3 or heads.stride(2) != 1:
        raise ValueError(f"heads must be [num_tokens, num_heads, head_dim], the last contiguous, got {list(shape)}")
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != shape[0] or 2 * cos.shape[1] > shape[2]:
        raise ValueError(
            f"cos and sin must be [{shape[0]}, at most {shape[2] // 2}], got {list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.dtype != torch.float32 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise TypeError(f"cos and sin must be contiguous and float32, got {cos.dtype}")
