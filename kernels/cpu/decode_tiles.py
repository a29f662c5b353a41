# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, call-arg, misc, no-untyped-call, type-var, untyped-decorator, var-annotated"
"""What `decode` does with an item in the CPU's matrix tiles (Intel AMX), all in bfloat16:

    16 keys, as they lie  x  four query heads, turned     =  scores [key, head], which become [head, key]
    weights [head, 32 positions]  x  32 values, in pairs  =  sums [head, 16 of head_dim]

Keys are read a tile at a time, so blocks are whole tiles. Weights are rounded to bfloat16 for the second product; their
sum is of those that are not, as in `prompt_tiles`. Of a cache in 8 bits, a chunk becomes bfloat16 first.

With three query heads to a KV head, most of a tile is empty. Still it takes two thirds of the time of vectors, which
wait for keys to be turned, and for each number to be widened (tests/benchmarks/HISTORY.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .heads import AHEAD, CHUNK, widen_codes
from .intrinsics import pointer
from .matrix_tiles import are_available, begin, describe, load_tile, multiply_tile, set_shape, store_tile, zero_tile
from .tile_product import STEP_BYTES, TILE, TILE_BYTES
from .vectors import (
    FLOATS,
    INT16,
    INT64,
    LANES,
    broadcast,
    load,
    loop_over,
    prefetch,
    store,
    take,
    to_bfloat16_by_instruction,
)

_HEADS = 4  # that are scored together
MORE_HEADS = _HEADS - 1  # for which there is room, where heads are scored
_PAIRS = STEP_BYTES // 2  # elements of head_dim, or positions, that one step of a product takes
_QUERY_BYTES = TILE * 4 * _HEADS  # of a tile of queries, [pair of elements][head][2]
_SCORES_BYTES = TILE * 4 * _HEADS
_SLICE = 4  # tiles of sums, that is 64 elements of head_dim, that registers hold
_RING = 2  # groups of 32 values whose tiles are in memory
_WORDS = ir.VectorType(INT16, 2 * LANES)

# Tile registers, of 16 rows, but for those of heads; and of whole rows, but for scores and queries. Sums come behind.
_SCORES, _QUERIES, _KEYS, _WEIGHTS, _SUMS = range(5)
_VALUES = _KEYS

_NAME = "tdpbf16ps"
_SHORT = np.empty(0, np.uint16)  # what bfloat16 is to compiled functions


def fits(sliding_window: int | None) -> bool:
    """Whether decodes are computed so, where prompts are by `prompt_tiles`."""
    return sliding_window is None and are_available()


class _Places(NamedTuple):
    """Addresses, all of a line of the cache."""

    config: int  # of tiles
    queries: int  # by KV head, and by four of its query heads: what they ask, [pair of elements][head][2]
    found: int  # likewise: their scores, [position][head]
    weights: int  # [head][CHUNK] bfloat16
    pairs: int  # of values: _RING groups of tiles; and behind them sums, as they are stored
    offsets: int  # of a cache in 8 bits: those of its keys and values, which become bfloat16
    keys: int
    values: int
    end: int


@njit(error_model="numpy")
def _places(plan: Any, memory: Any) -> _Places:
    """In the memory of a thread."""
    start, num_fours = (memory + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES, plan.num_kv_heads * _fours(plan)
    queries = start + STEP_BYTES
    found = queries + num_fours * plan.head_dim // _PAIRS * _QUERY_BYTES
    weights = found + num_fours * CHUNK * 4 * _HEADS
    pairs = weights + plan.num_heads * CHUNK * 2
    offsets = pairs + (_RING + 1) * _SLICE * TILE_BYTES
    rows = CHUNK * plan.num_kv_heads * plan.head_dim * 2 if plan.cache_bytes == 1 else 0
    keys = offsets + (CHUNK + AHEAD) * 8
    return _Places(start, queries, found, weights, pairs, offsets, keys, keys + rows, keys + 2 * rows)


@njit(error_model="numpy")
def _fours(plan: Any) -> int:
    """How many times four query heads a KV head has, or nearly."""
    count: int = (plan.num_heads // plan.num_kv_heads + _HEADS - 1) // _HEADS
    return count


@njit(error_model="numpy")
def new_memory(plan: Any) -> Any:
    """What a thread has for itself."""
    memory = np.empty(_places(plan, 0).end + STEP_BYTES, np.uint8)
    at = _places(plan, np.int64(memory.ctypes.data))
    config, num_heads = carray(pointer(at.config), (STEP_BYTES,), np.uint8), plan.num_heads // plan.num_kv_heads
    describe(config, TILE)
    for tile in (_SCORES, _QUERIES):
        set_shape(config, tile, TILE, 4 * _HEADS)
    for tile in range(_WEIGHTS, _SUMS + _SLICE):
        set_shape(config, tile, min(num_heads, TILE), STEP_BYTES)
    begin(at.config)
    carray(pointer(at.queries), (at.found - at.queries,), np.uint8)[:] = 0  # those of heads that are missing stay so
    offsets = carray(pointer(at.offsets), (CHUNK + AHEAD,), np.int64)
    for i in range(len(offsets)):
        offsets[i] = i * plan.num_kv_heads * plan.head_dim * 2
    return memory


@njit(error_model="numpy")
def score(
    layer: Any,
    plan: Any,
    token: int,
    _query: Any,
    like: Any,
    _in_pairs: bool,
    memory: int,
    offsets: Any,
    count: int,
    scores: Any,
) -> None:
    """See `decode`: of whole tiles of keys. Behind the heads of `scores` there is room for MORE_HEADS. Of a cache in 8
    bits, keys become bfloat16 before, and values for `weigh`."""
    head_dim, num_kv_heads, num_fours = plan.head_dim, plan.num_kv_heads, _fours(plan)
    group = plan.num_heads // num_kv_heads
    token_bytes, four_bytes, at = num_kv_heads * head_dim * 2, head_dim // _PAIRS * _QUERY_BYTES, _places(plan, memory)
    for head in range(plan.num_heads):
        kv_head, place = head // group, head % group
        turned = at.queries + (kv_head * num_fours + place // _HEADS) * four_bytes + 4 * (place % _HEADS)
        pairs = carray(pointer(turned), (head_dim // 2, _HEADS), np.uint32)
        row = layer.query + (token * layer.token_stride + head * layer.head_stride) * 2
        asked = carray(pointer(row), (head_dim // 2,), np.uint32)
        for pair in range(head_dim // 2):
            pairs[pair, 0] = asked[pair]
    keys, places, are_widened = layer.key_cache, offsets.ctypes.data, like.itemsize == 1
    if are_widened:
        for given, wide in ((layer.key_cache, at.keys), (layer.value_cache, at.values)):
            widen_codes(_SHORT, given, places, count, num_kv_heads * head_dim, wide)
        keys, places = at.keys, at.offsets
    for i in range(0, count, TILE):
        for kv_head in range(num_kv_heads):
            for four in range(num_fours):
                number = kv_head * num_fours + four
                _score_tile(
                    keys + kv_head * head_dim * 2, places + 8 * i, token_bytes, head_dim // _PAIRS,
                    at.queries + number * four_bytes, at.found + (number * CHUNK + i) * 4 * _HEADS,
                    four == 0 and not are_widened,
                )  # fmt: skip
    scale = np.float32(plan.scale * layer.key_scale)
    for kv_head in range(num_kv_heads):
        for four in range(num_fours):
            head, number = kv_head * group + four * _HEADS, kv_head * num_fours + four
            row = scores.ctypes.data + head * CHUNK * 4
            _turn_scores(at.found + number * CHUNK * 4 * _HEADS, count // TILE, scale, row)


@njit(error_model="numpy")
def weigh(layer: Any, plan: Any, like: Any, memory: int, weights: Any, offsets: Any, length: int, acc: Any) -> None:
    """See `decode`. Behind the weights of a head there is room for whole groups."""
    head_dim, num_kv_heads, at = plan.head_dim, plan.num_kv_heads, _places(plan, memory)
    group, num_groups = plan.num_heads // num_kv_heads, (length + _PAIRS - 1) // _PAIRS
    values, places = layer.value_cache, offsets.ctypes.data
    if like.itemsize == 1:
        values, places = at.values, at.offsets
    for head in range(plan.num_heads):
        for i in range(length, num_groups * _PAIRS):
            weights[head, i] = np.float32(0.0)
        _round(weights.ctypes.data + head * CHUNK * 4, num_groups, at.weights + head * CHUNK * 2)
    for head in range(0, group, TILE):
        count = min(group - head, TILE)
        for kv_head in range(num_kv_heads):
            row = kv_head * group + head
            for d in range(0, head_dim, _SLICE * TILE):
                place, of_row = acc.ctypes.data + (row * head_dim + d) * 4, at.weights + row * CHUNK * 2
                slice_of = values + (kv_head * head_dim + d) * 2
                if head_dim - d < _SLICE * TILE:
                    _weigh_tiles(2, slice_of, places, length, num_groups, of_row, at.pairs, count, place, head_dim * 4)
                else:
                    _weigh_tiles(
                        _SLICE, slice_of, places, length, num_groups, of_row, at.pairs, count, place, head_dim * 4
                    )


@intrinsic
def _score_tile(
    typing_context: Any,
    keys: Any,
    offsets: Any,
    token_bytes: Any,
    num_steps: Any,
    queries: Any,
    scores: Any,
    fetches: Any,
) -> Any:
    """Scores [16, _HEADS] of 16 keys, of which the first is at the first offset. The keys AHEAD offsets behind are
    fetched, if asked for."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        keys, offsets, token_bytes, num_steps, queries, scores, fetches = arguments
        place = b.add(keys, load(b, offsets, INT64))
        fetched = [b.add(keys, load(b, b.add(offsets, INT64(8 * (AHEAD + i))), INT64)) for i in range(TILE)]
        zero_tile(b, _SCORES)

        def step(number: Any, _state: list[Any]) -> list[Any]:
            within = b.mul(number, INT64(STEP_BYTES))
            load_tile(b, _QUERIES, b.add(queries, b.mul(number, INT64(_QUERY_BYTES))), INT64(4 * _HEADS))
            load_tile(b, _KEYS, b.add(place, within), token_bytes)
            with b.if_then(fetches):
                for each in fetched:
                    prefetch(b, b.add(each, within), level=2)
            multiply_tile(b, _NAME, _SCORES, _KEYS, _QUERIES)
            return []

        loop_over(b, num_steps, 1, [], step)
        store_tile(b, _SCORES, scores, INT64(4 * _HEADS))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, types.boolean), generate


