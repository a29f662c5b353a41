# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, call-arg, misc, type-var, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Attention of requests with several query tokens in bfloat16, by the CPU's products of tiles: `prompts` turned around.

What is a row there is a lane here: 16 tokens of a query head, which walk along the keys of an item in chunks. The keys
are read where they are, a tile of 16 at a time; of caches in 8 bits, a chunk becomes bfloat16 first.

    16 keys       x  queries, turned    =  scores [key, lane]         hidden where a lane may not look
    scores -> weights in pairs of keys, by the highest so far of a lane
    values, turned  x  weights          =  [head_dim, lane]           added to what is there, rescaled

Weights are rounded to bfloat16 for the second product; their sum is of those that are not. What a token gets depends on
its position and on the cache alone, as in `prompts`, while all numbers are finite: no weight times what is not is none.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor, bfloat16

from .attention_call import LAYER
from .claims import enter, take_item
from .exponential import exponential
from .heads import CHUNK, widen_chunk
from .intrinsics import pointer
from .prompt_plan import PLAN
from .sources import digest_of
from .tile_product import STEP_BYTES, TILE
from .turned_tiles import begin, end, multiply, products, turn_tile
from .vectors import (
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    broadcast,
    fma,
    load,
    loop_over,
    splat,
    store,
    take,
    to_bfloat16_pairs,
    turn_words,
)

PRODUCT = next((name for name in products(bfloat16) if name != "float32"), None)
IS_FAST = PRODUCT is not None and products(bfloat16)[0] == PRODUCT  # or else `prompts`, which multiplies in float32
_PAIRS = STEP_BYTES // 2  # keys, or elements of head_dim, that one step of a product takes
_VALUES_ROW = 2 * CHUNK  # bytes: values of a chunk, turned


def fits(query: Tensor, key_cache: Tensor) -> bool:
    """Whether a cache [num_blocks, block_size, num_kv_heads, head_dim] is read so: whole tiles within a block."""
    _, block_size, _, head_dim = key_cache.shape
    return IS_FAST and query.dtype == bfloat16 and block_size % TILE == 0 and head_dim % _PAIRS == 0


