# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""The kernels of paged attention. `attention` says how they work together, and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .chain import wait_for_others
from .numbers import dot, widen

# Integers that differ from batch to batch are not specialized: a server must not compile while it serves.

LOG2_E = tl.constexpr(1.4426950408889634)
MERGED_AT_ONCE = tl.constexpr(8)


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
def _fold(acc, highest, total, next_acc, next_highest, next_total):
    """Sums of some splits and of the one after them: [BLOCK_M, HEAD_DIM_PADDED], [BLOCK_M], [BLOCK_M]. One after the
    other, by the same operations wherever it happens: whoever adds them gets the same bits."""
    both = tl.maximum(highest, next_highest)
    base = tl.where(both == float("-inf"), 0.0, both)  # no key seen yet: -inf - -inf would be NaN
    decay = tl.exp2(highest - base)
    next_decay = tl.exp2(next_highest - base)
    acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), next_acc * next_decay[:, None])
    return acc, both, tl.fma(total, decay, next_total * next_decay)


@triton.jit
def _store_softmax(place, highest, total, row_used):
    """What `_fold` needs of a split beside its sum."""
    tl.store(place, highest, mask=row_used)
    tl.store(place + 1, total, mask=row_used)


@triton.jit
def _scores(
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    k,  # [BLOCK_N, HEAD_DIM_PADDED]
    query_position,  # [BLOCK_M]
    position,  # [BLOCK_N]
    loaded,  # [BLOCK_N] whether it is a key
    scale,
    softcap,
    SLIDING_WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] times log2(e), -inf where a row does not see a key."""
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), PRECISION, UPCAST)
    if USE_SOFTCAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = (softcap * LOG2_E) * (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0)
    else:
        scores = scores * (scale * LOG2_E)
    if MASKED:
        visible = loaded[None, :] & (position[None, :] <= query_position[:, None])
        if SLIDING_WINDOW > 0:
            visible = visible & (position[None, :] > query_position[:, None] - SLIDING_WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _attend_tiles(
    acc,  # [BLOCK_M, HEAD_DIM_PADDED] float32: the running softmax of the rows,
    highest,  # [BLOCK_M] their highest score times log2(e),
    total,  # [BLOCK_M] and the sum of their weights
    folded,  # the same three of the splits before this one; this and what is next are used where SPLITS
    folded_highest,
    folded_total,
    splits_from,  # the first tile of the request,
    splits_to,  # one past its last,
    tiles_each,  # tiles of a split,
    fold,  # whether its sums are added up here; else they are stored
    partial,  # at the first split of the request, [BLOCK_M, HEAD_DIM_PADDED] pointers; the next split is HEAD_DIM on
    partial_softmax,  # likewise, [BLOCK_M]; the next one is 2 on
    used,  # [BLOCK_M, HEAD_DIM_PADDED]
    row_used,  # [BLOCK_M]
    q,  # [BLOCK_M, HEAD_DIM_PADDED]
    query_position,  # [BLOCK_M]
    key_cache,  # of the first token of the KV head; the next one's is `token_stride` further on
    value_cache,
    token_stride,
    block_ids,  # the request's row of the block table
    first_tile,  # BLOCK_N keys each
    last_tile,
    begin,  # keys before it, and from `end` on, are not loaded where MASKED; otherwise all keys are visible to all rows
    end,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    dim = tl.arange(0, q.shape[1])
    # The ids of a tile's blocks are there one iteration before its keys: loads that wait for loads are not pipelined.
    first = first_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    next_id = tl.load(block_ids + first // BLOCK_SIZE, mask=(first >= begin) & (first < end), other=0)
    for tile in range(first_tile, last_tile):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        loaded = (position >= begin) & (position < end)
        block_id = next_id.to(tl.int64)
        after = position + BLOCK_N
        next_id = tl.load(block_ids + after // BLOCK_SIZE, mask=(after >= begin) & (after < end), other=0)
        offset = ((block_id * BLOCK_SIZE + position % BLOCK_SIZE) * token_stride)[:, None] + dim[None, :]
        cache_mask = (dim < HEAD_DIM)[None, :]
        if MASKED:
            cache_mask = loaded[:, None] & cache_mask
        k = widen(tl.load(key_cache + offset, mask=cache_mask, other=0), q.dtype, CACHE_FORMAT, UPCAST)
        scores = _scores(
            q, k, query_position, position, loaded, scale, softcap, SLIDING_WINDOW, USE_SOFTCAP, MASKED, PRECISION,
            UPCAST,
        )  # fmt: skip
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A row may have seen no visible key yet (window): -inf - -inf would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        v = widen(tl.load(value_cache + offset, mask=cache_mask, other=0), q.dtype, CACHE_FORMAT, UPCAST)
        total = total * decay + tl.sum(weights, axis=1)
        acc = dot(weights.to(v.dtype), v, acc * decay[:, None], PRECISION, UPCAST)
        highest = new_highest
        if SPLITS:
            done = tile + 1 - splits_from
            if (done % tiles_each == 0) | (tile + 1 == splits_to):
                if fold:
                    folded, folded_highest, folded_total = _fold(
                        folded, folded_highest, folded_total, acc, highest, total
                    )
                else:
                    split = (done - 1) // tiles_each
                    tl.store(partial + split * HEAD_DIM, acc, mask=used)
                    _store_softmax(partial_softmax + 2 * split, highest, total, row_used)
                acc, total = tl.zeros_like(acc), tl.zeros_like(total)
                highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    return acc, highest, total, folded, folded_highest, folded_total


@triton.jit
def _attend(
    q,
    query_position,
    sink,  # [BLOCK_M] score of a key without a value, -inf: none
    key_cache,
    value_cache,
    token_stride,
    block_ids,
    first_tile,
    last_tile,
    begin,  # the first key that some row sees
    first_query,  # positions of the first and the last row
    last_query,
    splits_from,  # these as of `_attend_tiles`
    splits_to,
    tiles_each,
    fold,
    partial,
    partial_softmax,
    used,
    row_used,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of the rows over some tiles, in the order of the keys: acc and total; where SPLITS, those of all splits
    if they are added up here. Only tiles that some rows see and others do not are masked: the first ones of a window,
    and the last ones, where causality ends."""
    acc = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    highest = sink * LOG2_E
    total = tl.where(sink == float("-inf"), 0.0, 1.0)
    folded = acc
    folded_highest = tl.full([q.shape[0]], float("-inf"), tl.float32)
    folded_total = tl.zeros([q.shape[0]], tl.float32)
    full_from = first_tile
    if SLIDING_WINDOW > 0:
        full_from = tl.cdiv(tl.maximum(last_query - SLIDING_WINDOW + 1, 0), BLOCK_N)
        full_from = tl.minimum(tl.maximum(full_from, first_tile), last_tile)
        acc, highest, total, folded, folded_highest, folded_total = _attend_tiles(
            acc, highest, total, folded, folded_highest, folded_total, splits_from, splits_to, tiles_each, fold,
            partial, partial_softmax, used, row_used, q, query_position, key_cache, value_cache, token_stride,
            block_ids, first_tile, full_from, begin, last_query + 1, scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
            SLIDING_WINDOW, USE_SOFTCAP, CACHE_FORMAT, True, SPLITS, PRECISION, UPCAST,
        )  # fmt: skip
    full_to = tl.minimum(tl.maximum((first_query + 1) // BLOCK_N, full_from), last_tile)
    acc, highest, total, folded, folded_highest, folded_total = _attend_tiles(
        acc, highest, total, folded, folded_highest, folded_total, splits_from, splits_to, tiles_each, fold, partial,
        partial_softmax, used, row_used, q, query_position, key_cache, value_cache, token_stride, block_ids, full_from,
        full_to, begin, last_query + 1, scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SLIDING_WINDOW, USE_SOFTCAP,
        CACHE_FORMAT, False, SPLITS, PRECISION, UPCAST,
    )  # fmt: skip
    acc, highest, total, folded, folded_highest, folded_total = _attend_tiles(
        acc, highest, total, folded, folded_highest, folded_total, splits_from, splits_to, tiles_each, fold, partial,
        partial_softmax, used, row_used, q, query_position, key_cache, value_cache, token_stride, block_ids, full_to,
        last_tile, begin, last_query + 1, scale, softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SLIDING_WINDOW, USE_SOFTCAP,
        CACHE_FORMAT, True, SPLITS, PRECISION, UPCAST,
    )  # fmt: skip
    if SPLITS:
        acc, total = folded, folded_total
    return acc, total


@triton.jit
def _store(out, place, acc, total, value_scale, dim, mask, HEAD_DIM: tl.constexpr):
    """What the rows have summed up, divided and scaled, at their places [BLOCK_M] among all heads of all tokens."""
    acc = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "block_table_stride"], do_not_specialize_on_alignment=["block_table"])
