# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to multiply packed weights with in matrix tiles (see `codes`), as LLVM vectors and tiles.

    A: some rows of x, 32 numbers of each    times    B: codes of 16 rows of the weight    ->    C: 16 sums a row of x

    total += scale * C + middle * (sum of the 32 numbers of x)

Codes of 4 bits are taken for 8 less than they are, so that `middle`, where least numbers are stored, is what 8 means.

Everything works on addresses, and is for tile registers as `matrix_tiles.describe` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS, Packing
from . import matrix_tiles
from .matrix_tiles import FIRST_A, FIRST_B, load_tile, load_tile_once, multiply_tile, store_tile, zero_tile
from .tile_product import STEP_BYTES, TILE, TILE_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    by_value,
    call,
    fma,
    from_bfloat16,
    load,
    loop_over,
    prefetch,
    splat,
    store,
    sum_lanes,
    take,
    to_bfloat16_by_instruction,
    to_bfloat16_pairs,
    widen_halves,
)

WIDTH = 2  # panels that are multiplied together
AHEAD = 8192  # bytes, of what is unpacked later
RING = 2  # blocks whose tiles are in memory
SCRATCH_BYTES = (RING * WIDTH + 2 * 2 * WIDTH) * TILE_BYTES  # tiles of codes, and sums of this block and the one before

_HALVES, _WORDS = ir.VectorType(INT16, LANES), ir.VectorType(INT16, 2 * LANES)


@njit(error_model="numpy")
def block_bytes(num_parts: int, num_rows: int) -> int:
    """What a block of a group of so many rows of x takes."""
    return num_parts * num_rows * STEP_BYTES + STEP_BYTES


@intrinsic
def begin(typing_context: Any, config: Any) -> Any:
    """Before the first product of this thread. Address of what `matrix_tiles.describe` writes."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        matrix_tiles.configure(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def end(typing_context: Any) -> Any:
    """Behind the last product of this thread."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        matrix_tiles.release(b)
        return context.get_dummy_value()

    return types.void(), generate


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
                both = load(b, b.add(x, b.mul(k, INT64(2))), _WORDS)
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


@intrinsic(prefer_literal=True)
def unpack(
    typing_context: Any, packing: Any, num_parts: Any, panel: Any, panel_step: Any, num_blocks: Any, out: Any
) -> Any:
    """Write the codes of WIDTH panels, `panel_step` bytes from one to the next, as tiles of bfloat16, [block][panel];
    or, for x in one part, their numbers, rounded. `packing`, the name of one, and `num_parts` are constants."""
    form = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, panel_step, num_blocks, out = arguments

        def step(k: Any, _state: list[Any]) -> list[Any]:
            for j, block in enumerate(_blocks(b, form, panel, panel_step, k)):
                target = b.add(out, b.mul(b.add(b.mul(k, INT64(WIDTH)), INT64(j)), INT64(TILE_BYTES)))
                way = _ways_to_numbers(b, form, block) if num_parts.literal_value == 1 else None
                for do in _block_steps(b, form, block, target, way):
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
    unpacked: Any,
    x: Any,
    scratch: Any,
    totals: Any,
) -> Any:
    """totals [group][panel][row of x][row of the panel] = the products of one or two groups of `num_rows` rows of x and
    WIDTH panels, `panel_step` bytes from one to the next.

    `unpacked` is what `unpack` wrote of them, numbers if x is one part, and groups have TILE rows then; 0: codes are
    unpacked on the way, each block before it is multiplied. The first two are constants; `scratch`: SCRATCH_BYTES.
    """
    form, parts = PACKINGS[packing.literal_value], num_parts.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, num_groups, num_rows, panel, panel_step, num_blocks, unpacked, x, scratch, totals = arguments
        place = _Place(panel, panel_step, num_blocks, unpacked, x, scratch, totals)

        def of_groups(m: int, rows: Any, *, is_fused: bool) -> None:
            product = _Product(b, form, parts, m, place, rows, is_fused=is_fused)
            if parts == 1 and not is_fused:
                product.of_numbers()
            else:
                product.of_codes()

        are_full, is_fused = b.icmp_signed("==", num_rows, INT64(TILE)), b.icmp_signed("==", unpacked, INT64(0))
        with b.if_else(is_fused) as (fused, others):
            with fused, b.if_else(are_full) as (full, fewer):
                with full:
                    by_value(b, num_groups, (1, 2), lambda m: of_groups(m, INT64(TILE), is_fused=True))
                with fewer:
                    by_value(b, num_groups, (1, 2), lambda m: of_groups(m, num_rows, is_fused=True))
            with others:
                by_value(b, num_groups, (1, 2), lambda m: of_groups(m, INT64(TILE), is_fused=False))
        return context.get_dummy_value()

    return types.void(packing, num_parts, *[types.int64] * 9), generate


