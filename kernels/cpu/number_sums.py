# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""The product of many rows of bfloat16 with packed weights in matrix tiles (see `codes`): tiles multiply their numbers,
rounded to bfloat16, and hold the sums of all blocks.

    of_unpacked    A: rows of x, 32 numbers of each        B: numbers of 16 rows of the weight, turned
    of_packed      A: numbers of 16 rows of the weight     B: rows of x, turned

A row of the weight has but sixteen numbers in a block where codes have 4 bits: they are a table, and all of its codes
are looked up there at once, which makes a row of A. So where blocks are unpacked on the way, sums are turned in the
end. Both add the same products in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit

from ..packed import BLOCK, Packing
from .code_words import (
    FUSED,
    PANEL_TOTALS,
    SUMS,
    WIDTH,
    WORDS,
    Place,
    Step,
    blocks_of,
    codes_of,
    fetch,
    groups_of,
    look_up,
    ring_tile_of,
    scale_and_least,
    share_of,
    tile_of,
)
from .matrix_tiles import FIRST_A, FIRST_B, load_tile, load_tile_once, multiply_tile, store_tile, zero_tile
from .tile_product import STEP_BYTES, TILE, TILE_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT16,
    INT64,
    LANES,
    fma,
    load,
    load_repeated,
    loop_over,
    repeat_quarter,
    splat,
    store,
    take,
    to_bfloat16_by_instruction,
    turn_words,
)

