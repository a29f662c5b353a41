# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""Words to multiply tiles with: of 16 rows of a weight and 16 rows of x, for `many_rows`; others for `prompt_tiles`.

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
from .vectors import FLOAT, FLOATS, INT64, INTS, LANES, broadcast, load, store, take, to_bfloat16_pairs, turn_words

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
    a_row: Any,
    b_start: Any,
    b_once: Any,
    row_bytes: Any,
    fetch: Any,
    fetch_lines: Any,
    sums: Any,
) -> Any:
    """`num_a` x `num_b` tiles of sums at `sums`, [A, B, row of A, row of x]. See `Operands`.

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

    return types.void(instruction, num_a, num_b, *[types.int64] * 8), generate


@intrinsic
def turn_tile(typing_context: Any, source: Any, row_bytes: Any, last_row: Any, target: Any) -> Any:
    """16 rows of 16 words of 32 bits become columns: target[j][i] = source[min(i, last_row)][j]."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        source, row_bytes, last_row, target = arguments
        rows = []
        for i in range(TILE):
            row = b.select(b.icmp_signed("<", INT64(i), last_row), INT64(i), last_row)
            rows.append(load(b, b.add(source, b.mul(row, row_bytes)), INTS))
        for i, row in enumerate(turn_words(b, rows)):
            store(b, row, b.add(target, INT64(i * STEP_BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    instruction: Any,
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

    `instruction` and `num_digits` are constants. For more than one, sums has a tile for each; x_scales (of the rows)
    and scales (of the columns) multiply. bias (float32) is added. `short`: results are rounded to bfloat16, never those
    of IN_VECTORS.
    """
    is_int8 = num_digits.literal_value > 1

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, sums, num_rows, x_scales, scales, bias, short, out, out_row = arguments
        places = [b.add(sums, INT64(STEP_BYTES * i)) for i in range(TILE)]
        if is_int8:
            lows = [load(b, b.add(place, INT64(TILE_BYTES)), INTS) for place in places]
            columns = [join_digits(b, load(b, place, INTS), low) for place, low in zip(places, lows, strict=True)]
            x_scale = load(b, x_scales, FLOATS)
            columns = [b.fmul(b.fmul(column, x_scale), _number(b, scales, i)) for i, column in enumerate(columns)]
        else:
            columns = [load(b, place, FLOATS) for place in places]
        columns = [b.fadd(column, _number(b, bias, i)) for i, column in enumerate(columns)]
        if instruction.literal_value == IN_VECTORS:
            _store_rows(b, turn_words(b, columns), num_rows, out, out_row)
            return context.get_dummy_value()
        with b.if_else(b.icmp_signed("!=", short, INT64(0))) as (half, full):
            with half:
                pairs = zip(columns[::2], columns[1::2], strict=True)
                words = turn_words(b, [to_bfloat16_pairs(b, *pair) for pair in pairs])
                rows = [take(b, vector, range(i, i + LANES // 2)) for vector in words for i in (0, LANES // 2)]
                _store_rows(b, rows, num_rows, out, out_row)
            with full:
                _store_rows(b, turn_words(b, columns), num_rows, out, out_row)
        return context.get_dummy_value()

    return types.void(instruction, num_digits, *[types.int64] * 8), generate


def _number(b: ir.IRBuilder, numbers: Any, i: int) -> Any:
    return broadcast(b, load(b, b.add(numbers, INT64(4 * i)), FLOAT), LANES)


def _store_rows(b: ir.IRBuilder, rows: list[Any], num_rows: Any, out: Any, out_row: Any) -> None:
    for i, row in enumerate(rows):
        with b.if_then(b.icmp_signed("<", INT64(i), num_rows)):
            store(b, row, b.add(out, b.mul(out_row, INT64(i))))
