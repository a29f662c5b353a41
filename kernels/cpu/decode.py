# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Attention of requests with one query token, compiled with Numba: it reads the blocks where they are.

The context of a request is cut into chunks at fixed positions, so that one long request keeps all threads busy:

    positions   0 .. 255      256 .. 511    512 .. seq_len - 1
    items       (r, 0)        (r, 1)        (r, 2)                each: highest score, sum of weights, weighted values

Threads take items from a shared counter. Whoever finishes the last item of a request merges its items, in order. The
result depends on neither the number of threads nor the rest of the batch.

Why not torch: it has no paged attention, so keys and values are gathered into dense copies first, request by request.
One layer of SmolLM2 (9 heads over 3 KV heads of 64, float32) on 2 cores, microseconds in one run: 1 request of 200
tokens 16 against 106, 8 requests of 200 tokens 65 against 739. The price: importing Numba takes 0.4 s, and the first
call on a machine compiles for about 4 s (kept on disk afterwards).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, cfunc, njit, types

from .intrinsics import fetch_add, pointer
from .threads import run_parallel

CHUNK = 256
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; infinities and NaN keep their meaning
_LOG2_E = np.float32(math.log2(math.e))


@dataclass(slots=True)
class DecodePlan:
    """What one step's decodes have in common in all layers. The arrays are referred to by address in `arguments`."""

    arguments: npt.NDArray[np.int64]  # see `_Argument`
    counters: npt.NDArray[np.int64]  # [1 + n] next item; items of each request that are not finished
    fresh_counters: npt.NDArray[np.int64]  # what `counters` starts from
    owned: tuple[Any, ...]  # keeps the other arrays alive


# Places in `DecodePlan.arguments`. Addresses and strides (in elements) are plain integers there.
(
    _QUERY,
    _KEY_CACHE,
    _VALUE_CACHE,
    _OUT,
    _SINKS,
    _BLOCK_TABLE,
    _TOKENS,
    _REQUESTS,
    _ITEM_OWNER,
    _ITEM_BEGIN,
    _ITEM_END,
    _FIRST_ITEM,
    _PARTIAL,
    _COUNTERS,
    _OPTIONS,
    _NUM_ITEMS,
    _QUERY_TOKEN_STRIDE,
    _QUERY_HEAD_STRIDE,
    _TABLE_STRIDE,
    _NUM_HEADS,
    _NUM_KV_HEADS,
    _HEAD_DIM,
    _BLOCK_SIZE,
    _NUM_ARGUMENTS,
) = range(24)


def make_plan(
    tokens: npt.NDArray[np.int64],
    requests: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int32],
    block_table: npt.NDArray[np.int32],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> DecodePlan:
    """Plan the decodes of a step.

    `tokens` [n] are their rows in the query, `requests` [n] their rows in `block_table` [num_reqs, max_blocks], and
    `seq_lens` [n] their lengths.
    """
    firsts = np.zeros_like(seq_lens) if sliding_window is None else np.maximum(0, seq_lens - sliding_window)
    first_chunks, last_chunks = firsts // CHUNK, (seq_lens - 1) // CHUNK
    first_item = np.concatenate([[0], np.cumsum(last_chunks - first_chunks + 1)]).astype(np.int64)
    owner = np.repeat(np.arange(len(tokens)), np.diff(first_item))
    chunk = np.arange(len(owner)) - first_item[owner] + first_chunks[owner]
    begin = np.maximum(chunk * CHUNK, firsts[owner])
    end = np.minimum((chunk + 1) * CHUNK, seq_lens[owner])
    partial = np.empty(len(owner) * num_heads * (head_dim + 2), np.float32)
    fresh_counters = np.concatenate([[0], np.diff(first_item)]).astype(np.int64)
    counters = fresh_counters.copy()
    options = np.array([scale, softcap or 0.0], np.float32)

    arguments = np.zeros(_NUM_ARGUMENTS, np.int64)
    owned = (block_table, tokens, requests, owner, begin.astype(np.int64), end.astype(np.int64), first_item, partial)
    for place, array in zip(range(_BLOCK_TABLE, _COUNTERS), owned, strict=True):
        arguments[place] = array.ctypes.data
    arguments[_COUNTERS], arguments[_OPTIONS] = counters.ctypes.data, options.ctypes.data
    arguments[_NUM_ITEMS] = len(owner)
    arguments[_TABLE_STRIDE] = block_table.strides[0] // block_table.itemsize
    arguments[_NUM_HEADS : _BLOCK_SIZE + 1] = num_heads, num_kv_heads, head_dim, block_size
    return DecodePlan(arguments, counters, fresh_counters, (*owned, options))


