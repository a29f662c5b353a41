# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Attention of requests with several query tokens, compiled with Numba: it reads the blocks where they are.

An item is some query tokens of a request and one KV head; threads take items, the longest first. Its rows are these
tokens times the query heads that share the KV head. They walk along the keys in chunks at fixed positions:

    chunk of keys, turned to [head_dim, keys]     rows x keys  =  scores     each row up to its own position
    scores -> weights, by the highest so far      rows x values  +  what is there, rescaled

Both products are `heads.weigh`: a number of one operand times a vector of the other. What a row gets depends on its
position and on the cache alone: not on the batch, nor on how its prompt was cut into steps.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .exponential import largest, soften
from .heads import turn, weigh_group
from .intrinsics import fetch_add, narrowed, pointer, widened
from .sources import digest_of
from .threads import run_parallel
from .vectors import LANES

CHUNK = 256  # keys
_ROWS = 192  # of an item, about: chunks are turned for as many, and their scores stay in the second-level cache
_TILE = 4  # rows whose keys end at one place
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; infinities and NaN keep their meaning

_LAYER_FIELDS = ("query", "key_cache", "value_cache", "out", "token_stride", "head_stride", "plan")
_PLAN_FIELDS = (
    "block_table", "table_stride", "tokens", "positions", "counts", "requests", "counter", "num_items", "num_heads",
    "num_kv_heads", "head_dim", "block_size", "window",
)  # fmt: skip
# What differs from layer to layer, and what the layers of a step have in common. Strides are in elements.
_LAYER = np.dtype([(name, np.int64) for name in _LAYER_FIELDS])
_PLAN = np.dtype([*((name, np.int64) for name in _PLAN_FIELDS), ("scale", np.float64)])


class _LayerArguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in _LAYER_FIELDS]


