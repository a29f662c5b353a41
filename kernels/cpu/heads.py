# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, call-arg, misc, untyped-decorator"
"""What attention does with some query heads and the cache of the KV head that they share, as LLVM vectors.

    turn     16 positions  ->  columns                             so that `weigh` can score long rows of positions
    score    query heads  x  some positions  ->  scores            keys are walked along `head_dim`
    weigh    query heads  x  vectors of head_dim  ->  sums of values    values are walked along the positions
    merge    what was seen  +  a chunk of positions      ->  what was seen

so that what is read of the cache serves all heads, and sums stay in registers. A score has the same bits from `score`,
whose sums are four lanes, and from `weigh` in as many classes (see `tile_product`), unless `score` multiplies pairs of
numbers. Heads and caches are addresses; where the positions lie in a cache is a list of offsets in bytes. `head_dim` is
a multiple of LANES.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, literally, njit, types
from numba.extending import intrinsic

from .exponential import largest, soften
from .features import IS_WIDE, cpu_features
from .intrinsics import narrowed, pointer
from .tile_product import CLASSES
from .vectors import (
    FLOAT,
    FLOATS,
    INT8,
    INT16,
    INT64,
    INTS,
    LANES,
    add_quarters,
    broadcast,
    dot_bfloat16,
    float8_to_bfloat16,
    fma,
    from_bfloat16,
    from_float8,
    join_quarters,
    load,
    load_repeated,
    loop_over,
    prefetch,
    repeat_quarter,
    splat,
    store,
    take,
    turn_quarters,
    turn_words,
)

_AT_ONCE = 4  # heads, and vectors of head_dim, that registers hold the sums of
# Positions that `score` takes, and heads at most: a vector of sums has a quarter for each of four positions.
POSITIONS, _HEADS = (8, 8) if IS_WIDE else (4, 4)
# Vectors of head_dim in `weigh`, by how many heads it weighs for: fewer, where registers are fewer and shorter.
_OF_ONE, _OF_TWO, _OF_MORE = (4, 4, 4) if IS_WIDE else (4, 2, 1)
CHUNK = 256  # positions that are merged at once, at fixed places
# Positions: keys and values of a token are too short for the CPU to see what will be read next. They come into the
# second-level cache; into the first, they would push out what is in use.
AHEAD = 32
# Positions whose values are weighed for all heads before those behind them. With AVX2 a pass over positions weighs one
# line of the cache of each; over all of a chunk, the lines beside it would be gone before the passes that need them.
VALUES = CHUNK if IS_WIDE else AHEAD
_LINE = 64  # bytes
_SIZE = 4  # bytes of a float32
_QUARTER = ir.VectorType(FLOAT, CLASSES)  # of a vector of LANES
_QUARTER_BYTES = CLASSES * _SIZE


@intrinsic
def turn(typing_context: Any, like: Any, keys: Any, offsets: Any, head_dim: Any, turned: Any, turned_row: Any) -> Any:
    """The keys at 16 offsets become columns of float32: turned[d][i], whose rows are `turned_row` bytes apart."""
    width = like.dtype.bitwidth // 8

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, keys, offsets, head_dim, turned, turned_row = arguments
        places = [b.add(keys, load(b, b.add(offsets, INT64(8 * i)), INT64)) for i in range(LANES)]

        def step(d: Any, _state: list[Any]) -> list[Any]:
            rows = [_load(b, b.add(place, b.mul(d, INT64(width))), width) for place in places]
            for i, column in enumerate(turn_words(b, rows)):
                store(b, column, b.add(turned, b.mul(b.add(d, INT64(i)), turned_row)))
            return []

        loop_over(b, head_dim, LANES, [], step)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 5), generate


@intrinsic
def widen_codes(
    typing_context: Any, like: Any, source: Any, offsets: Any, num_rows: Any, head_dim: Any, target: Any
) -> Any:
    """Rows of e4m3fn at offsets become rows one behind the other, of the type of `like`: float32, or bfloat16 as
    uint16, which has each of these numbers."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, source, offsets, num_rows, head_dim, target = arguments
        size = like.dtype.bitwidth // 8

        def row(i: Any, _state: list[Any]) -> list[Any]:
            place = b.add(source, load(b, b.add(offsets, b.mul(i, INT64(8))), INT64))
            out = b.add(target, b.mul(b.mul(i, head_dim), INT64(size)))

            def step(d: Any, _state: list[Any]) -> list[Any]:
                numbers = (_words if size == 2 else _load)(b, b.add(place, d), 1)
                store(b, numbers, b.add(out, b.mul(d, INT64(size))))
                return []

            loop_over(b, head_dim, LANES, [], step)
            return []

        loop_over(b, num_rows, 1, [], row)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 5), generate


