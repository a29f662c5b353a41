# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Attention of requests with several query tokens, compiled with Numba: it reads the blocks where they are.

Of caches in 8 bits, a chunk of keys and values becomes float32 first.

The rows of an item (`prompt_plan`) are its tokens times its query heads. They walk along the keys in chunks:

    chunk of keys, turned to [head_dim, keys]     rows x keys  =  scores     each row up to its own position
    scores -> weights, by the highest of them     rows x values  merged with what is there

Both products are `heads.weigh`: a number of one operand times a vector of the other. What a row gets depends on its
position and on the cache alone: not on the batch, nor on how its prompt was cut into steps. It has the same bits as
from `decode`, as all sums have one order and chunks are at the same places, while all numbers are finite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from .attention_call import LAYER, NUMBERS
from .claims import enter, take_item
from .heads import CHUNK, divide, merge, to_weights, turn, weigh_group, widen_chunk
from .intrinsics import pointer, widened
from .prompt_plan import PLAN
from .sources import digest_of, filed_as
from .tile_product import CLASSES
from .vectors import LANES

_TILE = 4  # rows whose keys end at one place


@njit(error_model="numpy")
def _place_keys(
    plan: Any, blocks: Any, kv_head: int, chunk: int, begin: int, end: int, offsets: Any, first: int
) -> None:
    """Where the keys from place `first` of a chunk on lie in a cache, in bytes. Places beside begin .. end - 1 repeat
    one: nobody looks at them."""
    block_size = plan.block_size
    for i in range(len(offsets)):
        at = chunk + max(begin, min(end - 1, first + i))
        slot = blocks[at // block_size] * block_size + at % block_size
        offsets[i] = (slot * plan.num_kv_heads + kv_head) * plan.head_dim * plan.cache_bytes


@njit(error_model="numpy")
def _see(scores: Any, low: int, high: int, softcap: Any) -> tuple[Any, Any]:
    """Of a row's scores, low .. high - 1 become weights, whose sum and highest score it returns, and the others 0."""
    total: Any = np.float32(0.0)
    top: Any = np.float32(-np.inf)
    if low < high:
        total, top = to_weights(scores.ctypes.data + 4 * low, high - low, softcap)
    scores[:low] = np.float32(0.0)
    scores[high:] = np.float32(0.0)
    return total, top


@njit(error_model="numpy")
def _attend(layer: Any, plan: Any, query: Any, out: Any, like: Any) -> None:
    """One thread: take items until there are none. Memory is flat. Caches have the type of `like`, see `heads`; if they
    are in 8 bits, what they become, chunk by chunk, has."""
    num_heads, num_kv_heads, head_dim, num_items = plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.num_items
    group, window = num_heads // num_kv_heads, plan.window
    scale, softcap = np.float32(plan.scale * layer.key_scale), np.float32(plan.softcap)
    value_scale = np.float32(layer.value_scale)
    sinks = carray(pointer(layer.sinks), (num_heads,), np.float32)
    num_parts = num_items // num_kv_heads
    table = carray(pointer(plan.block_table), (np.int64(1) << 31,), np.int32)
    tokens = carray(pointer(plan.tokens), (num_parts,), np.int64)
    positions = carray(pointer(plan.positions), (num_parts,), np.int64)
    counts = carray(pointer(plan.counts), (num_parts,), np.int64)
    requests = carray(pointer(plan.requests), (num_parts,), np.int64)

    most = plan.item_tokens * group
    q, acc = np.empty((most, head_dim), np.float32), np.empty((most, head_dim), np.float32)
    added = np.empty((_TILE, head_dim), np.float32)
    totals, tops = np.empty(most, np.float32), np.empty(most, np.float32)
    new_totals, new_tops = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    scores = np.empty((most, CHUNK), np.float32)
    turned, single = np.zeros((head_dim, CHUNK), np.float32), np.empty(0, np.float32)
    columns = np.arange(head_dim) * (CHUNK * 4)  # where the rows of `turned` are, in bytes
    offsets = np.empty(CHUNK, np.int64)
    wide = np.empty((2, CHUNK if plan.cache_bytes == 1 else 0, head_dim), np.float32)
    thread, item, lap = enter(layer.claims), -1, 0
    while True:
        item, lap = take_item(layer.claims, layer.num_threads, num_items, thread, item, lap)
        if item < 0:
            return
        part, kv_head = item // num_kv_heads, item % num_kv_heads
        token, position, count = tokens[part], positions[part], counts[part]
        num_rows = count * group
        for row in range(num_rows):
            base = (token + row // group) * layer.token_stride + (kv_head * group + row % group) * layer.head_stride
            head = query[base : base + head_dim]
            for d in range(head_dim):
                q[row, d] = widened(head[d]) * scale
                acc[row, d] = np.float32(0.0)
            totals[row], tops[row] = np.float32(0.0), np.float32(-np.inf)
            if layer.sinks != 0:  # one more key, with a weight of 1 and no value
                totals[row], tops[row] = np.float32(1.0), sinks[kv_head * group + row % group]
        first_key = max(np.int64(0), position - window + 1) if window else np.int64(0)
        blocks = table[requests[part] * plan.table_stride :]
        for chunk in range(first_key // CHUNK * CHUNK, position + count, CHUNK):
            begin, end = max(chunk, first_key) - chunk, min(chunk + CHUNK, position + count) - chunk
            aligned, padded_end = begin // LANES * LANES, (end + LANES - 1) // LANES * LANES
            _place_keys(plan, blocks, kv_head, chunk, begin, end, offsets[aligned:padded_end], aligned)
            keys, values = layer.key_cache, layer.value_cache
            if plan.cache_bytes == 1:
                keys, values = np.int64(wide[0].ctypes.data), np.int64(wide[1].ctypes.data)
                widen_chunk(single, layer, offsets[aligned:padded_end], aligned, head_dim, keys, values)
            for i in range(aligned, end, LANES):
                turn(like, keys, offsets[i:].ctypes.data, head_dim, turned[0, i:].ctypes.data, CHUNK * 4)
            for row in range(0, num_rows, _TILE):
                num_tile = min(_TILE, num_rows - row)
                # Keys of the last token of the tile; the others have weights of 0 there.
                tile_end = min(end, position + (row + num_tile - 1) // group + 1 - chunk)
                if tile_end <= begin:
                    continue
                padded = (tile_end + LANES - 1) // LANES * LANES
                weigh_group(
                    single, 0, CLASSES, 0, num_tile, padded, q[row:].ctypes.data, head_dim * 4, turned.ctypes.data,
                    columns.ctypes.data, head_dim, scores[row:].ctypes.data, CHUNK * 4,
                )  # fmt: skip
                for r in range(row, row + num_tile):
                    own = position + r // group
                    high = max(begin, min(tile_end, own + 1 - chunk))
                    low = min(high, max(begin, own - window + 1 - chunk)) if window else begin
                    new_totals[r - row], new_tops[r - row] = _see(scores[r, :tile_end], low, high, softcap)
                weigh_group(
                    like, 0, 1, 0, num_tile, head_dim, scores[row, begin:].ctypes.data, CHUNK * 4,
                    values, offsets[begin:].ctypes.data, tile_end - begin, added.ctypes.data, head_dim * 4,
                )  # fmt: skip
                for i in range(num_tile):
                    r = row + i
                    totals[r], tops[r] = merge(totals[r], tops[r], acc[r], new_totals[i], new_tops[i], added[i])
        for row in range(num_rows):
            base = ((token + row // group) * num_heads + kv_head * group + row % group) * head_dim
            divide(acc[row], totals[row], value_scale, out[base : base + head_dim])


def _worker(query_type: type[np.generic], cache_type: type[np.generic], sources: str) -> Any:
    numbers = np.float32 if cache_type is np.uint8 else cache_type

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(query_type.__name__, cache_type.__name__)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        layer = carray(pointer(address), (1,), LAYER)[0]
        plan = carray(pointer(layer.plan), (1,), PLAN)[0]
        many = np.int64(1) << 40  # the length of a view plays no part in its addresses
        query = carray(pointer(layer.query), (many,), query_type)
        out = carray(pointer(layer.out), (many,), query_type)
        _attend(layer, plan, query, out, np.empty(0, numbers))

    return worker


_SOURCES = digest_of(
    *(
        "attention_call",
        "claims",
        "prompts",
        "prompt_plan",
        "exponential",
        "walk",
        "features",
        "heads",
        "intrinsics",
        "matrix_tiles",
    ),
    *("tile_product", "vectors"),
)


@cache
def worker(query: torch.dtype, keys: torch.dtype) -> Any:
    """For a query and a cache of these types: compiled when it is first asked for."""
    return _worker(NUMBERS[query], NUMBERS[keys], _SOURCES)
