# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Writing to the cache: one program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import fp8
from .numbers import to_e4m3
from .sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim]
    value,  # likewise
    key_cache,  # [num_slots, num_kv_heads * head_dim], contiguous
    value_cache,  # likewise
    slot_mapping,  # [num_tokens] int64
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_scale,
    value_scale,
    HEAD_DIM: tl.constexpr,
    TOKEN_SIZE: tl.constexpr,  # num_kv_heads * head_dim
    BLOCK: tl.constexpr,  # TOKEN_SIZE rounded up to a power of two
    IN_BYTES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.arange(0, BLOCK)
    inside = element < TOKEN_SIZE
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=inside)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=inside)
    if IN_BYTES:
        k = to_e4m3(k.to(tl.float32), key_scale)
        v = to_e4m3(v.to(tl.float32), value_scale)
    tl.store(key_cache + slot * TOKEN_SIZE + element, k, mask=inside)
    tl.store(value_cache + slot * TOKEN_SIZE + element, v, mask=inside)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_scale,
        value_scale,
        HEAD_DIM=head_dim,
        TOKEN_SIZE=num_kv_heads * head_dim,
        BLOCK=next_power_of_2(num_kv_heads * head_dim),
        IN_BYTES=key_cache.dtype == fp8.BYTES,
    )
