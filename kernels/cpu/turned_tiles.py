# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""Words to multiply tiles with: of 16 rows of a weight and 16 rows of x, for `many_rows`; others for `prompt_tiles`.

    A: 16 rows of the weight, as they lie    times    B: 16 rows of x, turned    ->    C: 16 x 16 sums

Words of 32 bits are what is turned: a float32, two bfloat16 or four int8, that one step of a sum takes together. What
multiplies them has a name: of a format of `tiles`, in vectors (`vector_tiles`), or of an instruction for the CPU's
matrix tiles (`matrix_tiles`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import matrix_tiles, vector_tiles
from .digits import join_digits, unsigned
from .features import cpu_features, dots_are_fast
from .intrinsics import IS_X86
from .tile_product import STEP_BYTES, TILE, TILE_BYTES, Operands, words_by_class
from .tiles import FORMATS
from .vectors import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    by_value,
    from_bfloat16,
    load,
    load_repeated,
    store,
    take,
    to_bfloat16_pairs,
    turn_words,
)

_IN_VECTORS = {torch.float32: "float32", torch.bfloat16: "bfloat16 dot", torch.int8: "int8 dot"}


@cache
def products(dtype: torch.dtype) -> tuple[str, ...]:
    """What multiplies weights of a type on this CPU, the fastest first. "float32": those of any type become that.

    Elsewhere than on x86, only float32 is sure to have any.
    """
    tiles, vectors = matrix_tiles.INSTRUCTIONS.get(dtype), _IN_VECTORS[dtype]
    in_tiles = [tiles] if tiles is not None and matrix_tiles.are_available() else []
    needs = FORMATS[vectors].needs
    in_vectors = [vectors] if needs is None or needs in cpu_features() else []
    # Never beside what multiplies bytes, for that has another precision.
    if IS_X86 and (dtype == torch.bfloat16 or not [*in_tiles, *in_vectors]):
        in_vectors.insert(1 if dots_are_fast() else 0, "float32")
    return (*in_tiles, *in_vectors)


@intrinsic(prefer_literal=True)
def begin(typing_context: Any, product: Any, configuration: Any) -> Any:
    """Before the first product of this thread. Address of what `matrix_tiles.configuration` gives."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        if product.literal_value not in FORMATS:
            matrix_tiles.configure(b, arguments[1])
        return context.get_dummy_value()

    return types.void(product, types.int64), generate


@intrinsic(prefer_literal=True)
def end(typing_context: Any, product: Any) -> Any:
    """Behind the last product of this thread."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        if product.literal_value not in FORMATS:
            matrix_tiles.release(b)
        return context.get_dummy_value()

    return types.void(product), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing_context: Any,
    product: Any,
    run: Any,
    num_a: Any,
    num_b: Any,
    a: Any,
    a_row: Any,
    b_start: Any,
    goes_by: Any,
    row_bytes: Any,
    fetch: Any,
    fetch_lines: Any,
    sums: Any,
) -> Any:
    """`num_a` x `num_b` tiles, 1 or 2 of either, of sums at `sums`: [A, B, row of A, row of x]. See `Operands`.

    The name of the product and `run` are constants. `run` is how the words of B are ordered (see `words_by_class`): 0
    for what adds in an order of its own, which dots and matrix tiles do.
    """
    name = product.literal_value
    if (run.literal_value > 0) != (name in FORMATS and FORMATS[name].rows > 1):
        raise ValueError(f"{name} does not take its words in runs of {run.literal_value}")

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, num_a, num_b, *places = arguments
        operands = Operands(*places)

        def of_tiles(m: int, n: int) -> None:
            if name in FORMATS:
                vector_tiles.multiply(b, FORMATS[name], run.literal_value, m, n, operands)
            else:
                matrix_tiles.multiply(b, name, m, n, operands)

        by_value(b, num_a, (1, 2), lambda m: by_value(b, num_b, (1, 2), lambda n: of_tiles(m, n)))
        return context.get_dummy_value()

    return types.void(product, run, *[types.int64] * 10), generate