def run_plan(
    plan: DecodePlan, query: int, query_strides: tuple[int, int], key_cache: int, value_cache: int, out: int, sinks: int
) -> None:
    """Attend in one layer: addresses of float32 tensors, `out` contiguous. Writes the rows of the planned tokens.

    `sinks` is 0 where there are none.
    """
    plan.counters[:] = plan.fresh_counters
    plan.arguments[_QUERY : _SINKS + 1] = query, key_cache, value_cache, out, sinks
    plan.arguments[_QUERY_TOKEN_STRIDE : _QUERY_HEAD_STRIDE + 1] = query_strides
    run_parallel(_worker.ctypes, plan.arguments.ctypes.data)


@njit(fastmath=_FASTMATH, error_model="numpy", cache=True)
def _exp_minus(x: Any, highest: Any) -> Any:
    """exp(x - highest) for x <= highest, to 2 units of float32, in operations that vectorise (libm's exp does not)."""
    y = max((x - highest) * _LOG2_E, np.float32(-126.0))
    whole = np.floor(y)
    f = y - whole
    # Minimax polynomial of 2 ** f on [0, 1].
    p = np.float32(1.8775767e-3)
    p = p * f + np.float32(8.9893397e-3)
    p = p * f + np.float32(5.5826318e-2)
    p = p * f + np.float32(2.4015361e-1)
    p = p * f + np.float32(6.9315308e-1)
    p = p * f + np.float32(9.9999994e-1)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=_FASTMATH, error_model="numpy", cache=True)
