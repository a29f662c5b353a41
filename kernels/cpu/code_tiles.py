# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to multiply packed weights with in matrix tiles: their codes (`code_sums`), or their numbers, with many rows
of bfloat16 (`number_sums`). `codes` says which.

Everything works on addresses, and but for `unpack` is for tile registers as `matrix_tiles.describe` has them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS
from . import code_sums, number_sums
from .code_results import Form, ResultRows
from .code_words import FUSED, WORDS, Place, blocks_of, tile_of, unpack_steps
from .tile_product import STEP_BYTES, TILE
from .vectors import (
    FLOATS,
    INT64,
    LANES,
    by_value,
    from_bfloat16,
    load,
    loop_over,
    rows_at,
    splat,
    store,
    sum_lanes,
    take,
    to_bfloat16_by_instruction,
)


@njit(error_model="numpy")
def block_bytes(num_parts: int, num_rows: int) -> int:
    """What a block of a group of so many rows of x takes."""
    return num_parts * num_rows * STEP_BYTES + STEP_BYTES


@intrinsic(prefer_literal=True)
def split_row(
    typing_context: Any, num_parts: Any, x: Any, num_k: Any, out: Any, block: Any, part: Any, row: Any
) -> Any:
    """Write a row of x as parts of bfloat16, and the sum of each block of it.

    `num_parts`, a constant: 3 of float32, which sum up to it (see `codes`), or 1 of bfloat16. `block` and `part` are
    the bytes from one to the next at `out`, the row's own place in the first; the sum of row number `row` is behind the
    parts.
    """
    count = num_parts.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, x, num_k, out, block, part, row = arguments
        sums = b.add(b.sub(b.mul(part, INT64(count)), b.mul(row, INT64(STEP_BYTES))), b.mul(row, INT64(4)))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            place = b.add(out, b.mul(b.sdiv(k, INT64(BLOCK)), block))
            if count == 1:
                both = load(b, b.add(x, b.mul(k, INT64(2))), WORDS)
                store(b, both, place)
                halves = [from_bfloat16(b, take(b, both, range(i, i + LANES))) for i in (0, LANES)]
            else:
                start = b.add(x, b.mul(k, INT64(4)))
                halves = [load(b, b.add(start, INT64(4 * i)), FLOATS) for i in (0, LANES)]
                rest = halves
                for i in range(count):
                    both = to_bfloat16_by_instruction(b, *rest)
                    store(b, both, b.add(place, b.mul(part, INT64(i))))
                    rest = [
                        _without(b, each, from_bfloat16(b, take(b, both, range(first, first + LANES))))
                        for each, first in zip(rest, (0, LANES), strict=True)
                    ]
            total = sum_lanes(b, [b.fadd(*halves), *[splat(FLOATS, 0.0)] * 3])
            store(b, b.extract_element(total, ir.Constant(ir.IntType(32), 0)), b.add(place, sums))
            return []

        loop_over(b, num_k, BLOCK, [], step)
        return context.get_dummy_value()

    return types.void(num_parts, *[types.int64] * 6), generate


def _without(b: ir.IRBuilder, numbers: Any, part: Any) -> Any:
    """The rest of numbers; none where they or their part are not finite."""
    rest = b.fsub(numbers, part)
    nothing = splat(FLOATS, 0.0)
    return b.select(b.fcmp_ordered("oeq", b.fsub(rest, rest), nothing), rest, nothing)