@intrinsic(prefer_literal=True)
def score(
    typing_context: Any,
    like: Any,
    num_heads: Any,
    query: Any,
    query_row: Any,
    keys: Any,
    offsets: Any,
    head_dim: Any,
    scale: Any,
    scores: Any,
    scores_row: Any,
) -> Any:
    """Dot products of `num_heads` queries with the keys at POSITIONS offsets, [heads, offsets] float32 at `scores`.

    `query_row` and `scores_row` bytes are between heads. Constant: `num_heads`, up to _HEADS. Keys have the type of
    `like`, an array: float32, bfloat16 as uint16, or e4m3fn as uint8; queries, which have been scaled, are float32. Or
    both are in bfloat16, and two numbers are multiplied at once: `like` is signed then, and products are scaled. The
    keys AHEAD offsets behind are fetched.
    """
    heads, width = num_heads.literal_value, like.dtype.bitwidth // 8
    in_pairs = isinstance(like.dtype, types.Integer) and like.dtype.signed

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, query, query_row, keys, offsets, head_dim, scale, scores, scores_row = arguments
        places, fetched = (
            [b.add(keys, load(b, b.add(offsets, INT64(8 * (ahead + i))), INT64)) for i in range(POSITIONS)]
            for ahead in (0, AHEAD)
        )
        query_rows = [b.add(query, b.mul(query_row, INT64(i))) for i in range(heads)]
        fours, multiply = range(0, POSITIONS, 4), dot_bfloat16 if in_pairs else fma

        def step(d: Any, sums: list[Any]) -> list[Any]:
            for place in fetched:
                prefetch(b, b.add(place, b.mul(d, INT64(width))), level=2)
            rows = [b.add(place, b.mul(d, INT64(width))) for place in places]
            if in_pairs:
                keys = [_pairs(b, rows[first : first + 4], width) for first in fours]
            else:
                keys = [_quarters(b, rows[first : first + 4], width) for first in fours]
            offset = b.mul(d, INT64(2 if in_pairs else _SIZE))
            for number in range(len(keys[0])):
                within = b.add(offset, INT64(_QUARTER_BYTES * number))
                queries = [repeat_quarter(b, load(b, b.add(row, within), _QUARTER)) for row in query_rows]
                of_all = [(one, each[number]) for one in queries for each in keys]
                sums = [multiply(b, one, each, total) for (one, each), total in zip(of_all, sums, strict=True)]
            return sums

        nothing, zeros = splat(_QUARTER, 0.0), [splat(FLOATS, 0.0)] * (heads * len(fours))
        found = iter(loop_over(b, head_dim, LANES, zeros, step))
        for head in range(heads):
            row = b.add(scores, b.mul(scores_row, INT64(head)))
            for first in fours:
                total = add_quarters(b, nothing, next(found))
                total = b.fmul(total, broadcast(b, scale, CLASSES)) if in_pairs else total
                store(b, total, b.add(row, INT64(_SIZE * first)))
        return context.get_dummy_value()

    return types.void(like, num_heads, *[types.int64] * 5, types.float32, *[types.int64] * 2), generate