class PromptPlan:
    """What the requests of a step with several query tokens have in common in all layers."""

    def __init__(
        self,
        requests: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        block_table: npt.NDArray[np.int32],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        """`requests` [n] are rows of `block_table` [num_reqs, max_blocks]; their query tokens begin at `starts`."""
        size = max(1, _ROWS * num_kv_heads // num_heads)  # tokens of an item
        num_parts = -(-query_lens // size)
        owners = np.repeat(np.arange(len(requests)), num_parts)
        first = (np.arange(len(owners)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * size
        positions = (seq_lens - query_lens)[owners] + first
        counts = np.minimum(size, query_lens[owners] - first)
        order = np.argsort(-(positions + counts), kind="stable")
        self._counter = np.zeros(1, np.int64)
        self._arrays = {
            "block_table": block_table,
            "tokens": (starts[owners] + first)[order],
            "positions": positions[order],
            "counts": counts[order],
            "requests": requests[owners][order],
            "counter": self._counter,
        }
        self._record = np.zeros(1, _PLAN)
        fields = self._record[0]
        for name, array in self._arrays.items():
            fields[name] = array.ctypes.data
        fields["table_stride"] = block_table.strides[0] // block_table.itemsize
        fields["num_items"] = len(owners) * num_kv_heads
        fields["num_heads"], fields["num_kv_heads"], fields["head_dim"] = num_heads, num_kv_heads, head_dim
        fields["block_size"], fields["window"], fields["scale"] = block_size, sliding_window or 0, scale

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, out: Tensor) -> None:
        """Attend in one layer, whose caches `decode.fits`. Writes the rows of `out`, contiguous, that were planned."""
        self._counter[0] = 0
        arguments = _LayerArguments(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            query.stride(0),
            query.stride(1),
            self._record.ctypes.data,
        )
        worker = _float32_worker if query.dtype == torch.float32 else _bfloat16_worker
        run_parallel(worker.ctypes, ctypes.addressof(arguments), torch.get_num_threads())


@njit(error_model="numpy")
def _soften(scores: Any, low: int, high: int, end: int, top: Any) -> tuple[Any, Any]:
    """Scores low .. high - 1 of a row become weights, and 0 what is before and behind them. Returns the highest score
    so far, and the sum of the weights."""
    total = np.float32(0.0)
    if low < high:
        seen = scores.ctypes.data + low * 4
        top = largest(seen, high - low, top)
        total = soften(seen, high - low, top)
    scores[:low] = np.float32(0.0)
    scores[high:end] = np.float32(0.0)
    return top, total


@njit(fastmath=_FASTMATH, error_model="numpy")
def _attend(layer: Any, plan: Any, query: Any, out: Any, like: Any) -> None:
    """One thread: take items until there are none. Memory is flat; bfloat16 is there as uint16, like `like`."""
    num_heads, num_kv_heads, head_dim, num_items = plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.num_items
    group, block_size, window, scale = num_heads // num_kv_heads, plan.block_size, plan.window, np.float32(plan.scale)
    num_parts = num_items // num_kv_heads
    table = carray(pointer(plan.block_table), (np.int64(1) << 31,), np.int32)
    tokens = carray(pointer(plan.tokens), (num_parts,), np.int64)
    positions = carray(pointer(plan.positions), (num_parts,), np.int64)
    counts = carray(pointer(plan.counts), (num_parts,), np.int64)
    requests = carray(pointer(plan.requests), (num_parts,), np.int64)

    most = max(1, _ROWS // group) * group
    q, acc = np.empty((most, head_dim), np.float32), np.empty((most, head_dim), np.float32)
    added = np.empty((_TILE, head_dim), np.float32)
    highest, totals = np.empty(most, np.float32), np.empty(most, np.float32)
    scores = np.empty((most, CHUNK), np.float32)
    turned, single = np.zeros((head_dim, CHUNK), np.float32), np.empty(0, np.float32)
    columns = np.arange(head_dim) * (CHUNK * 4)  # where the rows of `turned` are, in bytes
    offsets = np.empty(CHUNK, np.int64)
    while True:
        item = fetch_add(plan.counter, 1)
        if item >= num_items:
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
            highest[row], totals[row] = np.float32(-np.inf), np.float32(0.0)
        first_key = max(np.int64(0), position - window + 1) if window else np.int64(0)
        blocks = table[requests[part] * plan.table_stride :]
        for chunk in range(first_key // CHUNK * CHUNK, position + count, CHUNK):
            begin, end = max(chunk, first_key) - chunk, min(chunk + CHUNK, position + count) - chunk
            aligned = begin // LANES * LANES
            for i in range(aligned, (end + LANES - 1) // LANES * LANES):
                at = chunk + max(begin, min(end - 1, i))  # places beside the keys repeat one: nobody looks at them
                slot = blocks[at // block_size] * block_size + at % block_size
                offsets[i] = (slot * num_kv_heads + kv_head) * head_dim * like.itemsize
            for i in range(aligned, end, LANES):
                turn(like, layer.key_cache, offsets[i:].ctypes.data, head_dim, turned[0, i:].ctypes.data, CHUNK * 4)
            for row in range(0, num_rows, _TILE):
                num_tile = min(_TILE, num_rows - row)
                # Keys of the last token of the tile; the others have weights of 0 there.
                tile_end = min(end, position + (row + num_tile - 1) // group + 1 - chunk)
                if tile_end <= begin:
                    continue
                padded = (tile_end + LANES - 1) // LANES * LANES
                weigh_group(
                    single, num_tile, padded, q[row:].ctypes.data, head_dim * 4, turned.ctypes.data,
                    columns.ctypes.data, head_dim, scores[row:].ctypes.data, CHUNK * 4,
                )  # fmt: skip
                for r in range(row, row + num_tile):
                    own = position + r // group
                    high = max(begin, min(tile_end, own + 1 - chunk))
                    low = min(high, max(begin, own - window + 1 - chunk)) if window else begin
                    before = highest[r]
                    top, total = _soften(scores[r], low, high, tile_end, before)
                    if top > before and before > -np.inf:
                        factor = np.float32(math.exp(before - top))
                        totals[r] = totals[r] * factor
                        for d in range(head_dim):
                            acc[r, d] *= factor
                    highest[r] = top
                    totals[r] += total
                weigh_group(
                    like, num_tile, head_dim, scores[row, begin:].ctypes.data, CHUNK * 4,
                    layer.value_cache, offsets[begin:].ctypes.data, tile_end - begin, added.ctypes.data, head_dim * 4,
                )  # fmt: skip
                for r in range(num_tile):
                    for d in range(head_dim):
                        acc[row + r, d] += added[r, d]
        for row in range(num_rows):
            base = ((token + row // group) * num_heads + kv_head * group + row % group) * head_dim
            head, share = out[base : base + head_dim], np.float32(1.0) / totals[row]
            for d in range(head_dim):
                head[d] = narrowed(acc[row, d] * share, head[d])


@njit(error_model="numpy")
def _attend_in(address: int, like: Any) -> None:
    """`like` is an array of the type in which memory is seen."""
    layer = carray(pointer(address), (1,), _LAYER)[0]
    plan = carray(pointer(layer.plan), (1,), _PLAN)[0]
    many = np.int64(1) << 40  # the length of a view plays no part in its addresses
    query = carray(pointer(layer.query), (many,), like.dtype)
    out = carray(pointer(layer.out), (many,), like.dtype)
    _attend(layer, plan, query, out, like)


def _worker(dtype: type[np.generic], sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        _attend_in(address, np.empty(0, dtype))

    return worker


_SOURCES = digest_of("prompts", "exponential", "heads", "intrinsics", "vectors")
_float32_worker, _bfloat16_worker = _worker(np.float32, _SOURCES), _worker(np.uint16, _SOURCES)