@intrinsic
def _turn_values(typing_context: Any, values: Any, offsets: Any, head_dim: Any, turned: Any) -> Any:
    """The values at 32 offsets become columns: turned[d][i], whose rows are _VALUES_ROW bytes apart."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        values, offsets, head_dim, turned = arguments
        places = [b.add(values, load(b, b.add(offsets, INT64(8 * i)), INT64)) for i in range(_PAIRS)]
        halves = ir.VectorType(INT16, 2 * LANES)

        def step(d: Any, _state: list[Any]) -> list[Any]:
            words = [load(b, b.add(place, b.mul(d, INT64(2))), INTS) for place in places]
            low, high = (turn_words(b, words[i : i + LANES]) for i in (0, LANES))
            for word, both in enumerate(zip(low, high, strict=True)):
                first, second = (b.bitcast(vector, halves) for vector in both)
                for half in range(2):
                    row = take(b, first, range(half, 4 * LANES, 2), second)
                    store(b, row, b.add(turned, b.mul(b.add(d, INT64(2 * word + half)), INT64(_VALUES_ROW))))
            return []

        loop_over(b, head_dim, _PAIRS, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _hide(typing_context: Any, scores: Any, low: Any, high: Any) -> Any:
    """Of the 16 scores at an address, those of lanes below `low` and from `high` on become -infinity."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        scores, *limits = arguments
        low, high = (broadcast(b, b.trunc(limit, INT32), LANES) for limit in limits)
        lanes = ir.Constant(INTS, list(range(LANES)))
        seen = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        store(b, b.select(seen, load(b, scores, FLOATS), splat(FLOATS, -math.inf)), scores)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def _soften(typing_context: Any, scores: Any, num_keys: Any, scale: Any, state: Any, weights: Any) -> Any:
    """Scores [num_keys, 16], times `scale`, become weights in pairs of keys, [num_keys / 2, 16, 2] bfloat16.

    `scale` is positive. `state` has three vectors of the lanes: the highest score so far, the sum of the weights, and,
    for the caller, what the sums of before are to be multiplied with. `num_keys` is even.
    """

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        scores, num_keys, scale, state, weights = arguments
        scales, row = broadcast(b, scale, LANES), LANES * 4
        num_bytes = b.mul(num_keys, INT64(row))

        def higher(x: Any, y: Any) -> Any:
            return b.select(b.fcmp_ordered(">", x, y), x, y)

        def look(k: Any, tops: list[Any]) -> list[Any]:
            return [higher(load(b, b.add(scores, b.add(k, INT64(row * i))), FLOATS), top) for i, top in enumerate(tops)]

        tops = loop_over(b, num_bytes, 2 * row, [splat(FLOATS, -math.inf)] * 2, look)
        before = load(b, state, FLOATS)
        top = higher(b.fmul(higher(*tops), scales), before)
        # Where nothing was seen, -infinity from itself would be no number.
        known = b.select(b.fcmp_ordered(">", top, splat(FLOATS, -math.inf)), top, splat(FLOATS, 0.0))
        minus = b.fneg(known)

        def weigh(k: Any, totals: list[Any]) -> list[Any]:
            places = [b.add(scores, b.add(k, INT64(row * i))) for i in range(2)]
            pair = [exponential(b, fma(b, load(b, place, FLOATS), scales, minus)) for place in places]
            store(b, to_bfloat16_pairs(b, *pair), b.add(weights, b.udiv(k, INT64(2))))
            return [b.fadd(total, weight) for total, weight in zip(totals, pair, strict=True)]

        totals = loop_over(b, num_bytes, 2 * row, [splat(FLOATS, 0.0)] * 2, weigh)
        factor = exponential(b, b.fsub(before, known))
        total = b.fadd(b.fmul(load(b, b.add(state, INT64(row)), FLOATS), factor), b.fadd(*totals))
        for i, vector in enumerate((top, total, factor)):
            store(b, vector, b.add(state, INT64(row * i)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64, types.int64), generate


@intrinsic
def _add(typing_context: Any, sums: Any, factor: Any, added: Any, num_rows: Any) -> Any:
    """sums = sums * factor + added, of `num_rows` vectors. `factor` is one vector."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        sums, factor, added, num_rows = arguments
        factors = load(b, factor, FLOATS)

        def step(k: Any, _state: list[Any]) -> list[Any]:
            place = b.add(sums, k)
            parts = [load(b, place, FLOATS), factors, load(b, b.add(added, k), FLOATS)]
            store(b, fma(b, *parts), place)
            return []

        loop_over(b, b.mul(num_rows, INT64(LANES * 4)), LANES * 4, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _store(
    typing_context: Any, scale: Any, sums: Any, totals: Any, head_dim: Any, num_tokens: Any, out: Any, out_row: Any
) -> Any:
    """scale * sums [head_dim, 16] / totals [16] as `num_tokens` rows of bfloat16, which `out_row` bytes are between."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        scale, sums, totals, head_dim, num_tokens, out, out_row = arguments
        shares = b.fdiv(broadcast(b, scale, LANES), load(b, totals, FLOATS))

        def step(d: Any, _state: list[Any]) -> list[Any]:
            first = b.add(sums, b.mul(d, INT64(LANES * 4)))
            columns = [b.fmul(load(b, b.add(first, INT64(LANES * 4 * i)), FLOATS), shares) for i in range(_PAIRS)]
            pairs = zip(columns[::2], columns[1::2], strict=True)
            place = b.add(out, b.mul(d, INT64(2)))
            for i, row in enumerate(turn_words(b, [to_bfloat16_pairs(b, *pair) for pair in pairs])):
                with b.if_then(b.icmp_signed("<", INT64(i), num_tokens)):
                    store(b, row, b.add(place, b.mul(out_row, INT64(i))))
            return []

        loop_over(b, head_dim, _PAIRS, [], step)
        return context.get_dummy_value()

    return types.void(types.float32, *[types.int64] * 6), generate


class _Sizes(NamedTuple):
    """Bytes."""

    row: int  # a vector of float32
    head: int  # of a token in a cache of bfloat16
    token: int  # likewise, all its KV heads
    queries: int  # a tile, turned: [head_dim / 2, 16, 2] bfloat16
    sums: int  # of a tile: [head_dim, 16] float32
    state: int  # likewise, see `_soften`


class _Memory(NamedTuple):
    """Addresses of what a thread works with."""

    queries: int  # of all tiles of an item
    sums: int
    states: int
    values: int  # of a chunk, turned: [head_dim, CHUNK] bfloat16
    scores: int  # of a tile: [CHUNK, 16] float32
    weights: int  # likewise: [CHUNK / 2, 16, 2] bfloat16
    added: int  # what a product gives: [_PAIRS, 16] float32
    widened: int  # of a chunk of caches in 8 bits: keys, then values, [CHUNK, head_dim] bfloat16


class _Item(NamedTuple):
    token: int  # the first, in the batch
    position: int  # its
    num_tokens: int
    num_spans: int  # of TILE tokens each
    kv_head: int
    first_key: int  # that any of them attends to
    blocks: int  # address of the request's block ids


class _Keys(NamedTuple):
    """Of a chunk, counted from where it begins."""

    start: int  # the first, from which rows of scores are
    stop: int  # behind the last that a tile of queries attends to
    own: int  # the one that the tile's first lane has computed itself


@njit(error_model="numpy")
def _item(plan: Any, number: int) -> Any:
    part, num_parts = number // plan.num_kv_heads, plan.num_items // plan.num_kv_heads
    token = carray(pointer(plan.tokens), (num_parts,), np.int64)[part]
    position = carray(pointer(plan.positions), (num_parts,), np.int64)[part]
    num_tokens = carray(pointer(plan.counts), (num_parts,), np.int64)[part]
    request = carray(pointer(plan.requests), (num_parts,), np.int64)[part]
    blocks = plan.block_table + 4 * request * plan.table_stride
    num_spans, kv_head = (num_tokens + TILE - 1) // TILE, number % plan.num_kv_heads
    first_key = max(np.int64(0), position - plan.window + 1) if plan.window else np.int64(0)
    return _Item(token, position, num_tokens, num_spans, kv_head, first_key, blocks)


@njit(error_model="numpy")
def _begin_item(layer: Any, plan: Any, item: Any, sizes: Any, memory: Any) -> None:
    """Turn the queries; nothing has been seen yet."""
    group = plan.num_heads // plan.num_kv_heads
    for tile in range(item.num_spans * group):
        first, head = tile // group * TILE, item.kv_head * group + tile % group
        source = layer.query + 2 * ((item.token + first) * layer.token_stride + head * layer.head_stride)
        last, target = min(TILE, item.num_tokens - first) - 1, memory.queries + tile * sizes.queries
        for k in range(0, sizes.head, STEP_BYTES):
            turn_tile(0, False, False, source + k, 2 * layer.token_stride, last, target + k * TILE, 0)
    num_tiles = item.num_spans * group
    carray(pointer(memory.sums), (num_tiles * plan.head_dim * LANES,), np.float32)[:] = np.float32(0.0)
    states = carray(pointer(memory.states), (num_tiles, 3, LANES), np.float32)
    states[:, 0], states[:, 1] = np.float32(-np.inf), np.float32(0.0)


@njit(error_model="numpy")
def _place(plan: Any, item: Any, sizes: Any, position: int) -> Any:
    """Bytes from the start of a cache of bfloat16 to a position of the item's request, in its KV head."""
    block_size = plan.block_size
    block = carray(pointer(item.blocks), (np.int64(1) << 31,), np.int32)[position // block_size]
    return (block * block_size + position % block_size) * sizes.token + item.kv_head * sizes.head


@njit(error_model="numpy")
def _attend_to_chunk(layer: Any, plan: Any, item: Any, sizes: Any, memory: Any, chunk: int) -> None:
    """The keys from position `chunk` on. What is counted here counts from there."""
    offsets = np.empty(CHUNK, np.int64)
    low, high = max(chunk, item.first_key) - chunk, min(chunk + CHUNK, item.position + item.num_tokens) - chunk
    start, end = low // _PAIRS * _PAIRS, (high + _PAIRS - 1) // _PAIRS * _PAIRS
    for i in range(start, end):  # beside the keys, their values, without weight
        offsets[i] = _place(plan, item, sizes, chunk + max(low, min(high - 1, i))) * plan.cache_bytes // 2
    key_cache, value_cache = layer.key_cache, layer.value_cache
    is_widened = plan.cache_bytes == 1
    if is_widened:
        key_cache, value_cache = np.int64(memory.widened), np.int64(memory.widened + CHUNK * sizes.head)
        short = np.empty(0, np.uint16)
        widen_chunk(short, layer, offsets[start:end], start, plan.head_dim, key_cache, value_cache)
    for i in range(start, high, _PAIRS):
        _turn_values(value_cache, offsets[i:].ctypes.data, plan.head_dim, memory.values + 2 * i)
    group = plan.num_heads // plan.num_kv_heads
    for span in range(item.num_spans):
        own = item.position + span * TILE - chunk  # the key that the first lane has computed itself
        stop = min(high, own + min(TILE, item.num_tokens - span * TILE))
        if stop <= start:
            continue
        for tile in range(span * group, (span + 1) * group):
            for i in range(start, stop, TILE):
                if i + TILE > low:
                    keys = key_cache + (offsets[i] if is_widened else _place(plan, item, sizes, chunk + i))
                    key_row = sizes.head if is_widened else sizes.token
                    queries, scores = memory.queries + tile * sizes.queries, memory.scores + i * sizes.row
                    multiply(PRODUCT, 0, 1, 1, keys, key_row, queries, 0, sizes.head, 0, 0, scores)
            scale = np.float32(plan.scale * layer.key_scale)
            _weigh_values(plan, scale, sizes, memory, tile, _Keys(start, stop, own))


@njit(error_model="numpy")
def _weigh_values(plan: Any, scale: Any, sizes: Any, memory: Any, tile: int, keys: Any) -> None:
    """The scores of a tile become weights, and the values times them are added to its sums."""
    start, stop, own = keys
    num_keys = (stop - start + _PAIRS - 1) // _PAIRS * _PAIRS
    if plan.window:
        for i in range(start, min(stop, own + TILE - plan.window)):
            _hide(memory.scores + i * sizes.row, 0, i - own + plan.window)
    for i in range(max(start, own + 1), start + num_keys):
        _hide(memory.scores + i * sizes.row, i - own, TILE)
    state, sums = memory.states + tile * sizes.state, memory.sums + tile * sizes.sums
    _soften(memory.scores + start * sizes.row, num_keys, scale, state, memory.weights)
    for d in range(0, plan.head_dim, _PAIRS):
        values = memory.values + d * _VALUES_ROW + 2 * start
        multiply(PRODUCT, 0, 2, 1, values, _VALUES_ROW, memory.weights, 0, 2 * num_keys, 0, 0, memory.added)
        _add(sums + d * sizes.row, state + 2 * sizes.row, memory.added, _PAIRS)


@njit(error_model="numpy")
def _end_item(layer: Any, plan: Any, item: Any, sizes: Any, memory: Any) -> None:
    group, out_row = plan.num_heads // plan.num_kv_heads, plan.num_heads * sizes.head
    for tile in range(item.num_spans * group):
        first, head = tile // group * TILE, item.kv_head * group + tile % group
        totals = memory.states + tile * sizes.state + sizes.row
        out = layer.out + (item.token + first) * out_row + head * sizes.head
        num_tokens = min(TILE, item.num_tokens - first)
        scale = np.float32(layer.value_scale)
        _store(scale, memory.sums + tile * sizes.sums, totals, plan.head_dim, num_tokens, out, out_row)


@cache
def worker() -> Any:
    """Compiled when it is first asked for, as not every CPU can."""
    sources = digest_of(
        *(
            "attention_call",
            "claims",
            "prompt_tiles",
            "prompt_plan",
            "digits",
            "exponential",
            "walk",
            "features",
            "heads",
        ),
        *("intrinsics", "tiles", "vectors"),
        *("matrix_tiles", "tile_product", "turned_tiles", "vector_tiles"),
    )
    sources = f"{sources} {PRODUCT}"

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """One thread: take items until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        layer = carray(pointer(address), (1,), LAYER)[0]
        plan = carray(pointer(layer.plan), (1,), PLAN)[0]
        head_dim, row = plan.head_dim, 4 * LANES
        sizes = _Sizes(
            row, 2 * head_dim, 2 * plan.num_kv_heads * head_dim, 2 * TILE * head_dim, head_dim * row, 3 * row
        )
        most = plan.item_tokens // TILE * (plan.num_heads // plan.num_kv_heads)  # tiles
        of_chunk = head_dim * _VALUES_ROW + CHUNK * row + CHUNK * row // 2
        of_chunk += 2 * CHUNK * sizes.head if plan.cache_bytes == 1 else 0
        owned = np.empty(
            STEP_BYTES + most * (sizes.queries + sizes.sums + sizes.state) + of_chunk + _PAIRS * row, np.int8
        )
        queries = (owned.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        sums = queries + most * sizes.queries
        states = sums + most * sizes.sums
        values = states + most * sizes.state
        scores = values + head_dim * _VALUES_ROW
        weights = scores + CHUNK * row
        added = weights + CHUNK * row // 2
        memory = _Memory(queries, sums, states, values, scores, weights, added, added + _PAIRS * row)
        begin(PRODUCT, plan.tiles)
        thread, number, lap = enter(layer.claims), -1, 0
        while True:
            number, lap = take_item(layer.claims, layer.num_threads, plan.num_items, thread, number, lap)
            if number < 0:
                break
            item = _item(plan, number)
            _begin_item(layer, plan, item, sizes, memory)
            for chunk in range(item.first_key // CHUNK * CHUNK, item.position + item.num_tokens, CHUNK):
                _attend_to_chunk(layer, plan, item, sizes, memory, chunk)
            _end_item(layer, plan, item, sizes, memory)
        end(PRODUCT)
        owned[0] = 0  # it lives until here: Numba does not see who has its address

    return worker