@intrinsic(prefer_literal=True)
def turn_tile(
    typing_context: Any,
    run: Any,
    is_bfloat16: Any,
    becomes_unsigned: Any,
    source: Any,
    row_bytes: Any,
    last_row: Any,
    target: Any,
    class_bytes: Any,
) -> Any:
    """16 rows of 16 words of 32 bits become columns: those of a class (see `words_by_class`) lie behind each other, and
    those of the next one `class_bytes` behind its first. Column j has source[min(i, last_row)][j] in row i.

    What comes before `source` are constants: bfloat16 become float32, and signed bytes may become unsigned.
    """

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        source, row_bytes, last_row, target, class_bytes = arguments[3:]
        rows = []
        for i in range(TILE):
            row = b.select(b.icmp_signed("<", INT64(i), last_row), INT64(i), last_row)
            place = b.add(source, b.mul(row, row_bytes))
            if is_bfloat16.literal_value:
                rows.append(from_bfloat16(b, load(b, place, ir.VectorType(INT16, LANES))))
            else:
                words = load(b, place, INTS)
                rows.append(unsigned(b, words) if becomes_unsigned.literal_value else words)
        columns = turn_words(b, rows)
        for i, words in enumerate(words_by_class(run.literal_value)):
            first = b.add(target, b.mul(class_bytes, INT64(i)))
            for place_of_word, word in enumerate(words):
                store(b, columns[word], b.add(first, INT64(STEP_BYTES * place_of_word)))
        return context.get_dummy_value()

    return types.void(run, is_bfloat16, becomes_unsigned, *[types.int64] * 5), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    product: Any,
    num_digits: Any,
    num_a: Any,
    sums: Any,
    a_sums: Any,
    num_rows: Any,
    x_scales: Any,
    scales: Any,
    starts: Any,
    bias: Any,
    short: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store the sums of one or two A as `num_rows` rows of results for 16 or 32 columns, which `out_row` bytes are
    between. The sums of the second A lie `a_sums` bytes behind those of the first.

    `product` and `num_digits` are constants. In digits (0: x has none) an A has a tile for each, whose products of
    vectors begin at `starts`, int32 for each of the columns, and x_scales, float32 for each of the rows, and scales
    multiply. bias is added; it and scales are float32, for each of the columns. `short`: results are bfloat16.
    """
    digits, in_vectors = num_digits.literal_value, product.literal_value in FORMATS

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, num_a, sums, a_sums, num_rows, x_scales, scales, starts, bias, short, out, out_row = arguments

        def of_tiles(count: int) -> None:
            columns = []
            for a in range(count):
                first, of_a = b.add(sums, b.mul(a_sums, INT64(a))), INT64(STEP_BYTES * a)
                own_starts = b.add(starts, of_a) if in_vectors else None
                columns += _results(b, digits, first, x_scales, b.add(scales, of_a), own_starts)
            columns = [b.fadd(column, load_repeated(b, bias, FLOAT, 4 * i)) for i, column in enumerate(columns)]
            with b.if_else(b.icmp_signed("!=", short, INT64(0))) as (half, full):
                with half:
                    pairs = zip(columns[::2], columns[1::2], strict=True)
                    rows = turn_words(b, [to_bfloat16_pairs(b, *pair) for pair in pairs])
                    if count == 1:
                        rows = [take(b, vector, range(i, i + LANES // 2)) for vector in rows for i in (0, LANES // 2)]
                    _store_rows(b, rows, num_rows, out, out_row)
                with full:
                    for a in range(count):
                        rows = turn_words(b, columns[TILE * a : TILE * (a + 1)])
                        _store_rows(b, rows, num_rows, b.add(out, INT64(STEP_BYTES * a)), out_row)

        by_value(b, num_a, (1, 2), of_tiles)
        return context.get_dummy_value()

    return types.void(product, num_digits, *[types.int64] * 11), generate


def _results(b: ir.IRBuilder, num_digits: int, sums: Any, x_scales: Any, scales: Any, starts: Any) -> list[Any]:
    """The 16 columns of an A, without their bias."""
    places = [b.add(sums, INT64(STEP_BYTES * i)) for i in range(TILE)]
    if num_digits == 0:
        return [load(b, place, FLOATS) for place in places]
    tiles = [[load(b, b.add(place, INT64(TILE_BYTES * i)), INTS) for place in places] for i in range(num_digits)]
    if starts is not None:
        begun = [load_repeated(b, starts, INT32, 4 * i) for i in range(TILE)]
        tiles = [[b.add(column, start) for column, start in zip(tile, begun, strict=True)] for tile in tiles]
    x_scale = load(b, x_scales, FLOATS)
    columns = [join_digits(b, *digits) for digits in zip(*tiles, strict=True)]
    return [b.fmul(b.fmul(column, x_scale), load_repeated(b, scales, FLOAT, 4 * i)) for i, column in enumerate(columns)]


def _store_rows(b: ir.IRBuilder, rows: list[Any], num_rows: Any, out: Any, out_row: Any) -> None:
    for i, row in enumerate(rows):
        with b.if_then(b.icmp_signed("<", INT64(i), num_rows)):
            store(b, row, b.add(out, b.mul(out_row, INT64(i))))
