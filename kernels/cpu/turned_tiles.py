# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""Words to multiply tiles with, of 16 rows of a weight and 16 rows of x, for `many_rows`.

    A: 16 rows of the weight, as they lie    times    B: 16 rows of x, turned    ->    C: 16 x 16 sums

Words of 32 bits are what is turned: a float32, two bfloat16 or four int8, that one step of a sum takes together. The
name of an instruction says what multiplies: vectors (`vector_tiles`) or the CPU's matrix tiles (`matrix_tiles`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import matrix_tiles, vector_tiles
from .digits import join_digits
from .tile_product import STEP_BYTES, TILE, TILE_BYTES, Operands
from .vectors import FLOAT, FLOATS, INT64, INTS, LANES, broadcast, load, store, take, to_bfloat16

IN_VECTORS = "fma"


@intrinsic(prefer_literal=True)
def begin(typing_context: Any, instruction: Any, configuration: Any) -> Any:
    """Before the first product of this thread. Address of what `matrix_tiles.configuration` gives."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        if instruction.literal_value != IN_VECTORS:
            matrix_tiles.configure(b, arguments[1])
        return context.get_dummy_value()

    return types.void(instruction, types.int64), generate


@intrinsic(prefer_literal=True)
def end(typing_context: Any, instruction: Any) -> Any:
    """Behind the last product of this thread."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        if instruction.literal_value != IN_VECTORS:
            matrix_tiles.release(b)
        return context.get_dummy_value()

    return types.void(instruction), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing_context: Any,
    instruction: Any,
    num_a: Any,
    num_b: Any,
    a: Any,
    b_start: Any,
    row_bytes: Any,
    fetch: Any,
    fetch_lines: Any,
    sums: Any,
) -> Any:
    """`num_a` x `num_b` tiles of sums at `sums`, [A, B, weight row, row of x]. See `Operands`.

    These numbers, 1 or 2, and the instruction are constants.
    """
    name, m, n = instruction.literal_value, num_a.literal_value, num_b.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        operands = Operands(*arguments[3:])
        if name == IN_VECTORS:
            vector_tiles.multiply(b, m, n, operands)
        else:
            matrix_tiles.multiply(b, name, m, n, operands)
        return context.get_dummy_value()

    return types.void(instruction, num_a, num_b, *[types.int64] * 6), generate


@intrinsic
def turn_tile(typing_context: Any, source: Any, row_bytes: Any, last_row: Any, target: Any) -> Any:
    """16 rows of 16 words of 32 bits become columns: target[j][i] = source[min(i, last_row)][j]."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        source, row_bytes, last_row, target = arguments
        rows = []
        for i in range(TILE):
            row = b.select(b.icmp_signed("<", INT64(i), last_row), INT64(i), last_row)
            rows.append(load(b, b.add(source, b.mul(row, row_bytes)), INTS))
        for i, row in enumerate(_turned(b, rows)):
            store(b, row, b.add(target, INT64(i * STEP_BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    num_digits: Any,
    sums: Any,
    num_rows: Any,
    x_scales: Any,
    scales: Any,
    bias: Any,
    short: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store a tile of sums as `num_rows` rows of results for 16 columns, which `out_row` bytes are between.

    `num_digits` is a constant. For more than one, sums has a tile for each; x_scales (of the rows) and scales (of the
    columns) multiply. bias (float32) is added. `short`: results are rounded to bfloat16.
    """
    is_int8 = num_digits.literal_value > 1

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, sums, num_rows, x_scales, scales, bias, short, out, out_row = arguments
        places = [b.add(sums, INT64(STEP_BYTES * i)) for i in range(TILE)]
        if is_int8:
            lows = [load(b, b.add(place, INT64(TILE_BYTES)), INTS) for place in places]
            rows = [join_digits(b, load(b, place, INTS), low) for place, low in zip(places, lows, strict=True)]
        else:
            rows = [load(b, place, FLOATS) for place in places]
        added = load(b, bias, FLOATS)
        is_short = b.icmp_signed("!=", short, INT64(0))
        for i, row in enumerate(_turned(b, rows)):
            with b.if_then(b.icmp_signed("<", INT64(i), num_rows)):
                if is_int8:
                    x_scale = load(b, b.add(x_scales, INT64(4 * i)), FLOAT)
                    row = b.fmul(b.fmul(row, broadcast(b, x_scale, LANES)), load(b, scales, FLOATS))
                total, place = b.fadd(row, added), b.add(out, b.mul(out_row, INT64(i)))
                with b.if_else(is_short) as (half, full):
                    with half:
                        store(b, to_bfloat16(b, total), place)
                    with full:
                        store(b, total, place)
        return context.get_dummy_value()

    return types.void(num_digits, *[types.int64] * 8), generate


def _turned(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of 16 vectors: riffling the upper half of them into the lower one, as often as 16 has bits."""
    halves = [[i // 2 + LANES * (i % 2) + start for i in range(LANES)] for start in (0, LANES // 2)]
    for _ in range(4):
        pairs = [(rows[i], rows[i + TILE // 2]) for i in range(TILE // 2)]
        rows = [take(b, low, half, high) for low, high in pairs for half in halves]
    return rows
