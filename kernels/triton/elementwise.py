# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Norms, gated activations and rotations: one program per row, or per block of a row where rows are independent of it.

Nothing is read back from the device, so that all of them can be part of a captured graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import fp8
from .chain import chained, wait_for_others
from .gates import activate, bounded
from .numbers import to_e4m3
from .sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from ..elementwise import HeadNorms, Rotation

_GATE_BLOCK = 1024


@triton.jit
def _norm_kernel(
    x,  # [num_tokens, HEADS, SIZE]
    residual,  # [num_tokens, SIZE]; read and written where ADD
    weight,  # [SIZE]
    out,  # [num_tokens, HEADS, SIZE], contiguous
    x_stride,
    head_stride,
    residual_stride,
    eps,
    offset,
    multiplier,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE rounded up to a power of two
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_others(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    head = row % HEADS
    channel = tl.arange(0, BLOCK)
    inside = channel < SIZE
    values = tl.load(x + token * x_stride + head * head_stride + channel, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + token * residual_stride + channel
        stream = tl.load(place, mask=inside, other=0.0).to(tl.float32) + multiplier * values
        rounded = stream.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    factor = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row * SIZE + channel, (values * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(
    gate_up,  # [num_rows, 2 * size]
    out,  # [num_rows, size], contiguous
    stride,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_others(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    x = tl.load(gate_up + row * stride + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + channel, mask=inside, other=0.0).to(tl.float32)
    x, up = bounded(x, up, ACTIVATION)
    tl.store(out + row * size + channel, (activate(x, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    heads,  # the first channel of a token's heads
    head_stride,
    head,  # [HEADS, 1]
    channel,  # [1, CHANNELS]
    inside,  # [HEADS, CHANNELS]
    cos,  # the first pair of a token
    sin,
    weight,  # [HEAD_DIM] of a norm before the rotation, where NORM
    eps,
    offset,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Channels of some heads after the rotation: each is read with its partner."""
    if INTERLEAVED:
        pair = channel // 2
        is_first = channel % 2 == 0
        partner = tl.where(is_first, channel + 1, channel - 1)
    else:
        pair = channel % NUM_PAIRS
        is_first = channel < NUM_PAIRS
        partner = tl.where(is_first, channel + NUM_PAIRS, channel - NUM_PAIRS)
    turned = inside & (channel < 2 * NUM_PAIRS)
    own = tl.load(heads + head * head_stride + channel, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(heads + head * head_stride + partner, mask=turned, other=0.0).to(tl.float32)
    if NORM:  # rounded where a norm by itself would round
        dtype = heads.dtype.element_ty
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        own_factor = tl.load(weight + channel, mask=channel < HEAD_DIM, other=0.0).to(tl.float32) + offset
        other_factor = tl.load(weight + partner, mask=channel < 2 * NUM_PAIRS, other=0.0).to(tl.float32) + offset
        own = (own * scale * own_factor).to(dtype).to(tl.float32)
        other = (other * scale * other_factor).to(dtype).to(tl.float32)
    c = tl.load(cos + pair, mask=channel < 2 * NUM_PAIRS, other=1.0)
    s = tl.load(sin + pair, mask=channel < 2 * NUM_PAIRS, other=0.0)
    return own * c + tl.where(is_first, -other, other) * s


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], rotated in place
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]; this and all below are used where NUM_KV_HEADS > 0
    value,  # likewise
    cos,  # [num_tokens, NUM_PAIRS] float32
    sin,  # likewise
    key_cache,  # [num_slots, NUM_KV_HEADS, HEAD_DIM], contiguous
    value_cache,  # likewise
    slot_mapping,  # [num_tokens] int64
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_scale,
    value_scale,
    query_weight,  # [HEAD_DIM] of a norm before the rotation; this and all below are used where NORM
    key_weight,  # likewise
    eps,
    offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    CHANNELS_BLOCK: tl.constexpr,
    IN_BYTES: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per token."""
    wait_for_others(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    cos += token * NUM_PAIRS
    sin += token * NUM_PAIRS
    channel = tl.arange(0, CHANNELS_BLOCK)[None, :]
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    inside = (head < NUM_HEADS) & (channel < HEAD_DIM)
    heads = query + token * query_stride
    turned = _rotated(
        heads, query_head_stride, head, channel, inside, cos, sin, query_weight, eps, offset,
        HEAD_DIM, NUM_PAIRS, INTERLEAVED, NORM,
    )  # fmt: skip
    tl.debug_barrier()  # partners are read before any is overwritten
    tl.store(heads + head * query_head_stride + channel, turned.to(query.dtype.element_ty), mask=inside)
    if NUM_KV_HEADS > 0:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            kv_head = tl.arange(0, KV_HEADS_BLOCK)[:, None]
            kv_inside = (kv_head < NUM_KV_HEADS) & (channel < HEAD_DIM)
            keys = key + token * key_stride
            kept = _rotated(
                keys, key_head_stride, kv_head, channel, kv_inside, cos, sin, key_weight, eps, offset,
                HEAD_DIM, NUM_PAIRS, INTERLEAVED, NORM,
            )  # fmt: skip
            kept = kept.to(key.dtype.element_ty)
            read = tl.load(value + token * value_stride + kv_head * value_head_stride + channel, mask=kv_inside)
            if IN_BYTES:
                kept = to_e4m3(kept.to(tl.float32), key_scale)
                read = to_e4m3(read.to(tl.float32), value_scale)
            place = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + channel
            tl.store(key_cache + place, kept, mask=kv_inside)
            tl.store(value_cache + place, read, mask=kv_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See `elementwise.rms_norm`; `offset` is what the weight is stored minus."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    _launch_norm(x, None, weight, out, num_heads, head_stride, eps, offset, 0.0)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, multiplier: float
) -> tuple[Tensor, Tensor]:
    """See `elementwise.add_rms_norm`. The total is stored in place."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_norm(x, residual, weight, out, 1, 0, eps, offset, multiplier)
    return out, residual


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    num_heads: int,
    head_stride: int,
    eps: float,
    offset: float,
    multiplier: float,
) -> None:
    num_rows, size = x.shape[0] * num_heads, weight.shape[0]
    if num_rows == 0:
        return
    block = next_power_of_2(size)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        head_stride,
        0 if residual is None else residual.stride(0),
        eps,
        offset,
        multiplier,
        HEADS=num_heads,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=max(1, min(8, block // 512)),
        **chained(x.device),
    )


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """See `elementwise.activate_and_mul`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        grid = (num_rows, cdiv(size, _GATE_BLOCK))
        _gate_kernel[grid](
            gate_up, out, gate_up.stride(0), size, ACTIVATION=activation, BLOCK=_GATE_BLOCK, **chained(gate_up.device)
        )
    return out


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """See `elementwise.rotate`."""
    _launch_rotate(heads, None, None, rotation, None, None, None, 1.0, 1.0, None)


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
    """See `elementwise.rotate_and_write_kv`. Queries are rotated in place."""
    _launch_rotate(query, key, value, rotation, key_cache, value_cache, slot_mapping, key_scale, value_scale, norms)
    return query


def _launch_rotate(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    rotation: Rotation,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slot_mapping: Tensor | None,
    key_scale: float,
    value_scale: float,
    norms: HeadNorms | None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    num_kv_heads = 0 if key is None else key.shape[1]
    _rotate_kernel[(num_tokens,)](
        query,
        key,
        value,
        rotation.cos,
        rotation.sin,
        key_cache,
        value_cache,
        slot_mapping,
        *query.stride()[:2],
        *((0, 0) if key is None else key.stride()[:2]),
        *((0, 0) if value is None else value.stride()[:2]),
        key_scale,
        value_scale,
        *((None, None, 0.0, 0.0) if norms is None else (norms.query, norms.key, norms.eps, norms.offset)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=rotation.cos.shape[1],
        INTERLEAVED=rotation.interleaved,
        HEADS_BLOCK=next_power_of_2(num_heads),
        KV_HEADS_BLOCK=next_power_of_2(max(1, num_kv_heads)),
        CHANNELS_BLOCK=next_power_of_2(head_dim),
        IN_BYTES=key_cache is not None and key_cache.dtype == fp8.BYTES,
        NORM=norms is not None,
        **chained(query.device),
    )