@intrinsic(prefer_literal=True)
def weigh(
    typing_context: Any,
    like: Any,
    num_heads: Any,
    num_vectors: Any,
    ahead: Any,
    classes: Any,
    onto: Any,
    weights: Any,
    weights_row: Any,
    values: Any,
    offsets: Any,
    num_positions: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Sums of weight x value over positions, `num_vectors` x LANES of head_dim for each of `num_heads`.

    weights and out are float32, with so many bytes between heads. Constants: these two numbers, up to _AT_ONCE; how
    many offsets behind those of its values each step fetches, 0 for none; the classes of positions that are summed
    one after the other, whose number divides that of the positions; and whether sums go `onto` those that are there.
    Values have the type of `like`.
    """
    heads, vectors, width = num_heads.literal_value, num_vectors.literal_value, like.dtype.bitwidth // 8

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        weights, weights_row, values, offsets, num_positions, out, out_row = arguments[6:]
        weight_rows = [b.add(weights, b.mul(weights_row, INT64(head))) for head in range(heads)]

        def step(first: Any, sums: list[Any], place_in_class: int) -> list[Any]:
            i = b.add(first, INT64(place_in_class))
            offset = b.add(offsets, b.mul(i, INT64(8)))
            place = b.add(values, load(b, offset, INT64))
            if ahead.literal_value:
                behind = b.add(values, load(b, b.add(offset, INT64(8 * ahead.literal_value)), INT64))
                for line in range(0, vectors * LANES * width, _LINE):
                    prefetch(b, b.add(behind, INT64(line)), level=2)
            loaded = [_load(b, b.add(place, INT64(LANES * width * j)), width) for j in range(vectors)]
            added = []
            for head, row in enumerate(weight_rows):
                weight = load_repeated(b, b.add(row, b.mul(i, INT64(_SIZE))), FLOAT)
                added += [fma(b, weight, value, sums[vectors * head + j]) for j, value in enumerate(loaded)]
            return added

        places = [
            b.add(b.add(out, b.mul(out_row, INT64(head))), INT64(LANES * _SIZE * j))
            for head in range(heads)
            for j in range(vectors)
        ]
        zeros, number = [splat(FLOATS, 0.0)] * (heads * vectors), classes.literal_value
        start = [load(b, place, FLOATS) for place in places] if onto.literal_value else zeros
        sums = loop_over(b, num_positions, number, start, partial(step, place_in_class=0))
        for each in range(1, number):
            added = loop_over(b, num_positions, number, zeros, partial(step, place_in_class=each))
            sums = [b.fadd(total, new) for total, new in zip(sums, added, strict=True)]
        for place, total in zip(places, sums, strict=True):
            store(b, total, place)
        return context.get_dummy_value()

    return types.void(like, num_heads, num_vectors, ahead, classes, onto, *[types.int64] * 7), generate


def _quarters(b: ir.IRBuilder, places: list[Any], width: int) -> list[Any]:
    """By quarter of the vectors at four places, a vector of it from each."""
    if IS_WIDE:
        return turn_quarters(b, [_load(b, place, width) for place in places])
    size = CLASSES * width
    return [_join(b, [b.add(place, INT64(size * i)) for place in places], width) for i in range(LANES // CLASSES)]


def _pairs(b: ir.IRBuilder, places: list[Any], width: int) -> list[Any]:
    """`_quarters` of bfloat16: a vector of it from each is four pairs of numbers."""
    whole = range(2 * LANES)
    low, high = (
        b.bitcast(take(b, _words(b, places[i], width), whole, _words(b, places[i + 1], width)), INTS) for i in (0, 2)
    )
    return [
        take(b, low, [start + i for start in range(4 * half, 2 * LANES, 8) for i in range(4)], high) for half in (0, 1)
    ]


def _words(b: ir.IRBuilder, place: Any, width: int) -> Any:
    """LANES numbers as bfloat16."""
    if width == 2:
        return load(b, place, ir.VectorType(INT16, LANES))
    if "avx512bw" in cpu_features():
        return float8_to_bfloat16(b, load(b, place, ir.VectorType(INT8, LANES)))
    bits = b.bitcast(_load(b, place, width), INTS)
    return b.trunc(b.lshr(bits, splat(INTS, 16)), ir.VectorType(INT16, LANES))


def _join(b: ir.IRBuilder, places: list[Any], width: int) -> Any:
    """A quarter of a vector from each of four places."""
    if width == _SIZE:
        return join_quarters(b, [load(b, place, _QUARTER) for place in places])
    kind, widened = (INT16, from_bfloat16) if width == 2 else (INT8, from_float8)
    return widened(b, join_quarters(b, [load(b, place, ir.VectorType(kind, CLASSES)) for place in places]))


def _load(b: ir.IRBuilder, place: Any, width: int) -> Any:
    if width == _SIZE:
        return load(b, place, FLOATS)
    kind, widened = (INT16, from_bfloat16) if width == 2 else (INT8, from_float8)
    return widened(b, load(b, place, ir.VectorType(kind, LANES)))


@njit(error_model="numpy")
def widen_chunk(like: Any, layer: Any, offsets: Any, first: int, head_dim: int, keys: Any, values: Any) -> None:
    """Keys and values at offsets of caches in 8 bits become rows of the type of `like`, from row `first` on, whose
    offsets they are then."""
    row_bytes = head_dim * like.itemsize
    for given, target in ((layer.key_cache, keys), (layer.value_cache, values)):
        widen_codes(like, given, offsets.ctypes.data, len(offsets), head_dim, target + first * row_bytes)
    for i in range(len(offsets)):
        offsets[i] = (first + i) * row_bytes


@njit(error_model="numpy")
def score_group(
    like: Any,
    group: int,
    query: int,
    query_row: int,
    keys: int,
    offsets: int,
    head_dim: int,
    scale: Any,
    scores: int,
    scores_row: int,
) -> None:
    """See `score`, for any number of heads."""
    if IS_WIDE:
        while group >= _HEADS:
            score(like, _HEADS, query, query_row, keys, offsets, head_dim, scale, scores, scores_row)
            query, scores, group = query + _HEADS * query_row, scores + _HEADS * scores_row, group - _HEADS
    while group > 0:
        if group >= 4:
            score(like, 4, query, query_row, keys, offsets, head_dim, scale, scores, scores_row)
        elif group == 3:
            score(like, 3, query, query_row, keys, offsets, head_dim, scale, scores, scores_row)
        elif group == 2:
            score(like, 2, query, query_row, keys, offsets, head_dim, scale, scores, scores_row)
        else:
            score(like, 1, query, query_row, keys, offsets, head_dim, scale, scores, scores_row)
        query, scores, group = query + _AT_ONCE * query_row, scores + _AT_ONCE * scores_row, group - _AT_ONCE


@njit(error_model="numpy")
def weigh_group(
    like: Any,
    ahead: int,
    classes: int,
    onto: int,
    group: int,
    head_dim: int,
    weights: int,
    weights_row: int,
    values: int,
    offsets: int,
    length: int,
    out: int,
    out_row: int,
) -> None:
    """See `weigh`, for any number of heads of any size that is a multiple of LANES."""
    behind, number, above = literally(ahead), literally(classes), literally(onto)
    while group > 0:
        d, vectors = 0, _OF_ONE if group == 1 else _OF_TWO if group == 2 else _OF_MORE
        while d < head_dim:
            v, o = values + d * like.itemsize, out + d * 4
            if head_dim - d < vectors * LANES:
                if group >= 4:
                    weigh(like, 4, 1, behind, number, above, weights, weights_row, v, offsets, length, o, out_row)
                else:
                    for head in range(group):
                        row, of_head = weights + head * weights_row, o + head * out_row
                        weigh(like, 1, 1, behind, number, above, row, weights_row, v, offsets, length, of_head, out_row)
                d += LANES
            else:
                if group >= 4:
                    weigh(
                        like, 4, _OF_MORE, behind, number, above, weights, weights_row, v, offsets, length, o, out_row
                    )
                elif group == 3:
                    weigh(
                        like, 3, _OF_MORE, behind, number, above, weights, weights_row, v, offsets, length, o, out_row
                    )
                elif group == 2:
                    weigh(like, 2, _OF_TWO, behind, number, above, weights, weights_row, v, offsets, length, o, out_row)
                else:
                    weigh(like, 1, _OF_ONE, behind, number, above, weights, weights_row, v, offsets, length, o, out_row)
                d += vectors * LANES
        weights, out, group = weights + _AT_ONCE * weights_row, out + _AT_ONCE * out_row, group - _AT_ONCE


@njit(error_model="numpy")
def to_weights(scores: int, count: int, softcap: Any) -> tuple[Any, Any]:
    """That many scores at an address become weights, not yet divided by their sum. Returns this sum and the highest
    score."""
    if softcap > 0:
        capped = carray(pointer(scores), (count,), np.float32)
        for i in range(count):
            capped[i] = softcap * np.float32(math.tanh(capped[i] / softcap))
    top: Any = largest(scores, count, np.float32(-np.inf))
    return soften(scores, count, top), top


@njit(error_model="numpy")
def merge(total: Any, top: Any, sums: Any, new_total: Any, new_top: Any, new: Any) -> tuple[Any, Any]:
    """Of a row of scores: the sum of the weights, the highest score, and sums of values [head_dim]; then the same of
    positions behind. `sums` become those of both; returns their sum of weights and highest score."""
    if new_total == 0:  # nothing was visible there: -infinity is no number from itself
        return total, top
    highest = max(top, new_top)
    old_share, new_share = np.float32(math.exp(top - highest)), np.float32(math.exp(new_top - highest))
    for d in range(len(sums)):
        sums[d] = sums[d] * old_share + new[d] * new_share
    return total * old_share + new_total * new_share, highest


@njit(error_model="numpy")
def divide(sums: Any, total: Any, value_scale: Any, out: Any) -> None:
    """`out` = value_scale * sums / total, in its type."""
    share = value_scale / total
    for d in range(len(sums)):
        out[d] = narrowed(sums[d] * share, out[d])
