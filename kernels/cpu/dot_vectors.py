# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to multiply rows of bfloat16 with packed weights by dot products of two numbers (see `dots`), as LLVM vectors:

    two numbers of a row of x, in all lanes    dot    two codes, or numbers, of each row of a panel    ->    sums

A sum is a lane, which is a row of the weight, and takes its products in one order, however many rows of x there are.
Everything works on addresses. Totals are [panel][row of x][row of the panel], panels PANEL_TOTALS apart; behind as many
rows of x as there are, they are of no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS
from .code_words import (
    WIDTH,
    add_middle,
    ahead_of,
    blocks_of,
    fetch,
    loop_over_pairs,
    scale_and_middle,
    tile_of,
    total_at,
    x_sum_at,
)
from .kv_prefetch import fetch_pieces
from .tile_product import STEP_BYTES, span_bytes
from .vectors import (
    FLOATS,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    at_most,
    by_least,
    dot_bfloat16,
    fma,
    from_bfloat16,
    load,
    load_repeated,
    loop_over,
    rows_at,
    splat,
    store,
    sum_lanes,
    take,
)

ROWS = 8  # of x at a time: their sums for WIDTH panels leave registers for what is multiplied
SUMMED = 4  # groups that are summed at once
BLOCK_BYTES = 2 * BLOCK  # of a row of x
_SPAN = span_bytes(0) // BLOCK_BYTES  # blocks whose numbers are summed up, before that is added to the total
_COUNTS = (1, 2, 4, 6, ROWS)  # of rows, that something is generated for
_ZEROS = splat(FLOATS, 0.0)


