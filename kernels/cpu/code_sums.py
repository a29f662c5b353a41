# mypy: disable-error-code="no-untyped-call"
"""The product of x with codes in matrix tiles (see `codes`):

    A: a part of some rows of x, 32 numbers of each    times    B: codes of 16 rows    ->    C: 16 sums a row of x

    total += scale * C + middle * (sum of the 32 numbers of x)

Codes are taken for `packing.zero` less than they are, so that `middle`, where least numbers are stored, is what that
code means.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from ..packed import Packing
from .code_words import (
    FUSED,
    PANEL_TOTALS,
    SUMS,
    WIDTH,
    Place,
    Step,
    add_middle,
    blocks_of,
    groups_of,
    ring_tile_of,
    scale_and_middle,
    share_of,
    tile_of,
    unpack_steps,
    x_sum_at,
)
from .matrix_tiles import FIRST_A, FIRST_B, load_tile, load_tile_once, multiply_tile, store_tile, zero_tile
from .tile_product import STEP_BYTES, TILE_BYTES
from .vectors import FLOATS, INT64, fma, load, loop_over, splat, store


def multiply(
    b: ir.IRBuilder, packing: Packing, num_parts: int, num_groups: int, place: Place, num_rows: Any, *, is_fused: bool
) -> None:
    """Generate it, for that many groups of `num_rows` rows of x in `num_parts`; rows are an LLVM value, which may be a
    constant. While a block is multiplied, the sums of the one before it are added, and where it `is_fused`, the next
    one is unpacked."""
    _Product(b, packing, num_parts, num_groups, place, num_rows, is_fused).run()


class _Product:
    def __init__(
        self,
        b: ir.IRBuilder,
        packing: Packing,
        num_parts: int,
        num_groups: int,
        place: Place,
        num_rows: Any,
        is_fused: bool,
    ) -> None:
        self._b, self._packing, self._num_parts, self._is_fused = b, packing, num_parts, is_fused
        self._num_rows, self._place = num_rows, place
        self._num_tiles = num_groups * WIDTH
        # Bytes of a part of a block of a group, which its totals of a panel have, too; and of all parts and their sums.
        self._part = b.mul(num_rows, INT64(STEP_BYTES))
        self._x_block = b.add(b.mul(self._part, INT64(self._num_parts)), INT64(STEP_BYTES))
        self._groups = groups_of(b, place, self._x_block, num_groups)

    def run(self) -> None:
        b = self._b
        last = b.sub(self._place.num_blocks, INT64(1))

        def clear(offset: Any, _state: list[Any]) -> list[Any]:
            for j in range(WIDTH):
                store(b, splat(FLOATS, 0.0), b.add(self._place.totals, b.add(offset, INT64(PANEL_TOTALS * j))))
            return []

        def step(before: Any, _state: list[Any]) -> list[Any]:
            k = b.add(before, INT64(1))
            self._sum(k, [*self._unpacking(b.add(k, INT64(1))), *self._adding(before)])
            return []

        loop_over(b, b.mul(self._part, INT64(len(self._groups))), STEP_BYTES, [], clear)
        for do in self._unpacking(INT64(0)):
            do()
        self._sum(INT64(0), self._unpacking(INT64(1)))
        with b.if_then(b.icmp_signed(">", last, INT64(0))):
            loop_over(b, last, 1, [], step)
        for do in self._adding(last):
            do()

    def _sum(self, k: Any, work: Sequence[Step]) -> None:
        """Multiply block `k`, with some work in between, and store its sums."""
        b, line = self._b, INT64(STEP_BYTES)
        for tile in range(self._num_tiles):
            zero_tile(b, tile)
        for j in range(WIDTH):
            load_tile(b, FIRST_B + j, self._codes_of(k, j), line)
        num_products = self._num_parts * self._num_tiles
        load_x = load_tile if self._is_fused else load_tile_once
        done = 0
        for i in reversed(range(self._num_parts)):  # the smallest first
            for g, group in enumerate(self._groups):
                offset = b.add(b.mul(self._x_block, k), b.mul(self._part, INT64(i)))
                load_x(b, FIRST_A + g, b.add(group, offset), line)
                for j in range(WIDTH):
                    multiply_tile(b, "tdpbf16ps", g * WIDTH + j, FIRST_A + g, FIRST_B + j)
                    for do in share_of(work, done, num_products):
                        do()
                    done += 1
        for tile in range(self._num_tiles):
            store_tile(b, tile, self._sums_of(k, tile))

    def _unpacking(self, k: Any) -> list[Step]:
        """Of block `k`, or behind the last one of that once more. None if all are there."""
        if not self._is_fused:
            return []
        b, place = self._b, self._place
        existing = b.select(b.icmp_signed("<", k, place.num_blocks), k, b.sub(place.num_blocks, INT64(1)))
        work = []
        for j, block in enumerate(blocks_of(b, self._packing, place.panel, place.panel_step, existing)):
            work += unpack_steps(b, self._packing, block, self._codes_of(k, j), as_numbers=False)
        return work

    def _adding(self, k: Any) -> list[Step]:
        """To the totals, the sums of block `k` times its scales: steps."""
        b, place = self._b, self._place
        blocks = blocks_of(b, self._packing, place.panel, place.panel_step, k)
        ways = [scale_and_middle(b, self._packing, block) for block in blocks]
        behind = b.add(b.mul(self._x_block, k), b.mul(self._part, INT64(self._num_parts)))

        def of_row(r: Any) -> None:
            row = b.mul(r, INT64(STEP_BYTES))
            for g, group in enumerate(self._groups):
                x_sum = x_sum_at(b, self._packing, b.add(b.add(group, behind), b.mul(r, INT64(4))))
                for j, (scale, middle) in enumerate(ways):
                    tile = g * WIDTH + j
                    group_totals = b.add(place.totals, b.mul(self._part, INT64(g)))
                    total_place = b.add(group_totals, b.add(row, INT64(PANEL_TOTALS * j)))
                    total = add_middle(b, load(b, total_place, FLOATS), middle, x_sum)
                    sums = load(b, b.add(self._sums_of(k, tile), row), FLOATS)
                    store(b, fma(b, sums, scale, total), total_place)

        def of_rows() -> None:
            def step(r: Any, _state: list[Any]) -> list[Any]:
                of_row(r)
                return []

            loop_over(b, self._num_rows, 1, [], step)

        if isinstance(self._num_rows, ir.Constant):
            return [partial(of_row, INT64(r)) for r in range(self._num_rows.constant)]
        return [of_rows]

    def _codes_of(self, k: Any, j: int) -> Any:
        b = self._b
        if self._is_fused:
            return ring_tile_of(b, self._place, k, j)
        return tile_of(b, self._place.unpacked, k, j)

    def _sums_of(self, k: Any, tile: int) -> Any:
        b = self._b
        number = b.add(b.mul(b.and_(k, INT64(1)), INT64(FUSED * WIDTH)), INT64(tile))
        return b.add(b.add(self._place.scratch, INT64(SUMS)), b.mul(number, INT64(TILE_BYTES)))