_LINE = INT64(STEP_BYTES)
_EIGHT_WORDS = ir.VectorType(INT16, LANES // 2)
_SHIFTS = ir.Constant(WORDS, [4 * (i // 8) for i in range(2 * LANES)])  # to a row's codes in its eight words, repeated


def have_tables(packing: Packing, num_parts: int) -> bool:
    """Whether numbers are looked up, where `of_packed` multiplies them with x in so many parts."""
    assert packing.num_groups == 1, "a block's numbers come by one table for each row"
    return num_parts == 1 and packing.bits == 4


@njit(error_model="numpy")
def come_by_columns(looked_up: bool, num_groups: int) -> bool:
    """Whether so many groups of x do, of TILE rows each: those that `of_packed` multiplies. `looked_up`: of
    `have_tables`."""
    return looked_up and num_groups == FUSED


def lay_columns(b: ir.IRBuilder, rows: Sequence[Any], num_k: Any, out: Any, block: Any) -> None:
    """Generate: turn TILE rows of x, whose addresses are given, [block][pair of numbers][row][number of the pair].
    `block`: bytes from one to the next."""

    def step(k: Any, _state: list[Any]) -> list[Any]:
        start = b.mul(k, INT64(2))
        target = b.add(out, b.mul(block, b.sdiv(k, INT64(BLOCK))))
        for i, vector in enumerate(turn_words(b, [load(b, b.add(row, start), FLOATS) for row in rows])):
            store(b, vector, b.add(target, INT64(STEP_BYTES * i)))
        return []

    loop_over(b, num_k, BLOCK, [], step)


def of_unpacked(
    b: ir.IRBuilder, num_groups: int, place: Place, x_block: Any, beside: Callable[[Any], list[Step]]
) -> None:
    """Generate the product of that many groups of TILE rows of x with blocks that are unpacked. `x_block`: bytes from
    one block of a group to the next; `beside`: what is to be done while a block is multiplied."""
    groups = groups_of(b, place, x_block, num_groups)

    def step(k: Any, _state: list[Any]) -> list[Any]:
        for j in range(WIDTH):
            load_tile(b, FIRST_B + j, tile_of(b, place.unpacked, k, j), _LINE)
        for g, group in enumerate(groups):
            load_tile_once(b, FIRST_A + g, b.add(group, b.mul(x_block, k)), _LINE)
            for j in range(WIDTH):
                multiply_tile(b, "tdpbf16ps", g * WIDTH + j, FIRST_A + g, FIRST_B + j)
        for do in beside(k):
            do()
        return []

    for tile in range(num_groups * WIDTH):
        zero_tile(b, tile)
    loop_over(b, place.num_blocks, 1, [], step)
    for tile in range(num_groups * WIDTH):
        store_tile(b, tile, _total_of(b, place, tile))


def of_packed(b: ir.IRBuilder, packing: Packing, place: Place, x_block: Any) -> None:
    """Generate the product of FUSED groups of x that come by columns. While a block is multiplied, the next one is
    unpacked."""
    groups = groups_of(b, place, x_block, FUSED)
    num_tiles, last = FUSED * WIDTH, b.sub(place.num_blocks, INT64(1))

    def unpacking(k: Any) -> list[Step]:
        blocks = blocks_of(b, packing, place.panel, place.panel_step, k)
        shares = [b.add(place.scratch, INT64(SUMS + TILE_BYTES * j)) for j in range(WIDTH)]
        return [
            do
            for j, block in enumerate(blocks)
            for do in _unpack_steps(b, packing, block, shares[j], ring_tile_of(b, place, k, j))
        ]

    def multiply(k: Any, work: Sequence[Step]) -> None:
        for j in range(WIDTH):
            load_tile(b, FIRST_A + j, ring_tile_of(b, place, k, j), _LINE)
        for g, group in enumerate(groups):
            load_tile(b, FIRST_B + g, b.add(group, b.mul(x_block, k)), _LINE)
            for j in range(WIDTH):
                tile = g * WIDTH + j
                multiply_tile(b, "tdpbf16ps", tile, FIRST_A + j, FIRST_B + g)
                for do in share_of(work, tile, num_tiles):
                    do()

    def step(k: Any, _state: list[Any]) -> list[Any]:
        multiply(k, unpacking(b.add(k, INT64(1))))
        return []

    for tile in range(num_tiles):
        zero_tile(b, tile)
    for do in unpacking(INT64(0)):
        do()
    with b.if_then(b.icmp_signed(">", last, INT64(0))):
        loop_over(b, last, 1, [], step)
    multiply(last, [])
    for tile in range(num_tiles):
        store_tile(b, tile, _total_of(b, place, tile))
    for tile in range(num_tiles):
        lines = [b.add(_total_of(b, place, tile), INT64(STEP_BYTES * i)) for i in range(TILE)]
        for line, vector in zip(lines, turn_words(b, [load(b, line, FLOATS) for line in lines]), strict=True):
            store(b, vector, line)


def _total_of(b: ir.IRBuilder, place: Place, tile: int) -> Any:
    return b.add(place.totals, INT64(PANEL_TOTALS * (tile % WIDTH) + TILE_BYTES * (tile // WIDTH)))


def _unpack_steps(b: ir.IRBuilder, packing: Packing, block: Any, shares: Any, out: Any) -> list[Step]:
    """What writes the numbers of a block as a tile, [row of the panel][number], step by step. `shares`: memory for what
    belongs to each row."""
    codes = b.add(shares, INT64(2 * STEP_BYTES))
    values = ir.Constant(FLOATS, [float(value) for value in packing.table or range(16)])  # of codes

    def share() -> None:
        for i, numbers in enumerate(scale_and_least(b, packing, block)):
            store(b, numbers, b.add(shares, INT64(STEP_BYTES * i)))
        start = codes_of(b, packing, block)
        lines = [load(b, b.add(start, INT64(STEP_BYTES * i)), FLOATS) for i in range(4)]
        for i, line in enumerate(_turn_lines(b, lines)):
            store(b, line, b.add(codes, INT64(STEP_BYTES * i)))

    def numbers_of(row: int) -> Any:
        """The sixteen that it has."""
        starts = [b.add(shares, INT64(STEP_BYTES * i + 4 * row)) for i in (0, 1)]
        scale, least = (load_repeated(b, start, FLOAT) for start in starts)
        return fma(b, values, scale, least)

    def of_rows(first: int) -> None:
        """Two, whose numbers are one table. The fifth bit of a place in it says whose."""
        table = to_bfloat16_by_instruction(b, numbers_of(first), numbers_of(first + 1))
        for i, row in enumerate((first, first + 1)):
            start = b.add(codes, INT64(STEP_BYTES * (row % 4) + STEP_BYTES // 4 * (row // 4)))
            places = b.lshr(repeat_quarter(b, load(b, start, _EIGHT_WORDS)), _SHIFTS)
            places = b.or_(b.and_(places, splat(WORDS, 15)), splat(WORDS, 16 * i))
            store(b, look_up(b, table, places), b.add(out, INT64(STEP_BYTES * row)))

    return [partial(fetch, b, packing, block), share, *(partial(of_rows, first) for first in range(0, TILE, 2))]


def _turn_lines(b: ir.IRBuilder, lines: Sequence[Any]) -> list[Any]:
    """Four lines, with 32 bits of each of 16 rows, become vectors of all that four have: i of rows i, i + 4, ..."""

    def interleave(two: Sequence[Any], places: Sequence[int]) -> Any:
        return take(b, two[0], [quarter + place for quarter in range(0, LANES, 4) for place in places], two[1])

    turned = []
    for places in ((0, 16, 1, 17), (2, 18, 3, 19)):
        pairs = [interleave(lines[i : i + 2], places) for i in (0, 2)]
        turned += [interleave(pairs, half) for half in ((0, 1, 16, 17), (2, 3, 18, 19))]
    return turned
