# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, misc, untyped-decorator"
"""Tiles of a matrix product as LLVM vectors: some rows of x times some rows of a weight, walked along `in_features`.

    weight rows n .. n + N-1   times   x rows m .. m + M-1   ->   M * N sums, each a vector register of 16 lanes

They are written as vectors because the compiler does not find them in loops over scalars. A `Format` says what a vector
of each operand holds and how they are multiplied. Whatever the tile, a sum takes its products in the same order and its
lanes are added in the same tree, so that a row's result does not depend on the rows that are computed with it.

Everything here works on addresses and runs on any CPU, except for the formats that say what they need of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .digits import META_BYTES, NUM_DIGITS, dot_int8, join_digits, scale_of, sums_start, unsigned
from .features import IS_WIDE, cpu_features
from .vectors import (
    BFLOATS,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    from_bfloat16,
    joined,
    load,
    loop_over,
    prefetch,
    splat,
    store,
    sum_lanes,
    take,
    to_bfloat16,
)

TILE_ROWS = 4  # the most weight rows of a tile; they must divide `out_features`


@dataclass(frozen=True, slots=True)
class Format:
    """How one precision is multiplied. One step takes `step` elements of a row of each operand."""

    step: int
    x_bytes: int  # of an element, in each part
    weight_bytes: int
    x_vector: ir.Type  # what a step loads of a part of a row
    weight_vector: ir.Type
    prepare: Callable[[ir.IRBuilder, Any], Any]  # a loaded vector of weights, once for all rows of x
    # (builder, x, prepared weights, sums) -> sums, where x is a vector, or a list of them for parts of one digit
    multiply: Callable[[ir.IRBuilder, Any, Any, Any], Any]
    largest: tuple[int, int]  # of its tiles: rows of x, rows of the weight; fewer of x take more of the weight
    needs: str | None = None  # a feature of the CPU
    parts: int = 1  # that a row of x has become, one behind the other
    digits: int = 1  # numbers that an element is written in: each is a part and has sums of its own


def _fma(b: ir.IRBuilder, x: Any, weights: Any, sums: Any) -> Any:
    return call(b, "llvm.fma.v16f32", FLOATS, [x, weights, sums])


def _widen_int8(b: ir.IRBuilder, weights: Any) -> Any:
    return b.sitofp(b.sext(weights, INTS), FLOATS)


def _widen_bfloat16(b: ir.IRBuilder, pairs: Any) -> tuple[Any, Any]:
    """The float32 of the even and of the odd elements: a bfloat16 is the upper half of a float32."""
    even, odd = b.shl(pairs, splat(INTS, 16)), b.and_(pairs, splat(INTS, -65536))
    return b.bitcast(even, FLOATS), b.bitcast(odd, FLOATS)


def _fma_bfloat16(b: ir.IRBuilder, x: list[Any], weights: tuple[Any, Any], sums: Any) -> Any:
    return _fma(b, x[1], weights[1], _fma(b, x[0], weights[0], sums))


def _dot_bfloat16(b: ir.IRBuilder, x: Any, weights: Any, sums: Any) -> Any:
    operands = [b.bitcast(x, BFLOATS), b.bitcast(weights, BFLOATS)]
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [sums, *operands])


def _same(_b: ir.IRBuilder, vector: Any) -> Any:
    return vector


# Sums leave registers for what is multiplied.
_WIDE = (6, 4) if IS_WIDE else (2, 2)
_LONG = (8, 2) if IS_WIDE else (2, 2)  # where a vector of weights becomes two

FORMATS = {
    "float32": Format(16, 4, 4, FLOATS, FLOATS, _same, _fma, _WIDE),
    "bfloat16 dot": Format(32, 2, 2, INTS, INTS, _same, _dot_bfloat16, _WIDE, "avx512bf16"),
    "bfloat16": Format(32, 2, 2, FLOATS, INTS, _widen_bfloat16, _fma_bfloat16, _LONG, parts=2),
    "int8 dot": Format(64, 1, 1, INTS, INTS, unsigned, dot_int8, (4, 2), "avx512vnni", NUM_DIGITS, NUM_DIGITS),
    "int8": Format(16, 4, 1, FLOATS, INT8S, _widen_int8, _fma, _LONG),
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


@intrinsic(prefer_literal=True)
def tile(
    typing_context: Any,
    format_name: Any,
    num_x: Any,
    num_weights: Any,
    x: Any,
    weight: Any,
    in_features: Any,
    fetch: Any,
    odd: Any,
    pair: Any,
    scales: Any,
    bias: Any,
    out: Any,
    out_features: Any,
    out_bytes: Any,
) -> Any:
    """Compute `num_x` x `num_weights` results (constants, like the format) and store them at `out`.

    Addresses: of the first elements of the operands and results. On the way, as many rows of weights are fetched as the
    tile has: at `fetch` and, so many bytes behind, `odd`, `pair` and their sum, which may all be the same row. `scales`
    (0: none, of float32) multiply and `bias` (0: none) is added to the columns; it and the results have `out_bytes` per
    element: 4 for float32, 2 for bfloat16.
    """
    form, m, n = FORMATS[format_name.literal_value], num_x.literal_value, num_weights.literal_value

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        x, weight, in_features, fetch, odd, pair, scales, bias, out, out_features, out_bytes = arguments[3:]
        x_row = b.mul(in_features, INT64(form.x_bytes * form.parts))
        if form.digits > 1:
            x_row = b.add(x_row, INT64(META_BYTES))
        x_rows = [b.add(x, b.mul(x_row, INT64(i))) for i in range(m)]
        fetched = [b.add(start, by) for start in (fetch, b.add(fetch, pair)) for by in (INT64(0), odd)]
        sums = _walk(b, form, x_rows, weight, n, in_features, fetched)
        for i in range(0, m * n, 4):
            digits = [sum_lanes(b, sums[d :: form.digits][i : i + 4]) for d in range(form.digits)]
            totals = digits[0] if form.digits == 1 else join_digits(b, *digits)
            for row in range(i // n, (i + 3) // n + 1):
                first = max(row * n - i, 0)
                part = take(b, totals, range(first, min(first + n, 4)))
                if form.digits > 1:
                    part = b.fmul(part, broadcast(b, scale_of(b, x_rows[row], in_features), n))
                part = _scale(b, part, scales)
                address = b.add(out, b.mul(b.mul(out_features, INT64(row)), out_bytes))
                _finish(b, part, bias, address, out_bytes)
        return _context.get_dummy_value()

    arguments = (format_name, num_x, num_weights, *[types.int64] * 11)
    return types.void(*arguments), generate


def _walk(
    b: ir.IRBuilder,
    form: Format,
    x_rows: list[Any],
    weight: Any,
    num_weights: int,
    in_features: Any,
    fetched: list[Any],
) -> list[Any]:
    """The sums of each row of x with each of the weight, [x row][weight row][digit]."""
    weight_row = b.mul(in_features, INT64(form.weight_bytes))
    weight_rows = [b.add(weight, b.mul(weight_row, INT64(j))) for j in range(num_weights)]
    starts = [[_sums_start(b, form, row, in_features, digit) for digit in range(form.digits)] for row in x_rows]
    before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(loop)

    b.position_at_end(loop)
    k = b.phi(INT64)
    k.add_incoming(INT64(0), before)
    sums = [[[b.phi(start.type) for start in row] for _ in weight_rows] for row in starts]
    weights = []
    for start in fetched[:num_weights]:
        prefetch(b, b.add(start, b.mul(k, INT64(form.weight_bytes))))
    for row in weight_rows:
        address = b.add(row, b.mul(k, INT64(form.weight_bytes)))
        weights.append(form.prepare(b, load(b, address, form.weight_vector)))
    added: list[Any] = []
    for row, row_sums in zip(x_rows, sums, strict=True):
        address = b.add(row, b.mul(k, INT64(form.x_bytes)))
        part = b.mul(in_features, INT64(form.x_bytes))
        parts = [load(b, b.add(address, b.mul(part, INT64(p))), form.x_vector) for p in range(form.parts)]
        factors = parts if form.digits == form.parts else [parts]
        for prepared, totals in zip(weights, row_sums, strict=True):
            added.extend(form.multiply(b, x, prepared, total) for x, total in zip(factors, totals, strict=True))
    next_k = b.add(k, INT64(form.step))
    k.add_incoming(next_k, loop)
    flat = [total for row in sums for totals in row for total in totals]
    initial = [start for row in starts for _ in weight_rows for start in row]
    for total, new, start in zip(flat, added, initial, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(new, loop)
    b.cbranch(b.icmp_signed("<", next_k, in_features), loop, after)
    b.position_at_end(after)
    return added


def _scale(b: ir.IRBuilder, part: Any, scales: Any) -> Any:
    with b.if_else(b.icmp_signed("!=", scales, INT64(0))) as (some, none):
        with some:
            scaled, some_block = b.fmul(part, load(b, scales, part.type)), b.block
        with none:
            none_block = b.block
    return joined(b, (scaled, some_block), (part, none_block))


def _finish(b: ir.IRBuilder, part: Any, bias: Any, out: Any, out_bytes: Any) -> None:
    """Add the bias and store the results, in float32 or rounded to bfloat16."""
    biased = b.icmp_signed("!=", bias, INT64(0))
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
    return splat(FLOATS, 0.0) if form.digits == 1 else sums_start(b, row, in_features, digit)
