# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, misc, no-untyped-call, untyped-decorator"
"""Tiles of a matrix product as LLVM vectors: some rows of x times some rows of a weight, walked along `in_features`.

    weight rows n .. n + N-1   times   x rows m .. m + M-1   ->   M * N sums

A sum is a vector register of 16 lanes, or a quarter of one, whose vector then holds a quarter of four rows of the
weight each. They are written as vectors because the compiler does not find them in loops over scalars. A `Format` says
what a vector of each operand holds and how they are multiplied. Whatever the tile, a sum takes its products in the same
order, so that a row's result does not depend on the rows that are computed with it.

Everything here works on addresses and runs on any CPU, except for the formats that say what they need of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic

from .digits import META_BYTES, MOST_DIGITS, dot_int8, join_digits, scale_of, sums_start, unsigned
from .features import FETCHES_IN_ORDER, IS_WIDE, cpu_features
from .tile_product import CLASSES, IN_A_ROW, STEP_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    add_quarters,
    at_most,
    broadcast,
    dot_bfloat16,
    fma,
    from_bfloat16,
    join_quarters,
    joined,
    load,
    loop_over,
    prefetch,
    repeat_quarter,
    splat,
    store,
    sum_lanes,
    take,
    to_bfloat16,
)

TILE_ROWS = 4  # of a weight: must divide `out_features`

# How a tile reads its rows of the weight: side by side, while what comes next is fetched into the second-level cache or
# into the first; or one after the other, as they lie in memory, where the CPU sees for itself what comes next, and may
# be asked for it.
FAR, NEAR, IN_ORDER = range(3)


@dataclass(frozen=True, slots=True)
class Format:
    """How one precision is multiplied."""

    step: int  # elements of a row of each operand that fill a vector of the weight; must divide `in_features`
    x_bytes: int  # of an element, in each part
    weight_bytes: int
    x_vector: ir.Type  # what belongs to a step, of a part of a row
    weight_vector: ir.Type  # likewise, of `rows` rows
    prepare: Callable[[ir.IRBuilder, Any], Any]  # a loaded vector of weights, once for all rows of x
    # (builder, x, prepared weights, sums) -> sums, where x is a vector, or a list of them for parts with one sum
    multiply: Callable[[ir.IRBuilder, Any, Any, Any], Any]
    largest: tuple[int, int]  # of its tiles: rows of x, rows of the weight
    of_eight: tuple[int, int]  # for eight rows of x, a common batch: of x, what divides them
    needs: str | None = None  # a feature of the CPU
    parts: int = 1  # that a row of x has become, one behind the other
    digits: int = 0  # that an element is written in (`digits`), where sums are of whole numbers: each is a part
    rows: int = 1  # of the weight that a vector holds: 1, or 4, for the order of `tile_product`
    # How the weight is read for very few rows of x; IN_ORDER only where `rows` is 1, and `digits` at most 1.
    of_few: int = FAR

    def beside(self, num_x: int) -> int:
        """The rows of the weight in a tile of so many rows of x."""
        for rows, beside in (self.largest, self.of_eight):
            if num_x == rows:
                return beside
        return self.largest[1] if self.rows > 1 or num_x > self.largest[0] else TILE_ROWS


def _widen_int8(b: ir.IRBuilder, weights: Any) -> Any:
    return b.sitofp(b.sext(weights, INTS), FLOATS)


def _widen_bfloat16(b: ir.IRBuilder, pairs: Any) -> tuple[Any, Any]:
    """The float32 of the even and of the odd elements: a bfloat16 is the upper half of a float32."""
    even, odd = b.shl(pairs, splat(INTS, 16)), b.and_(pairs, splat(INTS, -65536))
    return b.bitcast(even, FLOATS), b.bitcast(odd, FLOATS)


def _fma_bfloat16(b: ir.IRBuilder, x: list[Any], weights: tuple[Any, Any], sums: Any) -> Any:
    return fma(b, x[1], weights[1], fma(b, x[0], weights[0], sums))


def _same(_b: ir.IRBuilder, vector: Any) -> Any:
    return vector


# Sums leave registers for what is multiplied.
_WIDE = ((6, 4), (8, 2)) if IS_WIDE else ((2, 2), (2, 2))
_LONG = ((8, 2), (8, 2)) if IS_WIDE else ((2, 2), (2, 2))  # where a vector of weights becomes two
_QUARTERS = ((12, 8), (8, 8)) if IS_WIDE else ((6, 4), (4, 4))
_LONG_QUARTERS = ((12, 8), (8, 8)) if IS_WIDE else ((4, 4), (4, 4))
_TWO_DIGITS = ((4, 2), (4, 2))

FORMATS = {
    "float32": Format(16, 4, 4, FLOATS, FLOATS, _same, fma, *_QUARTERS, rows=4, of_few=NEAR),
    "bfloat16 dot": Format(32, 2, 2, INTS, INTS, _same, dot_bfloat16, *_WIDE, "avx512bf16", of_few=IN_ORDER),
    "bfloat16": Format(
        *(32, 2, 2, FLOATS, INTS, _widen_bfloat16, _fma_bfloat16, *_LONG_QUARTERS), parts=2, rows=4, of_few=NEAR
    ),
    "int8 dot": Format(64, 1, 1, INTS, INTS, unsigned, dot_int8, *_TWO_DIGITS, "avx512vnni", MOST_DIGITS, MOST_DIGITS),
    "int8 digit": Format(64, 1, 1, INTS, INTS, unsigned, dot_int8, *_WIDE, "avx512vnni", digits=1, of_few=IN_ORDER),
    "int8": Format(16, 4, 1, FLOATS, INT8S, _widen_int8, fma, *_LONG),
}


def best_format(*names: str) -> str:
    """The first of some formats whose instructions this CPU has."""
    return next(name for name in names if FORMATS[name].needs is None or FORMATS[name].needs in cpu_features())


@intrinsic
def widen_row(typing_context: Any, x: Any, in_features: Any, out: Any) -> Any:
    """Write a row of bfloat16 in two parts of float32: its even elements, then the odd ones."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        x, in_features, out = arguments
        part = b.mul(in_features, INT64(2))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            even, odd = _widen_bfloat16(b, load(b, b.add(x, k), INTS))
            store(b, even, b.add(out, k))
            store(b, odd, b.add(b.add(out, part), k))
            return []

        loop_over(b, part, 4 * LANES, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


class Places(NamedTuple):
    """What a tile is computed from, and where it goes: addresses and sizes, int64."""

    x: int  # the first of its elements, likewise below
    weight: int
    in_features: int
    fetch: int  # what is fetched into the caches on the way (IN_ORDER: for what lies at `weight`),
    fetch_shift: int  # as long as the tile's rows of the weight, or a half (1) or a quarter (2) of that
    scales: int  # of float32, multiply the columns; 0: none
    bias: int  # is added to the columns; 0: none
    out: int
    out_features: int
    out_bytes: int  # of an element of bias and results: 4 for float32, 2 for bfloat16


@intrinsic(prefer_literal=True)
def tile(typing_context: Any, format_name: Any, num_x: Any, num_weights: Any, reading: Any, places: Any) -> Any:
    """Compute `num_x` x `num_weights` results and store them. See `Places`; `reading`: FAR, NEAR or IN_ORDER. All but
    places are constants."""
    form, m, n = FORMATS[format_name.literal_value], num_x.literal_value, num_weights.literal_value
    level = 1 if reading.literal_value == NEAR else 2

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        values = [b.extract_value(arguments[4], i) for i in range(len(Places._fields))]
        x, weight, in_features, fetch, fetch_shift, scales, bias, out, out_features, out_bytes = values
        x_row = b.mul(in_features, INT64(form.x_bytes * form.parts))
        if form.digits > 0:
            x_row = b.add(x_row, INT64(META_BYTES))
        x_rows = [b.add(x, b.mul(x_row, INT64(i))) for i in range(m)]
        weight_row = b.mul(in_features, INT64(form.weight_bytes))
        weight_rows = [b.add(weight, b.mul(weight_row, INT64(j))) for j in range(n)]

        def fetch_lines(k: Any, step: int) -> None:
            """What belongs to elements k to k + step - 1."""
            distance = b.lshr(INT64(STEP_BYTES), fetch_shift)
            line = b.add(fetch, b.lshr(b.mul(k, INT64(n * form.weight_bytes)), fetch_shift))
            for _ in range(max(n * step * form.weight_bytes // STEP_BYTES, 1)):
                prefetch(b, line, level=level)
                line = b.add(line, distance)

        if reading.literal_value == IN_ORDER:
            ahead = b.sub(fetch, weight) if FETCHES_IN_ORDER else None
            results = _in_order(b, form, x_rows, weight_rows, in_features, ahead)
        else:
            multiply = _in_quarters if form.rows > 1 else _in_vectors
            results = multiply(b, form, x_rows, weight_rows, in_features, fetch_lines)
        for row, column, part in results:
            if form.digits > 0:
                scale = scale_of(b, form.digits, x_rows[row], in_features)
                part = b.fmul(part, broadcast(b, scale, part.type.count))
            offset = b.mul(INT64(column), out_bytes)
            part = _scale(b, part, scales, column)
            address = b.add(b.add(out, b.mul(b.mul(out_features, INT64(row)), out_bytes)), offset)
            _finish(b, part, bias, offset, address, out_bytes)
        return _context.get_dummy_value()

    return types.void(format_name, num_x, num_weights, reading, places), generate


def _in_vectors(
    b: ir.IRBuilder, form: Format, x_rows: list[Any], weight_rows: list[Any], in_features: Any, fetch: Any
) -> Iterator[tuple[int, int, Any]]:
    """Rows and first columns of results, and a vector of them. The lanes of a sum are added in a tree."""
    sums = _walk(b, form, x_rows, weight_rows, in_features, fetch)
    return _add_lanes(b, form, len(x_rows), len(weight_rows), sums)


def _in_order(
    b: ir.IRBuilder, form: Format, x_rows: list[Any], weight_rows: list[Any], in_features: Any, ahead: Any
) -> Iterator[tuple[int, int, Any]]:
    """Likewise, of two rows of the weight at least, which are walked one after the other; what lies `ahead` bytes
    further on is fetched, unless that is None.

    One instruction reads all of them, and one fetches: a CPU foresees by the instruction what it asks for next, and
    where each row has its own, it begins anew with each.
    """
    n = len(weight_rows)
    vector = INTS if form.digits > 0 else FLOATS
    memory = b.ptrtoint(alloca_once(b, ir.ArrayType(vector, len(x_rows) * n)), INT64)
    places = [b.add(memory, INT64(STEP_BYTES * i)) for i in range(len(x_rows) * n)]

    def walk_row(i: Any, _state: list[Any]) -> list[Any]:
        row = b.add(weight_rows[0], b.mul(i, b.sub(weight_rows[1], weight_rows[0])))

        def fetch(k: Any, _step: int) -> None:
            if ahead is not None:
                prefetch(b, b.add(b.add(row, ahead), b.mul(k, INT64(form.weight_bytes))), level=2)

        for place, total in zip(places[::n], _walk(b, form, x_rows, [row], in_features, fetch), strict=True):
            store(b, total, b.add(place, b.mul(i, INT64(STEP_BYTES))))
        return []

    loop_over(b, INT64(n), 1, [], walk_row, may_unroll=False)
    return _add_lanes(b, form, len(x_rows), n, [load(b, place, vector) for place in places])


def _walk(
    b: ir.IRBuilder, form: Format, x_rows: list[Any], weight_rows: list[Any], in_features: Any, fetch: Any
) -> list[Any]:
    """The sums, in the order [row of x][row of the weight][digit]. All rows are walked side by side."""

    def step(k: Any, sums: list[Any]) -> list[Any]:
        offset = b.mul(k, INT64(form.weight_bytes))
        fetch(k, form.step)
        weights = [form.prepare(b, load(b, b.add(row, offset), form.weight_vector)) for row in weight_rows]
        totals, added = iter(sums), []
        for row in x_rows:
            parts = [load(b, place, form.x_vector) for place in _parts(b, form, row, k, in_features)]
            added += [form.multiply(b, x, prepared, next(totals)) for prepared in weights for x in parts]
        return added

    digits = range(form.digits or 1)
    starts = [_sums_start(b, form, row, in_features, digit) for row in x_rows for _ in weight_rows for digit in digits]
    return loop_over(b, in_features, form.step, starts, step)


def _add_lanes(b: ir.IRBuilder, form: Format, m: int, n: int, sums: list[Any]) -> Iterator[tuple[int, int, Any]]:
    """Rows, first columns and results from the sums of `_walk`, of `m` rows of x and `n` of the weight."""
    for i in range(0, m * n, 4):
        count = form.digits or 1
        parts = [sum_lanes(b, sums[part::count][i : i + 4]) for part in range(count)]
        totals = join_digits(b, *parts) if form.digits > 0 else parts[0]
        for row in range(i // n, (i + 3) // n + 1):
            first = max(row * n - i, 0)
            yield row, 0, take(b, totals, range(first, min(first + n, 4)))


def _in_quarters(
    b: ir.IRBuilder, form: Format, x_rows: list[Any], weight_rows: list[Any], in_features: Any, fetch: Any
) -> Iterator[tuple[int, int, Any]]:
    """Likewise, of four rows of the weight that share a vector: the totals of its quarters are their results.

    The loop takes one vector of them at a time. Of several, LLVM would load all ahead, and run out of registers.
    """
    quarter_step = form.step // form.rows
    weight_quarter, x_quarter = (
        ir.VectorType(vector.element, vector.count // form.rows) for vector in (form.weight_vector, form.x_vector)
    )

    def chunk(first_k: Any, totals: list[Any]) -> list[Any]:
        def step(within: Any, sums: list[Any]) -> list[Any]:
            k = b.add(first_k, within)
            fetch(k, quarter_step)
            offset = b.mul(k, INT64(form.weight_bytes))
            quarters = [load(b, b.add(row, offset), weight_quarter) for row in weight_rows]
            fours = [join_quarters(b, quarters[i : i + form.rows]) for i in range(0, len(quarters), form.rows)]
            prepared, before, added = [form.prepare(b, four) for four in fours], iter(sums), []
            for row in x_rows:
                x = [repeat_quarter(b, load(b, part, x_quarter)) for part in _parts(b, form, row, k, in_features)]
                added += [form.multiply(b, x if form.parts > 1 else x[0], four, next(before)) for four in prepared]
            return added

        size = at_most(b, b.sub(in_features, first_k), INT64(CLASSES * IN_A_ROW))
        sums = loop_over(b, size, quarter_step, [splat(FLOATS, 0.0)] * len(totals), step)
        return [add_quarters(b, total, new) for total, new in zip(totals, sums, strict=True)]

    nothing = splat(ir.VectorType(FLOAT, form.rows), 0.0)
    count = len(weight_rows) // form.rows
    results = loop_over(b, in_features, CLASSES * IN_A_ROW, [nothing] * (len(x_rows) * count), chunk)
    for i, part in enumerate(results):
        yield i // count, i % count * form.rows, part


def _parts(b: ir.IRBuilder, form: Format, x_row: Any, k: Any, in_features: Any) -> list[Any]:
    """Where element `k` of a row of x is, in each of its parts."""
    address, part = b.add(x_row, b.mul(k, INT64(form.x_bytes))), b.mul(in_features, INT64(form.x_bytes))
    return [b.add(address, b.mul(part, INT64(p))) for p in range(form.parts)]


def _scale(b: ir.IRBuilder, part: Any, scales: Any, column: int) -> Any:
    with b.if_else(b.icmp_signed("!=", scales, INT64(0))) as (some, none):
        with some:
            scaled, some_block = b.fmul(part, load(b, b.add(scales, INT64(4 * column)), part.type)), b.block
        with none:
            none_block = b.block
    return joined(b, (scaled, some_block), (part, none_block))


def _finish(b: ir.IRBuilder, part: Any, bias: Any, offset: Any, out: Any, out_bytes: Any) -> None:
    """Add the bias and store the results, in float32 or rounded to bfloat16."""
    biased, bias = b.icmp_signed("!=", bias, INT64(0)), b.add(bias, offset)
    with b.if_else(b.icmp_signed("==", out_bytes, INT64(4))) as (full, half):
        with full:
            store(b, _add_bias(b, part, biased, lambda: load(b, bias, part.type)), out)
        with half:
            halves = ir.VectorType(INT16, part.type.count)
            total = _add_bias(b, part, biased, lambda: from_bfloat16(b, load(b, bias, halves)))
            store(b, to_bfloat16(b, total), out)


def _add_bias(b: ir.IRBuilder, part: Any, biased: Any, read: Callable[[], Any]) -> Any:
    before = b.block
    with b.if_then(biased):
        total, inside = b.fadd(part, read()), b.block
    return joined(b, (part, before), (total, inside))


def _sums_start(b: ir.IRBuilder, form: Format, row: Any, in_features: Any, digit: int) -> Any:
    return sums_start(b, form.digits, row, in_features, digit) if form.digits > 0 else splat(FLOATS, 0.0)