@intrinsic(prefer_literal=True)
def sum_groups(typing_context: Any, per_block: Any, x: Any, num_groups: Any, out: Any) -> Any:
    """Write the sum of each group of a row of x, float32, and anything behind the last one, up to SUMMED in all.
    `per_block`, a constant: 1 or 2."""
    group_bytes = BLOCK_BYTES // per_block.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, x, num_groups, out = arguments
        last = b.sub(num_groups, INT64(1))

        def lanes_of(k: Any) -> Any:
            existing = b.select(b.icmp_signed("<", k, last), k, last)
            group = load(b, b.add(x, b.mul(existing, INT64(group_bytes))), ir.VectorType(INT16, group_bytes // 2))
            parts = [from_bfloat16(b, take(b, group, range(i, i + LANES))) for i in range(0, group_bytes // 2, LANES)]
            return parts[0] if len(parts) == 1 else b.fadd(*parts)

        def step(k: Any, _state: list[Any]) -> list[Any]:
            totals = sum_lanes(b, [lanes_of(b.add(k, INT64(i))) for i in range(SUMMED)])
            store(b, totals, b.add(out, b.mul(k, INT64(4))))
            return []

        loop_over(b, num_groups, SUMMED, [], step)
        return context.get_dummy_value()

    return types.void(per_block, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def multiply_codes(
    typing_context: Any,
    packing: Any,
    panel: Any,
    panel_step: Any,
    num_blocks: Any,
    x: Any,
    x_row: Any,
    num_rows: Any,
    x_sums: Any,
    x_sums_row: Any,
    totals: Any,
    cursor: Any,
) -> Any:
    """totals = the products of `num_rows` rows of x, ROWS at most, which are `x_row` bytes apart, and WIDTH panels,
    `panel_step` bytes from one to the next. `x_sums`: what `sum_groups` writes, `x_sums_row` bytes from row to row,
    where least numbers are stored. `packing`, the name of one, is a constant; cursor: see `kv_prefetch`."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, panel, panel_step, num_blocks, x, x_row, num_rows, x_sums, x_sums_row, totals, cursor = arguments

        def of_rows(count: int) -> None:
            starts = rows_at(b, x, x_row, num_rows, count)
            sums_starts = rows_at(b, x_sums, x_sums_row, num_rows, count)

            def step(k: Any, _state: list[Any]) -> list[Any]:
                blocks = blocks_of(b, kind, panel, panel_step, k)
                places = [b.add(start, b.mul(k, INT64(BLOCK_BYTES))) for start in starts]
                ahead = ahead_of(b, kind, panel_step, num_blocks, k)
                for block in blocks:
                    fetch(b, kind, block, ahead)
                fetch_pieces(b, cursor, 1)

                for group in range(kind.num_groups):
                    add_group(k, blocks, places, group)
                return []

            def add_group(k: Any, blocks: Sequence[Any], places: Sequence[Any], group: int) -> None:
                def multiply(pair: Any, codes: list[Any], sums: list[Any]) -> list[Any]:
                    return _dots(b, places, pair, codes, sums)

                sums = loop_over_pairs(b, kind, blocks, [_ZEROS] * (count * WIDTH), multiply, group)
                is_first = b.icmp_signed("==", k, INT64(0)) if group == 0 else ir.Constant(ir.IntType(1), 0)
                ways = [scale_and_middle(b, kind, block, group) for block in blocks]
                number = b.add(b.mul(k, INT64(kind.num_groups)), INT64(group))
                for i, start in enumerate(sums_starts):
                    x_sum = x_sum_at(b, kind, b.add(start, b.mul(number, INT64(4))))
                    for j, (scale, middle) in enumerate(ways):
                        place = total_at(b, totals, i, j)
                        total = b.select(is_first, _ZEROS, load(b, place, FLOATS))
                        total = add_middle(b, total, middle, x_sum)
                        store(b, fma(b, sums[i * WIDTH + j], scale, total), place)

            loop_over(b, num_blocks, 1, [], step)

        by_least(b, num_rows, _COUNTS, of_rows)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 10), generate


@intrinsic(prefer_literal=True)
def multiply_unpacked(
    typing_context: Any,
    packing: Any,
    unpacked: Any,
    num_blocks: Any,
    x: Any,
    x_row: Any,
    num_rows: Any,
    totals: Any,
    following: Any,
    panel_step: Any,
    cursor: Any,
) -> Any:
    """Likewise, of ROWS rows at most and numbers, as `code_tiles.unpack` writes them, in the order of `many_rows`.
    `following`: the address of the panels that come next, which are fetched."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, unpacked, num_blocks, x, x_row, num_rows, totals, following, panel_step, cursor = arguments

        def of_rows(count: int) -> None:
            starts = rows_at(b, x, x_row, num_rows, count)

            def of_blocks(first: Any, _state: list[Any]) -> list[Any]:
                def step(i: Any, sums: list[Any]) -> list[Any]:
                    k = b.add(first, i)
                    places = [b.add(start, b.mul(k, INT64(BLOCK_BYTES))) for start in starts]
                    tiles = [tile_of(b, unpacked, k, j) for j in range(WIDTH)]
                    for block in blocks_of(b, kind, following, panel_step, k):
                        fetch(b, kind, block, ahead=INT64(0))
                    fetch_pieces(b, cursor, 1)

                    def multiply(pair: Any, sums: list[Any]) -> list[Any]:
                        numbers = [load(b, b.add(tile, b.mul(pair, INT64(STEP_BYTES))), INTS) for tile in tiles]
                        return _dots(b, places, pair, numbers, sums)

                    return loop_over(b, INT64(BLOCK // 2), 1, sums, multiply)

                size = at_most(b, b.sub(num_blocks, first), INT64(_SPAN))
                sums = loop_over(b, size, 1, [_ZEROS] * (count * WIDTH), step)
                is_first = b.icmp_signed("==", first, INT64(0))
                for number, each in enumerate(sums):
                    place = total_at(b, totals, *divmod(number, WIDTH))
                    store(b, b.fadd(b.select(is_first, _ZEROS, load(b, place, FLOATS)), each), place)
                return []

            loop_over(b, num_blocks, _SPAN, [], of_blocks)

        by_least(b, num_rows, _COUNTS, of_rows)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 9), generate


def _dots(b: ir.IRBuilder, starts: Sequence[Any], pair: Any, vectors: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
    """Add the products of a pair of numbers of each row of x, whose blocks start there. Sums are [row][panel]."""
    found = []
    for i, start in enumerate(starts):
        both = load_repeated(b, b.add(start, b.mul(pair, INT64(4))), INT32)
        found += [dot_bfloat16(b, both, vector, sums[i * WIDTH + j]) for j, vector in enumerate(vectors)]
    return found