@intrinsic
def _turn_scores(typing_context: Any, found: Any, num_tiles: Any, scale: Any, scores: Any) -> Any:
    """Tiles of scores [16, _HEADS] times `scale` become rows of CHUNK. (Not as soon as they are stored: to load what
    several stores have written waits for them.)"""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        found, num_tiles, scale, scores = arguments
        scales = broadcast(b, scale, LANES)

        def step(i: Any, _state: list[Any]) -> list[Any]:
            start, out = b.add(found, b.mul(i, INT64(_SCORES_BYTES))), b.add(scores, b.mul(i, INT64(STEP_BYTES)))
            parts = [load(b, b.add(start, INT64(STEP_BYTES * four)), FLOATS) for four in range(_HEADS)]  # [key][head]
            for first in range(0, _HEADS, 2):  # two heads of 8 keys, then of 16
                places = [_HEADS * key + head for head in (first, first + 1) for key in range(LANES // 2)]
                low, high = (take(b, parts[four], places, parts[four + 1]) for four in (0, 2))
                for which, head in enumerate((first, first + 1)):
                    of_one = [LANES // 2 * which + key + half for half in (0, LANES) for key in range(LANES // 2)]
                    store(b, b.fmul(take(b, low, of_one, high), scales), b.add(out, INT64(CHUNK * 4 * head)))
            return []

        loop_over(b, num_tiles, 1, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def _round(typing_context: Any, weights: Any, num_groups: Any, out: Any) -> Any:
    """Groups of 32 weights become bfloat16."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        weights, num_groups, out = arguments

        def step(i: Any, _state: list[Any]) -> list[Any]:
            start = b.add(weights, b.mul(i, INT64(2 * STEP_BYTES)))
            both = (load(b, b.add(start, INT64(STEP_BYTES * half)), FLOATS) for half in range(2))
            store(b, to_bfloat16_by_instruction(b, *both), b.add(out, b.mul(i, INT64(STEP_BYTES))))
            return []

        loop_over(b, num_groups, 1, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def _weigh_tiles(
    typing_context: Any,
    num_tiles: Any,
    values: Any,
    offsets: Any,
    length: Any,
    num_groups: Any,
    weights: Any,
    pairs: Any,
    num_heads: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Sums of weight x value over positions, num_tiles x 16 of head_dim, for as many heads as tiles have rows.

    While 32 values become tiles of pairs at `pairs`, those before are multiplied. `num_tiles`: a constant, even. The
    values AHEAD offsets behind are fetched.
    """
    tiles = num_tiles.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, values, offsets, length, num_groups, weights, pairs, num_heads, out, out_row = arguments

        def tiles_of(group: Any) -> list[Any]:
            first = b.mul(b.and_(group, INT64(_RING - 1)), INT64(_SLICE * TILE_BYTES))
            return [b.add(b.add(pairs, first), INT64(TILE_BYTES * tile)) for tile in range(tiles)]

        def add_up(group: Any) -> None:
            load_tile(b, _WEIGHTS, b.add(weights, b.mul(group, INT64(STEP_BYTES))), INT64(CHUNK * 2))
            for tile, place in enumerate(tiles_of(group)):
                load_tile(b, _VALUES, place, INT64(STEP_BYTES))
                multiply_tile(b, _NAME, _SUMS + tile, _WEIGHTS, _VALUES)

        def step(before: Any, _state: list[Any]) -> list[Any]:
            following = b.add(before, INT64(1))
            _pair_up(b, values, offsets, length, following, tiles_of(following))
            add_up(before)
            return []

        for tile in range(tiles):
            zero_tile(b, _SUMS + tile)
        _pair_up(b, values, offsets, length, INT64(0), tiles_of(INT64(0)))
        rest = b.sub(num_groups, INT64(1))
        with b.if_then(b.icmp_signed(">", rest, INT64(0))):
            loop_over(b, rest, 1, [], step, may_unroll=False)
        add_up(rest)
        _store_sums(b, tiles, b.add(pairs, INT64(_RING * _SLICE * TILE_BYTES)), num_heads, out, out_row)
        return context.get_dummy_value()

    return types.void(num_tiles, *[types.int64] * 9), generate


def _pair_up(b: ir.IRBuilder, values: Any, offsets: Any, length: Any, group: Any, tiles: Sequence[Any]) -> None:
    """Generate: a group of 32 values becomes tiles at these addresses, [pair of values][16 of head_dim][2]. Columns are
    in the order that `_store_sums` knows."""
    first, last = b.mul(group, INT64(_PAIRS)), b.sub(length, INT64(1))
    lines = range(0, len(tiles) * STEP_BYTES // 2, STEP_BYTES)
    for i in range(0, _PAIRS, 2):
        rows = []
        for position in (b.add(first, INT64(i)), b.add(first, INT64(i + 1))):
            # Behind the last one it is that one again, for weights of 0.
            known = b.select(b.icmp_signed("<", position, last), position, last)
            rows.append(b.add(values, load(b, b.add(offsets, b.mul(known, INT64(8))), INT64)))
            behind = b.add(offsets, b.mul(b.add(known, INT64(AHEAD)), INT64(8)))
            for line in lines:
                prefetch(b, b.add(b.add(values, load(b, behind, INT64)), INT64(line)), level=2)
        for number, line in enumerate(lines):
            low, high = (load(b, b.add(row, INT64(line)), _WORDS) for row in rows)
            for half in range(2):  # words of either by turns, four of each eight
                places = [
                    8 * eight + 4 * half + word + other
                    for eight in range(4)
                    for word in range(4)
                    for other in (0, 2 * LANES)
                ]
                store(b, take(b, low, places, high), b.add(tiles[2 * number + half], INT64(STEP_BYTES * (i // 2))))


def _store_sums(b: ir.IRBuilder, num_tiles: int, spare: Any, num_heads: Any, out: Any, out_row: Any) -> None:
    """Generate: sums, [head][16 of head_dim] in each tile, become rows. `spare`: memory for as many tiles."""
    for tile in range(num_tiles):
        store_tile(b, _SUMS + tile, b.add(spare, INT64(TILE_BYTES * tile)))

    def of_head(head: Any, _state: list[Any]) -> list[Any]:
        start, target = b.add(spare, b.mul(head, INT64(STEP_BYTES))), b.add(out, b.mul(head, out_row))
        for tile in range(0, num_tiles, 2):
            low, high = (load(b, b.add(start, INT64(TILE_BYTES * (tile + i))), FLOATS) for i in range(2))
            for half in range(2):
                fours = [LANES * which + 4 * (2 * half + four) for four in range(2) for which in (0, 1)]
                both = take(b, low, [four + i for four in fours for i in range(4)], high)
                store(b, both, b.add(target, INT64(STEP_BYTES * (tile + half))))
        return []

    loop_over(b, num_heads, 1, [], of_head)