def long_kernel(
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
    CACHE_FORMAT: tl.constexpr,  # see `widen`
    SHORT: tl.constexpr,  # requests with so many query tokens are the other kernel's
    BLOCK_M: tl.constexpr,  # rows of the tile
    BLOCK_N: tl.constexpr,  # keys per iteration
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program takes BLOCK_M // GROUP query tokens of one request. The last ones have most to do and begin first, in
    all heads."""
    wait_for_others(CHAINED)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    q_block = tl.num_programs(1) - 1 - tl.program_id(1)
    request = _find_request(query_start_loc, num_reqs, q_block, BLOCK_Q)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    first_token = (q_block - query_start // BLOCK_Q - request) * BLOCK_Q
    if (first_token >= query_len) | (query_len <= SHORT):
        return
    num_before = tl.load(seq_lens + request) - query_len

    row = tl.arange(0, BLOCK_M)
    query_token = first_token + row // GROUP
    row_used = (row < BLOCK_Q * GROUP) & (query_token < query_len)
    head = kv_head * GROUP + row % GROUP
    token = (query_start + query_token).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    q_mask = row_used[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_offset, mask=q_mask, other=0.0)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if USE_SINKS:
        sink = tl.load(sinks + head)

    first_query = num_before + first_token
    last_query = num_before + tl.minimum(first_token + BLOCK_Q, query_len) - 1
    begin = 0
    if SLIDING_WINDOW > 0:
        begin = tl.maximum(0, first_query - SLIDING_WINDOW + 1)
    acc, total = _attend(
        q, num_before + query_token, sink, key_cache + kv_head * HEAD_DIM, value_cache + kv_head * HEAD_DIM,
        num_kv_heads * HEAD_DIM, block_table + request.to(tl.int64) * block_table_stride, begin // BLOCK_N,
        last_query // BLOCK_N + 1, begin, first_query, last_query, 0, 0, 1, False, None, None, None, None, scale,
        softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SLIDING_WINDOW, USE_SOFTCAP, CACHE_FORMAT, False, PRECISION, UPCAST,
    )  # fmt: skip
    _store(out, token * (num_kv_heads * GROUP) + head, acc, total, value_scale, dim, q_mask, HEAD_DIM)


@triton.jit
def _split(
    first_query, last_query, SLIDING_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """How the keys of a short request are cut: the first key seen, the first tile, one past the last, tiles of each
    split, and how many splits there are. Of the request's own lengths alone."""
    begin = 0
    if SLIDING_WINDOW > 0:
        begin = tl.maximum(0, first_query - SLIDING_WINDOW + 1)
    first_tile = begin // BLOCK_N
    last_tile = last_query // BLOCK_N + 1
    num_tiles = last_tile - first_tile
    tiles_each = tl.maximum(SPLIT // BLOCK_N, tl.cdiv(num_tiles, MAX_SPLITS))
    return begin, first_tile, last_tile, tiles_each, tl.cdiv(num_tiles, tiles_each)


@triton.jit(
    do_not_specialize=["block_table_stride", "max_query", "grid_splits", "splits_each"],
    do_not_specialize_on_alignment=["block_table"],
)
def short_kernel(
    out,  # these as in `long_kernel`
    partial,  # [num_reqs, max_query, num_heads, grid_splits, head_dim] float32: sums of a split before division,
    partial_softmax,  # [num_reqs, max_query, num_heads, grid_splits, 2] float32: highest score, sum of the weights
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_table,
    sinks,
    scale,
    softcap,
    value_scale,
    num_kv_heads,
    query_token_stride,
    query_head_stride,
    block_table_stride,
    max_query,  # tokens of the longest short request
    grid_splits,  # no request has more splits
    splits_each,  # of a program
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # the least keys of a split
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program takes some splits of the keys of a request, one after the other, for all of its query tokens. One that
    takes all of them adds their sums as `merge_kernel` would. The heads of a KV head are neighbours in memory, and so
    are their programs."""
    wait_for_others(CHAINED)
    kv_head = tl.program_id(0)
    request = tl.program_id(2)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    last_query = tl.load(seq_lens + request) - 1  # asked for together with the others
    if (query_len == 0) | (query_len > SHORT):
        return
    first_query = last_query - query_len + 1
    begin, first_tile, last_tile, tiles_each, num_splits = _split(
        first_query, last_query, SLIDING_WINDOW, BLOCK_N, SPLIT, MAX_SPLITS
    )
    split = tl.program_id(1) * splits_each
    if split >= num_splits:
        return
    row = tl.arange(0, BLOCK_M)
    query_token = row // GROUP
    row_used = query_token < query_len
    head = kv_head * GROUP + row % GROUP
    token = (query_start + query_token).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM_PADDED)
    q_mask = row_used[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + q_offset, mask=q_mask, other=0.0)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if USE_SINKS:  # it is seen once
        sink = tl.load(sinks + head, mask=(row >= 0) & (split == 0), other=float("-inf"))
    place = ((request.to(tl.int64) * max_query + query_token) * (num_kv_heads * GROUP) + head) * grid_splits
    fold = num_splits <= splits_each
    acc, total = _attend(
        q, first_query + query_token, sink, key_cache + kv_head * HEAD_DIM, value_cache + kv_head * HEAD_DIM,
        num_kv_heads * HEAD_DIM, block_table + request.to(tl.int64) * block_table_stride,
        first_tile + split * tiles_each, tl.minimum(first_tile + (split + splits_each) * tiles_each, last_tile), begin,
        first_query, last_query, first_tile, last_tile, tiles_each, fold,
        partial + place[:, None] * HEAD_DIM + dim[None, :], partial_softmax + 2 * place, q_mask, row_used, scale,
        softcap, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SLIDING_WINDOW, USE_SOFTCAP, CACHE_FORMAT, True, PRECISION, UPCAST,
    )  # fmt: skip
    if fold:
        _store(out, token * (num_kv_heads * GROUP) + head, acc, total, value_scale, dim, q_mask, HEAD_DIM)


@triton.jit(do_not_specialize=["max_query", "grid_splits", "splits_each"])
def merge_kernel(
    out,
    partial,
    partial_softmax,
    query_start_loc,
    seq_lens,
    value_scale,
    max_query,
    grid_splits,
    splits_each,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The second reduction: a program adds the splits of one head of one query token."""
    wait_for_others(CHAINED)
    head = tl.program_id(0)
    query_token = tl.program_id(1)
    request = tl.program_id(2)
    query_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - query_start
    if (query_token >= query_len) | (query_len > SHORT):
        return
    last_query = tl.load(seq_lens + request) - 1
    num_splits = _split(last_query - query_len + 1, last_query, SLIDING_WINDOW, BLOCK_N, SPLIT, MAX_SPLITS)[4]
    if num_splits <= splits_each:  # `out` has the result
        return
    dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    inside = dim < HEAD_DIM
    num_heads = tl.num_programs(0)
    token = (query_start + query_token).to(tl.int64)
    place = ((request.to(tl.int64) * max_query + query_token) * num_heads + head) * grid_splits
    one = tl.arange(0, 1)  # a tile of one row
    acc = tl.zeros([1, HEAD_DIM_PADDED], tl.float32)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, num_splits, MERGED_AT_ONCE):
        for i in tl.static_range(MERGED_AT_ONCE):  # whose loads do not wait for each other
            split = first + i
            there = split < num_splits
            softmax = partial_softmax + 2 * (place + split) + one
            acc, highest, total = _fold(
                acc, highest, total,
                tl.load(partial + (place + split) * HEAD_DIM + dim, mask=inside & there, other=0.0),
                tl.load(softmax, mask=(one == 0) & there, other=float("-inf")),
                tl.load(softmax + 1, mask=(one == 0) & there, other=0.0),
            )  # fmt: skip
    place = token * num_heads + head + one.to(tl.int64)
    _store(out, place, acc, total, value_scale, tl.arange(0, HEAD_DIM_PADDED), inside, HEAD_DIM)
