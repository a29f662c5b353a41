# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="untyped-decorator"
"""Rows of x in two digits to the base 256, or in one, for instructions that multiply bytes.

x is rounded to whole multiples of its row's largest / X_MAX, 15 bits and a sign, and that whole number is written as
high * 256 + low with digits of -128 .. 127. A product with int8 weights is then two products of bytes, whose sums are
whole numbers: no rounding, in whatever order they are added. With one digit, these are multiples of the largest / 127.

The instruction multiplies signed with unsigned bytes. Where rows of x are walked beside rows of a weight (`tiles`),
weights come as w + 128, and sums start from -128 * (what is added to them of x). A row lies in memory as `in_features`
high digits, as many low ones, and META_BYTES: the scale (float32, in the first 64 bytes), and for either digit the 16
numbers that its sums start from. Where x is turned (`turned_tiles`), its digits come as d + 128, for weights are then
multiplied as they are, and sums start from -128 * (the sum of a row of the weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import (
    BYTES,
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    fma,
    from_bfloat16,
    largest_lanes,
    load,
    loop_over,
    splat,
    store,
    sum_lanes,
)

X_MAX = 127 * 256 + 127  # the largest that two digits hold on both sides
MOST_DIGITS = 2
META_BYTES = 192


def unsigned(b: ir.IRBuilder, numbers: Any) -> Any:
    """int8 + 128, as unsigned bytes."""
    return b.xor(numbers, b.bitcast(splat(BYTES, -128), INTS))


def dot_int8(b: ir.IRBuilder, signed: Any, others: Any, sums: Any) -> Any:
    """Add to each lane the products of four signed bytes and four unsigned `others`."""
    return call(b, "llvm.x86.avx512.vpdpbusd.512", INTS, [sums, others, signed])


def times_128(b: ir.IRBuilder, signed: Any, sums: Any) -> Any:
    """Add to each lane four bytes, 128 times."""
    return dot_int8(b, signed, b.bitcast(splat(BYTES, -128), INTS), sums)


def scale_of(b: ir.IRBuilder, num_digits: int, row: Any, in_features: Any) -> Any:
    return load(b, b.add(row, b.mul(in_features, INT64(num_digits))), FLOAT)


def sums_start(b: ir.IRBuilder, num_digits: int, row: Any, in_features: Any, digit: int) -> Any:
    meta = b.add(row, b.mul(in_features, INT64(num_digits)))
    return load(b, b.add(meta, INT64(64 + 64 * digit)), INTS)


def join_digits(b: ir.IRBuilder, high: Any, *low: Any) -> Any:
    """The float32 of high * 256 + low, or of one digit alone, vectors of int32."""
    lanes = high.type.count
    floats = ir.VectorType(FLOAT, lanes)
    wide = b.sitofp(high, floats)
    for each in low:
        wide = call(b, f"llvm.fma.v{lanes}f32", floats, [wide, splat(floats, 256.0), b.sitofp(each, floats)])
    return wide


def rounding(b: ir.IRBuilder, blocks: Sequence[Sequence[Any]], least: float) -> tuple[Any, Any]:
    """By block of one vector of numbers, or two, that become whole ones of -127 to 127: what one is worth, which is not
    finite where a number is not, and about the inverse. `least`: what the largest is taken for where it is less."""
    bits = largest_bits(b, blocks)
    floats = ir.VectorType(FLOAT, bits.type.count)
    largest, at_least = b.bitcast(bits, floats), splat(floats, least)
    largest = b.select(b.fcmp_ordered("<", largest, at_least), at_least, largest)
    return b.fmul(largest, splat(floats, 1 / 127)), b.fdiv(splat(floats, 127.0), largest)


def largest_bits(b: ir.IRBuilder, blocks: Sequence[Sequence[Any]]) -> Any:
    """By block, the bits of its largest number without a sign."""
    sizes = [[b.and_(b.bitcast(each, INTS), splat(INTS, 0x7FFFFFFF)) for each in block] for block in blocks]
    return largest_lanes(
        b, [b.select(b.icmp_signed(">", *each), *each) if len(each) > 1 else each[0] for each in sizes]
    )


@intrinsic(prefer_literal=True)
def quantize_row(typing_context: Any, x_bytes: Any, num_digits: Any, x: Any, in_features: Any, out: Any) -> Any:
    """Write a row of x (4 bytes: float32, 2: bfloat16) as whole multiples of its largest / X_MAX, or / 127, in so many
    digits; both are constants.

    What is not finite makes the scale, and so every result of the row, NaN.
    """
    load_type = FLOATS if x_bytes.literal_value == 4 else ir.VectorType(INT16, LANES)
    count = num_digits.literal_value
    most = X_MAX if count > 1 else 127

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, x, in_features, out = arguments

        def values(k: Any) -> Any:
            loaded = load(b, b.add(x, b.mul(k, INT64(x_bytes.literal_value))), load_type)
            return loaded if load_type is FLOATS else from_bfloat16(b, loaded)

        def largest(k: Any, so_far: list[Any]) -> list[Any]:
            x = values(k)
            magnitude = call(b, "llvm.fabs.v16f32", FLOATS, [x])
            top = call(b, "llvm.maxnum.v16f32", FLOATS, [so_far[0], magnitude])
            return [top, fma(b, x, splat(FLOATS, 0.0), so_far[1])]

        tops, nothing = loop_over(b, in_features, LANES, [splat(FLOATS, 1e-30), splat(FLOATS, 0.0)], largest)
        top = call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, [tops])
        nan_or_zero = b.extract_element(sum_lanes(b, [nothing] * 4), INT32(0))
        scale = b.fdiv(top, ir.Constant(FLOAT, float(most)))
        inverse = broadcast(b, b.fdiv(ir.Constant(FLOAT, float(most)), top), LANES)

        def split(k: Any, _: list[Any]) -> list[Any]:
            nearest = call(b, "llvm.rint.v16f32", FLOATS, [b.fmul(values(k), inverse)])
            whole = b.fptosi(nearest, INTS)
            if count > 1:
                high = b.ashr(b.add(whole, splat(INTS, 128)), splat(INTS, 8))
                store(b, b.trunc(high, INT8S), b.add(out, k))
            last = b.add(out, b.mul(in_features, INT64(count - 1)))
            store(b, b.trunc(whole, INT8S), b.add(last, k))
            return []

        loop_over(b, in_features, LANES, [], split)
        meta = b.add(out, b.mul(in_features, INT64(count)))
        store(b, b.fadd(scale, nan_or_zero), meta)
        for digit in range(count):
            start = b.add(out, b.mul(in_features, INT64(digit)))

            def excess(k: Any, so_far: list[Any], start: Any = start) -> list[Any]:
                return [times_128(b, load(b, b.add(start, k), INTS), so_far[0])]

            (total,) = loop_over(b, in_features, 64, [splat(INTS, 0)], excess)
            store(b, b.sub(splat(INTS, 0), total), b.add(meta, INT64(64 + 64 * digit)))
        return _context.get_dummy_value()

    return types.void(x_bytes, num_digits, *[types.int64] * 3), generate


@intrinsic
def store_starts(typing_context: Any, num_rows: Any, weight: Any, in_features: Any, out: Any) -> Any:
    """For each of some rows of an int8 weight, a multiple of four, what its sums with digits + 128 start from."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        num_rows, weight, in_features, out = arguments

        def of_four(first: Any, _: list[Any]) -> list[Any]:
            rows = [b.add(weight, b.mul(in_features, b.add(first, INT64(i)))) for i in range(4)]

            def step(k: Any, totals: list[Any]) -> list[Any]:
                loaded = [load(b, b.add(row, k), INTS) for row in rows]
                return [times_128(b, numbers, total) for numbers, total in zip(loaded, totals, strict=True)]

            total = sum_lanes(b, loop_over(b, in_features, 64, [splat(INTS, 0)] * 4, step))
            store(b, b.sub(splat(total.type, 0), total), b.add(out, b.mul(first, INT64(4))))
            return []

        loop_over(b, num_rows, 4, [], of_four)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