class _Place(NamedTuple):
    """LLVM values of `multiply`'s arguments."""

    panel: Any
    panel_step: Any
    num_blocks: Any
    unpacked: Any
    x: Any
    scratch: Any
    totals: Any


class _Product:
    """What `multiply` generates for `num_groups` groups. `num_rows` is an LLVM value, which may be a constant."""

    def __init__(
        self,
        b: ir.IRBuilder,
        packing: Packing,
        num_parts: int,
        num_groups: int,
        place: _Place,
        num_rows: Any,
        *,
        is_fused: bool,
    ) -> None:
        self._b, self._packing, self._num_parts, self._is_fused = b, packing, num_parts, is_fused
        self._num_rows, self._place = num_rows, place
        self._num_tiles = num_groups * WIDTH
        # Bytes of a part of a block of x, which a tile of totals has, too; and of all its parts and their sums.
        self._part = b.mul(num_rows, INT64(STEP_BYTES))
        self._x_block = b.add(b.mul(self._part, INT64(num_parts)), INT64(STEP_BYTES))
        group = b.mul(self._x_block, place.num_blocks)
        self._groups = [b.add(place.x, b.mul(group, INT64(g))) for g in range(num_groups)]

    def of_codes(self) -> None:
        """While a block is multiplied, the sums of the one before it are added, and the next one is unpacked."""
        b = self._b
        last = b.sub(self._place.num_blocks, INT64(1))

        def clear(offset: Any, _state: list[Any]) -> list[Any]:
            store(b, splat(FLOATS, 0.0), b.add(self._place.totals, offset))
            return []

        def step(before: Any, _state: list[Any]) -> list[Any]:
            k = b.add(before, INT64(1))
            self._sum(k, [*self._unpacking(b.add(k, INT64(1))), *self._adding(before)])
            return []

        loop_over(b, b.mul(self._part, INT64(self._num_tiles)), STEP_BYTES, [], clear)
        for do in self._unpacking(INT64(0)):
            do()
        self._sum(INT64(0), self._unpacking(INT64(1)))
        with b.if_then(b.icmp_signed(">", last, INT64(0))):
            loop_over(b, last, 1, [], step)
        for do in self._adding(last):
            do()

    def of_numbers(self) -> None:
        """What the tiles hold behind the last block are totals."""

        def step(k: Any, _state: list[Any]) -> list[Any]:
            self._multiply(k, [])
            return []

        b = self._b
        for tile in range(self._num_tiles):
            zero_tile(b, tile)
        loop_over(b, self._place.num_blocks, 1, [], step)
        for tile in range(self._num_tiles):
            store_tile(b, tile, self._total_of(tile))

    def _sum(self, k: Any, work: Sequence[Callable[[], None]]) -> None:
        """Multiply block `k` and store its sums."""
        for tile in range(self._num_tiles):
            zero_tile(self._b, tile)
        self._multiply(k, work)
        for tile in range(self._num_tiles):
            store_tile(self._b, tile, self._sums_of(k, tile))

    def _multiply(self, k: Any, work: Sequence[Callable[[], None]]) -> None:
        """Add the products of block `k` to what the tiles hold. What else there is to do is done in between, evenly:
        tiles take their time."""
        b, line = self._b, INT64(STEP_BYTES)
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
                    for do in work[done * len(work) // num_products : (done + 1) * len(work) // num_products]:
                        do()
                    done += 1

    def _unpacking(self, k: Any) -> list[Callable[[], None]]:
        """Of block `k`, or behind the last one of that once more: `_block_steps`. None if all are there."""
        if not self._is_fused:
            return []
        b, place = self._b, self._place
        existing = b.select(b.icmp_signed("<", k, place.num_blocks), k, b.sub(place.num_blocks, INT64(1)))
        work = []
        for j, block in enumerate(_blocks(b, self._packing, place.panel, place.panel_step, existing)):
            work += _block_steps(b, self._packing, block, self._codes_of(k, j), None)
        return work

    def _adding(self, k: Any) -> list[Callable[[], None]]:
        """To the totals, the sums of block `k` times its scales: steps."""
        b = self._b
        ways = [
            _scales(b, self._packing, block)
            for block in _blocks(b, self._packing, self._place.panel, self._place.panel_step, k)
        ]
        behind = b.add(b.mul(self._x_block, k), b.mul(self._part, INT64(self._num_parts)))

        def of_row(r: Any) -> None:
            row = b.mul(r, INT64(STEP_BYTES))
            for g, group in enumerate(self._groups):
                if self._packing.has_least:
                    x_sum = load(b, b.add(b.add(group, behind), b.mul(r, INT64(4))), FLOAT)
                for j, (scale, middle) in enumerate(ways):
                    tile = g * WIDTH + j
                    place = b.add(self._total_of(tile), row)
                    total = load(b, place, FLOATS)
                    if self._packing.has_least:
                        total = fma(b, broadcast(b, x_sum, LANES), middle, total)
                    total = fma(b, load(b, b.add(self._sums_of(k, tile), row), FLOATS), scale, total)
                    store(b, total, place)

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
        number = b.srem(k, INT64(RING)) if self._is_fused else k
        first = self._place.scratch if self._is_fused else self._place.unpacked
        return b.add(first, b.mul(b.add(b.mul(number, INT64(WIDTH)), INT64(j)), INT64(TILE_BYTES)))

    def _sums_of(self, k: Any, tile: int) -> Any:
        b = self._b
        number = b.add(b.mul(b.and_(k, INT64(1)), INT64(2 * WIDTH)), INT64(RING * WIDTH + tile))
        return b.add(self._place.scratch, b.mul(number, INT64(TILE_BYTES)))

    def _total_of(self, tile: int) -> Any:
        return self._b.add(self._place.totals, self._b.mul(self._part, INT64(tile)))


def _blocks(b: ir.IRBuilder, packing: Packing, panel: Any, panel_step: Any, k: Any) -> list[Any]:
    """The address of block `k` of each panel."""
    offset = b.mul(k, INT64(TILE * packing.block_bytes))
    return [b.add(b.add(panel, b.mul(panel_step, INT64(j))), offset) for j in range(WIDTH)]


def _scales(b: ir.IRBuilder, packing: Packing, block: Any) -> tuple[Any, Any]:
    """The scales of 16 rows, and their middles where least numbers are stored."""
    scale, *stored = _halves(b, packing, block)
    return scale, fma(b, scale, splat(FLOATS, 8.0), stored[0]) if stored else None


def _ways_to_numbers(b: ir.IRBuilder, packing: Packing, block: Any) -> tuple[Any, Any]:
    """The scales of 16 rows, and what a code of 0 means there."""
    scale, *stored = _halves(b, packing, block)
    if packing.bits == 8:
        return scale, splat(FLOATS, 0.0)
    return scale, stored[0] if stored else b.fmul(scale, splat(FLOATS, -8.0))


def _halves(b: ir.IRBuilder, packing: Packing, block: Any) -> list[Any]:
    places = [b.add(block, INT64(2 * TILE * i)) for i in range(packing.num_halves)]
    return [widen_halves(b, load(b, place, _HALVES)) for place in places]


def _block_steps(
    b: ir.IRBuilder, packing: Packing, block: Any, out: Any, way: tuple[Any, Any] | None
) -> list[Callable[[], None]]:
    """What writes the codes of a block, signed, as a tile of bfloat16, step by step: [pair of numbers][row of the
    panel][number of the pair]. Where a way to them is given, it writes the numbers."""
    codes = b.add(block, INT64(2 * TILE * packing.num_halves))

    def write(found: Any, pair: int) -> None:
        """What was found is codes in bfloat16."""
        if way is not None:
            bits, (scale, least) = b.bitcast(found, INTS), way
            low, high = b.shl(bits, splat(INTS, 16)), b.and_(bits, splat(INTS, -65536))
            found = to_bfloat16_pairs(b, *(fma(b, b.bitcast(each, FLOATS), scale, least) for each in (low, high)))
        store(b, found, b.add(out, INT64(STEP_BYTES * pair)))

    def of_bytes(pair: int) -> None:
        start = b.add(codes, INT64(2 * LANES * pair))
        parts = [load(b, b.add(start, INT64(LANES * i)), INT8S) for i in range(2)]
        low, high = (b.sitofp(b.sext(part, INTS), FLOATS) for part in parts)
        write(to_bfloat16_by_instruction(b, low, high), pair)

    def of_words(first: int) -> None:
        words = load(b, b.add(codes, INT64(STEP_BYTES * first // 4)), _WORDS)
        # A look-up takes the lower five bits of a word: four of a code, and one that may be anything.
        table = ir.Constant(_WORDS, 2 * [_bfloat16(code - (8 if way is None else 0)) for code in range(16)])
        for j in range(4):
            shifted = b.lshr(words, splat(_WORDS, 4 * j)) if j else words
            write(call(b, "llvm.x86.avx512.permvar.hi.512", _WORDS, [table, shifted]), first + j)

    def fetch() -> None:
        for line in range(0, TILE * packing.block_bytes, STEP_BYTES):
            prefetch(b, b.add(block, INT64(AHEAD + line)), level=2)

    if packing.bits == 8:
        return [fetch, *(partial(of_bytes, pair) for pair in range(BLOCK // 2))]
    return [fetch, *(partial(of_words, first) for first in range(0, BLOCK // 2, 4))]


def _bfloat16(number: int) -> int:
    return int(np.float32(number).view(np.uint32)) >> 16