def _attend_item(
    q: Any,  # [num_heads, head_dim] scaled
    keys: Any,  # the whole cache, [num_blocks, block_size, num_kv_heads, head_dim]
    values: Any,  # likewise
    blocks: Any,  # [blocks of the request]
    begin: int,
    end: int,
    softcap: Any,
    scores: Any,  # [num_heads, CHUNK] scratch
    highest: Any,  # [num_heads] written
    total: Any,  # [num_heads] written
    acc: Any,  # [num_heads, head_dim] written: not yet divided by `total`
) -> None:
    num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    for position in range(begin, end):
        block, offset = blocks[position // block_size], position % block_size
        for kv_head in range(num_kv_heads):
            for head in range(kv_head * group, (kv_head + 1) * group):
                score = np.float32(0.0)
                for d in range(head_dim):
                    score += q[head, d] * keys[block, offset, kv_head, d]
                scores[head, position - begin] = score

    length = end - begin
    for head in range(num_heads):
        if softcap > 0:
            for i in range(length):
                scores[head, i] = softcap * np.float32(math.tanh(scores[head, i] / softcap))
        top = scores[head, 0]
        for i in range(length):
            top = max(top, scores[head, i])
        weight_sum = np.float32(0.0)
        for i in range(length):
            weight = _exp_minus(scores[head, i], top)
            scores[head, i] = weight
            weight_sum += weight
        highest[head] = top
        total[head] = weight_sum

    acc[:] = np.float32(0.0)
    for position in range(begin, end):
        block, offset = blocks[position // block_size], position % block_size
        for kv_head in range(num_kv_heads):
            for head in range(kv_head * group, (kv_head + 1) * group):
                weight = scores[head, position - begin]
                for d in range(head_dim):
                    acc[head, d] += weight * values[block, offset, kv_head, d]


@njit(fastmath=_FASTMATH, error_model="numpy", cache=True)
def _merge_items(partial: Any, first: int, last: int, sinks: Any, has_sinks: bool, out: Any) -> None:
    """Merge the items first .. last - 1 of a request, [items, heads, head_dim + 2], into out [heads, head_dim].

    A sink [heads] is one more item, with a weight of 1 and no value.
    """
    num_heads, head_dim = out.shape
    for head in range(num_heads):
        highest = partial[first, head, head_dim]
        for item in range(first + 1, last):
            highest = max(highest, partial[item, head, head_dim])
        total = np.float32(0.0)
        if has_sinks:
            highest = max(highest, sinks[head])
            total = np.float32(math.exp(sinks[head] - highest))
        for d in range(head_dim):
            out[head, d] = np.float32(0.0)
        for item in range(first, last):
            share = np.float32(math.exp(partial[item, head, head_dim] - highest))
            total += share * partial[item, head, head_dim + 1]
            for d in range(head_dim):
                out[head, d] += share * partial[item, head, d]
        for d in range(head_dim):
            out[head, d] /= total


@cfunc(types.void(types.voidptr), cache=True)
def _worker(address: Any) -> None:
    """One thread: take items until there are none. `address` is that of the plan's arguments."""
    a = carray(address, (_NUM_ARGUMENTS,), np.int64)
    num_heads, num_kv_heads, head_dim, block_size = a[_NUM_HEADS], a[_NUM_KV_HEADS], a[_HEAD_DIM], a[_BLOCK_SIZE]
    num_items = a[_NUM_ITEMS]
    many = np.int64(1) << 31  # the first dimension of a view plays no part in its addresses
    query = carray(pointer(a[_QUERY]), (many,), np.float32)
    keys = carray(pointer(a[_KEY_CACHE]), (many, block_size, num_kv_heads, head_dim), np.float32)
    values = carray(pointer(a[_VALUE_CACHE]), (many, block_size, num_kv_heads, head_dim), np.float32)
    out = carray(pointer(a[_OUT]), (many, num_heads, head_dim), np.float32)
    table = carray(pointer(a[_BLOCK_TABLE]), (many,), np.int32)
    tokens = carray(pointer(a[_TOKENS]), (num_items,), np.int64)
    requests = carray(pointer(a[_REQUESTS]), (num_items,), np.int64)
    owners = carray(pointer(a[_ITEM_OWNER]), (num_items,), np.int64)
    begins = carray(pointer(a[_ITEM_BEGIN]), (num_items,), np.int64)
    ends = carray(pointer(a[_ITEM_END]), (num_items,), np.int64)
    first_item = carray(pointer(a[_FIRST_ITEM]), (num_items + 1,), np.int64)
    partial = carray(pointer(a[_PARTIAL]), (num_items, num_heads, head_dim + 2), np.float32)
    options = carray(pointer(a[_OPTIONS]), (2,), np.float32)
    sinks = carray(pointer(a[_SINKS]), (num_heads,), np.float32)

    q = np.empty((num_heads, head_dim), np.float32)
    acc = np.empty((num_heads, head_dim), np.float32)
    scores = np.empty((num_heads, CHUNK), np.float32)
    highest = np.empty(num_heads, np.float32)
    total = np.empty(num_heads, np.float32)
    while True:
        item = fetch_add(a[_COUNTERS], 1)
        if item >= num_items:
            return
        owner = owners[item]
        for head in range(num_heads):
            base = tokens[owner] * a[_QUERY_TOKEN_STRIDE] + head * a[_QUERY_HEAD_STRIDE]
            for d in range(head_dim):
                q[head, d] = query[base + d] * options[0]
        blocks = table[requests[owner] * a[_TABLE_STRIDE] :]
        _attend_item(
            q, keys, values, blocks, begins[item], ends[item], options[1], scores, highest, total, acc
        )  # fmt: skip
        for head in range(num_heads):
            partial[item, head, head_dim] = highest[head]
            partial[item, head, head_dim + 1] = total[head]
            for d in range(head_dim):
                partial[item, head, d] = acc[head, d]
        if fetch_add(a[_COUNTERS] + 8 * (1 + owner), -1) == 1:
            has_sinks = a[_SINKS] != 0
            _merge_items(partial, first_item[owner], first_item[owner + 1], sinks, has_sinks, out[tokens[owner]])
