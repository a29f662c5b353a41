# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, type-var, untyped-decorator"
"""Words to multiply packed panels with (see `panels`), as LLVM vectors: a vector has a number of each row of a panel.

A panel lies as `packed.lay_panels` has it. Sums belong to a row of x and to a class of numbers (see `tile_product`).
Everything works on addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS, Packing
from .code_words import Block, block_of, codes_of, fetch, scale_and_least, scales_of
from .features import IS_WIDE
from .tile_product import CLASSES, TILE
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    broadcast,
    by_least,
    by_value,
    fma,
    from_bfloat16,
    joined,
    load,
    load_repeated,
    loop_over,
    rows_at,
    splat,
    store,
    to_bfloat16,
)

PANEL = LANES  # rows of the weight
assert PANEL == TILE, "`code_words` finds their blocks"
# Narrow registers are those of other CPUs than x86, and of x86 without AVX2.
WIDTH = 2 if IS_WIDE else 1  # panels that `multiply` takes
SIZES = (12, 8, 4) if IS_WIDE else (6, 4, 2)  # rows of x that it may take
SUMS = 16 if IS_WIDE else 4  # vectors that leave registers for what `multiply_few` multiplies
FEW = (1, 2, 3, 4, 6, 8) if IS_WIDE else (1, 2, 4)  # rows of x that it takes: those of a class are no more
CODES = 8  # of 4 bits, in a lane
VECTOR_BYTES = 4 * LANES
AHEAD = 4096  # bytes, of what is fetched into the caches
STEP = 2  # numbers of a class that a loop takes at once

_HALVES = ir.VectorType(INT16, LANES)


class _Block(NamedTuple):
    """Vectors of the rows' scales and least numbers, by group, and the address of their codes."""

    packing: Packing
    scales: Sequence[Any]
    least: Sequence[Any]  # none of codes of 8 bits where they are not stored
    codes: Any

    @classmethod
    def at(cls, b: ir.IRBuilder, packing: Packing, place: Block) -> _Block:
        read = scales_of if packing.bits == 8 else scale_and_least
        found = [read(b, packing, place, group) for group in range(packing.num_groups)]
        scales, least = [each[0] for each in found], [each[1] for each in found if len(each) > 1]
        return cls(packing, scales, least, codes_of(b, packing, place))

    def number(self, b: ir.IRBuilder, first: int, behind: Any) -> Any:
        """Of each row, the number `behind` a `first` one: int64, which does not leave the vector that has its code."""
        group = first * self.packing.num_groups // BLOCK
        if self.packing.bits == 8:
            place = b.add(self.codes, b.mul(b.add(behind, INT64(first)), INT64(PANEL)))
            code = b.sext(load(b, place, INT8S), INTS)
        else:
            code = self._field(b, 0, 4, first, behind)
            if self.packing.bits == 6:
                code = b.or_(code, b.shl(self._field(b, BLOCK // CODES, 2, first, behind), splat(INTS, 4)))
        wide = b.sitofp(code, FLOATS)
        return fma(b, wide, self.scales[group], self.least[group]) if self.least else b.fmul(wide, self.scales[group])

    def _field(self, b: ir.IRBuilder, vector: int, bits: int, first: int, behind: Any) -> Any:
        """So many bits of its code, from a vector on."""
        in_lane = 32 // bits
        words = load(b, b.add(self.codes, INT64(VECTOR_BYTES * (vector + first // in_lane))), INTS)
        shift = b.trunc(b.mul(b.add(behind, INT64(first % in_lane)), INT64(bits)), INT32)
        return b.and_(b.lshr(words, broadcast(b, shift, LANES)), splat(INTS, (1 << bits) - 1))


def _numbers(b: ir.IRBuilder, packing: Packing, place: Block, classes: range) -> Iterator[tuple[int, Any]]:
    """Those numbers of a block that some classes take: which, and a vector of them."""
    block = _Block.at(b, packing, place)
    for number in range(BLOCK):
        if number % CLASSES in classes:
            yield number, block.number(b, number, INT64(0))


def _numbers_of_class(b: ir.IRBuilder, packing: Packing, place: Block, which: Any) -> Iterator[Any]:
    """Those that one class takes, an int64."""
    block = _Block.at(b, packing, place)
    for first in range(0, BLOCK, CLASSES):
        yield block.number(b, first, which)


def _block_at(b: ir.IRBuilder, packing: Packing, panel: Any, k: Any) -> Block:
    """The block whose first number is `k`."""
    return block_of(b, packing, panel, b.sdiv(k, INT64(BLOCK)))


def _add(b: ir.IRBuilder, is_first: Any, sums: Sequence[Any], place: Any) -> None:
    """Sums, one after the other, to a total, which begins with those that are first."""
    total = b.select(is_first, splat(FLOATS, 0.0), load(b, place, FLOATS))
    for part in sums:
        total = b.fadd(total, part)
    store(b, total, place)


@njit(error_model="numpy")
def size_of(left: int) -> int:
    """Which of SIZES is multiplied next, of so many rows of a group of TILE."""
    if left <= SIZES[2]:
        return SIZES[2]
    return SIZES[1] if left <= SIZES[1] or left > SIZES[0] else SIZES[0]


@intrinsic(prefer_literal=True)
def unpack(typing_context: Any, packing: Any, which: Any, block: Any, panel_bytes: Any, num_k: Any, out: Any) -> Any:
    """Write the numbers of one class and WIDTH panels: [number][panel][row of it] float32.

    `packing`, the name of one, is a constant. `block`: address of the first panel's first of whole blocks, which have
    `num_k` numbers of a row, of all classes; the next panel's lies `panel_bytes` behind it.
    """
    form = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, which, block, panel_bytes, num_k, out = arguments
        row = VECTOR_BYTES * WIDTH  # bytes

        def step(k: Any, _state: list[Any]) -> list[Any]:
            for panel in range(WIDTH):
                place = _block_at(b, form, b.add(block, b.mul(panel_bytes, INT64(panel))), k)
                start = b.add(b.add(out, b.mul(k, INT64(row // CLASSES))), INT64(VECTOR_BYTES * panel))
                with b.if_then(b.icmp_signed("==", which, INT64(0))):
                    fetch(b, form, place, INT64(AHEAD))
                for i, vector in enumerate(_numbers_of_class(b, form, place, which)):
                    store(b, vector, b.add(start, INT64(row * i)))
            return []

        loop_over(b, num_k, BLOCK, [], step)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 5), generate


@intrinsic
def multiply(typing_context: Any, num_x: Any, numbers: Any, x: Any, num_k: Any, is_first: Any, totals: Any) -> Any:
    """Add to totals [row of x][panel][row of it] the products of `num_k` numbers of a class and WIDTH panels, as
    `unpack` writes them, with `num_x` rows of x, one of SIZES, which are turned. Totals begin if it `is_first`.
    """
    n = WIDTH

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        num_x, numbers, x, num_k, is_first, totals = arguments

        def of_rows(m: int) -> None:
            def step(first: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                place = b.add(numbers, b.mul(first, INT64(VECTOR_BYTES * n)))
                factors = b.add(x, b.mul(first, INT64(4 * TILE)))
                for k in range(STEP):
                    vectors = [load(b, b.add(place, INT64(VECTOR_BYTES * (k * n + j))), FLOATS) for j in range(n)]
                    for i in range(m):
                        factor = load_repeated(b, factors, FLOAT, 4 * (k * TILE + i))
                        for j, vector in enumerate(vectors):
                            sums[i * n + j] = fma(b, factor, vector, sums[i * n + j])
                return sums

            sums = loop_over(b, num_k, STEP, [splat(FLOATS, 0.0)] * (m * n), step)
            for i, part in enumerate(sums):
                _add(b, is_first, [part], b.add(totals, INT64(VECTOR_BYTES * i)))

        by_value(b, num_x, SIZES, of_rows)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.boolean, types.int64), generate


@intrinsic(prefer_literal=True)
def multiply_few(
    typing_context: Any,
    packing: Any,
    num_x: Any,
    block: Any,
    x: Any,
    x_row: Any,
    num_k: Any,
    is_first: Any,
    totals: Any,
) -> Any:
    """`unpack` and `multiply` in one, of all classes, a panel, and as many rows of x as FEW has, which are as they are,
    `x_row` bytes from one to the next: no number is stored. Behind `num_x` rows, totals are of no meaning."""
    form = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, num_x, block, x, x_row, num_k, is_first, totals = arguments

        def of_rows(count: int) -> None:
            rows = rows_at(b, x, x_row, num_x, count)
            at_once = max(1, min(CLASSES, SUMS // count))
            for first in range(0, CLASSES, at_once):
                of_classes(rows, range(first, first + at_once))

        def of_classes(rows: list[Any], classes: range) -> None:
            def step(k: Any, sums: list[Any]) -> list[Any]:
                sums, place = list(sums), _block_at(b, form, block, k)
                if classes.start == 0:
                    fetch(b, form, place, INT64(AHEAD))
                for number, vector in _numbers(b, form, place, classes):
                    first = (number % CLASSES - classes.start) * len(rows)
                    offset = b.mul(b.add(k, INT64(number)), INT64(4))
                    for i, row in enumerate(rows):
                        factor = load_repeated(b, b.add(row, offset), FLOAT)
                        sums[first + i] = fma(b, factor, vector, sums[first + i])
                return sums

            sums = loop_over(b, num_k, BLOCK, [splat(FLOATS, 0.0)] * (len(classes) * len(rows)), step)
            begins = b.and_(is_first, ir.Constant(ir.IntType(1), classes.start == 0))
            for i in range(len(rows)):
                _add(b, begins, sums[i :: len(rows)], b.add(totals, INT64(VECTOR_BYTES * i)))

        by_least(b, num_x, FEW, of_rows)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 5, types.boolean, types.int64), generate


@intrinsic
def widen_rows(typing_context: Any, x: Any, count: Any, out: Any) -> Any:
    """Write `count` numbers of bfloat16, a multiple of LANES, as float32."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        x, count, out = arguments

        def step(k: Any, _state: list[Any]) -> list[Any]:
            halves = load(b, b.add(x, b.mul(k, INT64(2))), _HALVES)
            store(b, from_bfloat16(b, halves), b.add(out, b.mul(k, INT64(4))))
            return []

        loop_over(b, count, LANES, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    is_short: Any,
    has_short_bias: Any,
    totals: Any,
    num_panels: Any,
    num_rows: Any,
    bias: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store totals, [row of x][panel][row of it], as rows of results, with the bias if its address is not 0. The first
    two are constants: whether results, and the bias, are bfloat16 and not float32."""
    shift, bias_shift = (1 if short.literal_value else 0 for short in (is_short, has_short_bias))

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        totals, num_panels, num_rows, bias, out, out_row = arguments[2:]
        totals_row = b.mul(num_panels, INT64(VECTOR_BYTES))

        def of_panel(panel: Any, _state: list[Any]) -> list[Any]:
            offset, before = b.mul(panel, INT64(VECTOR_BYTES)), b.block
            with b.if_then(b.icmp_signed("!=", bias, INT64(0))):
                place = b.add(bias, b.lshr(offset, INT64(bias_shift)))
                given = from_bfloat16(b, load(b, place, _HALVES)) if bias_shift else load(b, place, FLOATS)
                inside = b.block
            added = joined(b, (splat(FLOATS, -0.0), before), (given, inside))

            def of_row(row: Any, _state: list[Any]) -> list[Any]:
                total = load(b, b.add(b.add(totals, offset), b.mul(row, totals_row)), FLOATS)
                result = b.fadd(total, added)
                place = b.add(b.add(out, b.lshr(offset, INT64(shift))), b.mul(row, out_row))
                store(b, to_bfloat16(b, result) if shift else result, place)
                return []

            loop_over(b, num_rows, 1, [], of_row)
            return []

        loop_over(b, num_panels, 1, [], of_panel)
        return context.get_dummy_value()

    return types.void(is_short, has_short_bias, *[types.int64] * 6), generate
