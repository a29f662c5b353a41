# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Paged attention for mixed batches: one kernel for prefill chunks and decodes.

A program works for one KV head and a few consecutive query tokens of one request. The query heads that share the KV
head are rows of the same tile, so a key or value is loaded once for all of them:

    rows of the tile, GROUP = 3        token 0        token 1        ...
                                       h0 h1 h2       h0 h1 h2       ...        (rows beyond BLOCK_Q * GROUP idle)

It walks over the visible keys in tiles and keeps a running softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et
al., arXiv 2205.14135). The order of the keys depends on the request alone, so its result does not depend on the batch
while the tile shapes are the same.

Programs are laid out over query tokens without knowing on the host where requests begin: request r owns the programs
from `query_start_loc[r] // BLOCK_Q + r` on, which leaves it at least as many as it has blocks of queries; the ones too
many return at once. So the grid depends on the shapes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import fp8

if TYPE_CHECKING:
    from ..ops import AttentionMetadata


@triton.jit
def _find_request(query_start_loc, num_reqs, q_block, BLOCK_Q: tl.constexpr):
    """The last request whose first program is not after `q_block`."""
    left = 0
    right = num_reqs
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= q_block:
            left = middle
        else:
            right = middle
    return left


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _load(pointers, mask, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Numbers of a cache. Those in 8 bits are decoded by hand, which older GPUs and the interpreter can do as well:
    the bits of an e4m3, moved to where a float16 has its exponent, are a number 256 times as small."""
    x = tl.load(pointers, mask=mask, other=0)
    if FP8:
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = (half.to(tl.float32) * 256.0).to(DTYPE)
    return x


@triton.jit
def _paged_attention_kernel(
    out,  # [num_tokens, num_heads, head_dim], contiguous
    query,  # [num_tokens, num_heads, head_dim]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], contiguous
    value_cache,  # likewise
    query_start_loc,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    block_table,  # [num_reqs, max_blocks] int32
    sinks,  # [num_heads] float32, or anything
    scale,  # times the scale of keys in 8 bits
    softcap,
    value_scale,
    num_reqs,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    block_table_stride,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,  # rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    FP8: tl.constexpr,  # the caches are bytes
    BLOCK_M: tl.constexpr,  # rows of the tile
    BLOCK_N: tl.constexpr,  # keys per iteration
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = _find_request(query_start_loc, num_reqs, q_block, BLOCK_Q)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    first_query = (q_block - query_start // BLOCK_Q - request) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + request)

    row = tl.arange(0, BLOCK_M)
    query_token = first_query + row // GROUP
    row_used = (row < BLOCK_Q * GROUP) & (query_token < query_len)
    query_position = seq_len - query_len + query_token
    head = kv_head * GROUP + row % GROUP
    token = (query_start + query_token).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    dim_used = dim < HEAD_DIM
    q_mask = row_used[:, None] & dim_used[None, :]
    q_offset = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_offset, mask=q_mask, other=0.0)

    # Keys begin .. end - 1 are visible to some row of this tile; others are never loaded, and may be anything.
    end = seq_len - query_len + min(first_query + BLOCK_Q, query_len)
    begin = 0
    if SLIDING_WINDOW > 0:
        begin = max(0, seq_len - query_len + first_query - SLIDING_WINDOW + 1)

    LOG2_E: tl.constexpr = 1.4426950408889634
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if USE_SINKS:  # as if a key without a value had been seen
        highest = tl.load(sinks + head) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    for tile in range(begin // BLOCK_N, tl.cdiv(end, BLOCK_N)):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        loaded = (position >= begin) & (position < end)
        entry = block_table + request.to(tl.int64) * block_table_stride + position // BLOCK_SIZE
        block_id = tl.load(entry, mask=loaded, other=0).to(tl.int64)
        cache_row = (block_id * BLOCK_SIZE + position % BLOCK_SIZE) * num_kv_heads + kv_head
        cache_offset = cache_row[:, None] * HEAD_DIM + dim[None, :]
        cache_mask = loaded[:, None] & dim_used[None, :]
        k = _load(key_cache + cache_offset, cache_mask, q.dtype, FP8)
        scores = _dot(q, tl.trans(k), PRECISION, UPCAST) * scale
        if USE_SOFTCAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        visible = loaded[None, :] & (position[None, :] <= query_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (position[None, :] > query_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A row may have seen no visible key yet (window): -inf - -inf would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        v = _load(value_cache + cache_offset, cache_mask, q.dtype, FP8)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + _dot(weights.to(v.dtype), v, PRECISION, UPCAST)
        highest = new_highest

    acc = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_offset = (token[:, None] * (num_kv_heads * GROUP) + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(out + out_offset, acc.to(out.dtype.element_ty), mask=q_mask)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0 or metadata.num_reqs == 0:
        return out
    in_bytes = key_cache.dtype == fp8.DTYPE
    if in_bytes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    group = num_heads // num_kv_heads
    # 16 rows is the least that a matrix instruction takes; a batch of decodes needs `group` of them.
    block_m = max(triton.next_power_of_2(group), 16 if metadata.max_query_len == 1 else 64)
    block_q = block_m // group
    _paged_attention_kernel[(num_tokens // block_q + metadata.num_reqs, num_kv_heads)](
        out,
        query,
        key_cache,
        value_cache,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        metadata.seq_lens if sinks is None else sinks,
        scale * key_scale,
        softcap or 1.0,
        value_scale,
        metadata.num_reqs,
        num_kv_heads,
        query.stride(0),
        query.stride(1),
        metadata.block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=sliding_window or 0,
        USE_SOFTCAP=softcap is not None,
        USE_SINKS=sinks is not None,
        FP8=in_bytes,
        BLOCK_M=block_m,
        BLOCK_N=64 if head_dim <= 128 else 32,
        # float32 models are run for exactness: TF32 would leave 10 bits of mantissa.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # Triton's interpreter keeps bfloat16 as integers and would multiply the bit patterns.
        UPCAST=query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
        num_warps=4,
    )
    return out