@intrinsic
def lay_columns(typing_context: Any, x: Any, x_row: Any, num_existing: Any, num_k: Any, out: Any, block: Any) -> Any:
    """Write TILE rows of x, bfloat16, which are `x_row` bytes apart, as `number_sums` takes columns. Behind the
    `num_existing`, the last one is written again. `block`: bytes from one to the next."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        x, x_row, num_existing, num_k, out, block = arguments
        number_sums.lay_columns(b, rows_at(b, x, x_row, num_existing, TILE), num_k, out, block)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic(prefer_literal=True)
def unpack(
    typing_context: Any, packing: Any, num_parts: Any, panel: Any, panel_step: Any, num_blocks: Any, out: Any
) -> Any:
    """Write the codes of WIDTH panels, `panel_step` bytes from one to the next, as tiles of bfloat16, [block][panel];
    or, for x in one part, their numbers, rounded. `packing`, the name of one, and `num_parts` are constants."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, panel_step, num_blocks, out = arguments

        def step(k: Any, _state: list[Any]) -> list[Any]:
            for j, block in enumerate(blocks_of(b, kind, panel, panel_step, k)):
                for do in unpack_steps(b, kind, block, tile_of(b, out, k, j), as_numbers=num_parts.literal_value == 1):
                    do()
            return []

        loop_over(b, num_blocks, 1, [], step)
        return context.get_dummy_value()

    return types.void(packing, num_parts, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing_context: Any,
    packing: Any,
    num_parts: Any,
    num_groups: Any,
    num_rows: Any,
    panel: Any,
    panel_step: Any,
    num_blocks: Any,
    x: Any,
    scratch: Any,
    totals: Any,
) -> Any:
    """totals [panel][row of x][row of the panel] = the products of one or two groups of `num_rows` rows of x and WIDTH
    panels, `panel_step` bytes from one to the next, each block of which is unpacked before it is multiplied.

    Groups that come by columns have TILE rows. The first two are constants; `scratch`: SCRATCH_BYTES.
    """
    kind, parts = PACKINGS[packing.literal_value], num_parts.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, num_groups, num_rows, panel, panel_step, num_blocks, x, scratch, totals = arguments
        place = Place(panel, panel_step, num_blocks, INT64(0), x, scratch, totals)

        def of_groups(m: int) -> None:
            if number_sums.come_by_columns.py_func(number_sums.have_tables(kind, parts), m):
                number_sums.of_packed(b, kind, place, INT64(block_bytes.py_func(parts, TILE)))
                return
            with b.if_else(b.icmp_signed("==", num_rows, INT64(TILE))) as (full, fewer):
                with full:
                    code_sums.multiply(b, kind, parts, m, place, INT64(TILE), is_fused=True)
                with fewer:
                    code_sums.multiply(b, kind, parts, m, place, num_rows, is_fused=True)

        by_value(b, num_groups, (1, FUSED), of_groups)
        return context.get_dummy_value()

    return types.void(packing, num_parts, *[types.int64] * 8), generate


@intrinsic(prefer_literal=True)
def multiply_unpacked(
    typing_context: Any,
    packing: Any,
    num_parts: Any,
    activation: Any,
    short: Any,
    bias_short: Any,
    num_groups: Any,
    panel: Any,
    panel_step: Any,
    num_blocks: Any,
    unpacked: Any,
    x: Any,
    scratch: Any,
    totals: Any,
    rows: Any,
) -> Any:
    """Likewise, of groups of TILE rows, with what `unpack` wrote of the panels. Meanwhile, or before where codes are
    multiplied, rows of results are stored whose totals are elsewhere: see `code_results.finish`. The first five are
    constants."""
    kind, parts = PACKINGS[packing.literal_value], num_parts.literal_value
    form = Form(activation.literal_value, short.literal_value, bias_short.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        num_groups, panel, panel_step, num_blocks, unpacked, x, scratch, totals, rows = arguments[5:]
        place = Place(panel, panel_step, num_blocks, unpacked, x, scratch, totals)
        results, x_block = ResultRows(b, form, rows), INT64(block_bytes.py_func(parts, TILE))
        if parts > 1:
            results.all()  # between blocks there is no time for them: sums are added there

        def of_groups(m: int) -> None:
            if parts == 1:
                number_sums.of_unpacked(b, m, place, x_block, results.in_shares(num_blocks))
            else:
                code_sums.multiply(b, kind, parts, m, place, INT64(TILE), is_fused=False)

        by_value(b, num_groups, (1, FUSED), of_groups)
        return context.get_dummy_value()

    return types.void(packing, num_parts, activation, short, bias_short, *[types.int64] * 9), generate
