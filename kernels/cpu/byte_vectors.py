# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to multiply rows with packed weights by products of bytes (see `byte_dots`), as LLVM vectors:

    some numbers of a row of x, in all lanes    dot    as many codes of each row of a panel    ->    sums

x comes as `byte_rows` writes it. A block of WIDTH panels is unpacked as `unpacked_bytes`: codes [line][panel][row of
the panel][number], as `byte_products` multiplies them, then scales [panel][row] and what belongs to sums of x,
likewise, float32.

Everything works on addresses. Totals are [panel][row of x][row of the panel], panels PANEL_TOTALS apart. There is
memory for ROWS rows of x: those behind as many as there are may be read, whatever is there, and totals of theirs have
no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..packed import PACKINGS
from .byte_products import ONE_DIGIT, THREE_DIGITS, Way
from .byte_rows import FACTOR, OFFSETS, ROWS, SUM, part_bytes, parts_of, runs_of, word_at, x_block_bytes
from .code_words import WIDTH, ahead_of, blocks_of, codes_of, fetch, scale_and_middle, total_at
from .kv_prefetch import fetch_pieces
from .tile_product import STEP_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    INTS,
    by_least,
    fma,
    load,
    load_repeated,
    loop_over,
    splat,
    store,
)

_COUNTS = (1, 2, 4, 6, ROWS)  # of rows, that something is generated for
_ZEROS, _NO_SUMS = splat(FLOATS, 0.0), splat(INTS, 0)


def unpacked_bytes(way: Way) -> int:
    """Of a block of WIDTH panels."""
    return (way.num_lines + 2 * way.kind.num_groups) * WIDTH * STEP_BYTES


@intrinsic(prefer_literal=True)
def unpack(
    typing_context: Any, packing: Any, num_digits: Any, panel: Any, panel_step: Any, num_blocks: Any, out: Any
) -> Any:
    """Write WIDTH panels, `panel_step` bytes from one to the next, block by block. `packing` and `num_digits` are
    constants."""
    way = Way(PACKINGS[packing.literal_value], num_digits.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, panel_step, num_blocks, out = arguments

        def step(k: Any, _state: list[Any]) -> list[Any]:
            place = b.add(out, b.mul(k, INT64(unpacked_bytes(way))))
            _unpack_block(b, way, blocks_of(b, way.kind, panel, panel_step, k), place)
            return []

        loop_over(b, num_blocks, 1, [], step)
        return context.get_dummy_value()

    return types.void(packing, num_digits, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def multiply_packed(
    typing_context: Any,
    packing: Any,
    num_digits: Any,
    panel: Any,
    panel_step: Any,
    num_blocks: Any,
    scratch: Any,
    x: Any,
    num_rows: Any,
    totals: Any,
    cursor: Any,
) -> Any:
    """totals = the products of `num_rows` rows of x, ROWS at most, the first ones of a group, and WIDTH panels,
    `panel_step` bytes from one to the next, unpacked on the way. `packing` and `num_digits` are constants; scratch, for
    what is not multiplied from registers: `unpacked_bytes`; cursor: see `kv_prefetch`."""
    way = Way(PACKINGS[packing.literal_value], num_digits.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, panel_step, num_blocks, scratch, x, num_rows, totals, cursor = arguments

        def block_of(k: Any, count: int) -> _Block:
            blocks = blocks_of(b, way.kind, panel, panel_step, k)
            ahead = ahead_of(b, way.kind, panel_step, num_blocks, k)
            for block in blocks:
                fetch(b, way.kind, block, ahead)
            if _is_direct(way, count):
                return _Packed(b, way, blocks)
            _unpack_block(b, way, blocks, scratch)
            return _Unpacked(b, way, scratch)

        _multiply(b, way, num_blocks, block_of, x, num_rows, totals, cursor)
        return context.get_dummy_value()

    return types.void(packing, num_digits, *[types.int64] * 8), generate


@intrinsic(prefer_literal=True)
def multiply_unpacked(
    typing_context: Any,
    packing: Any,
    num_digits: Any,
    unpacked: Any,
    num_blocks: Any,
    x: Any,
    num_rows: Any,
    totals: Any,
    following: Any,
    panel_step: Any,
    cursor: Any,
) -> Any:
    """Likewise, of the first rows of a group, too, with what `unpack` wrote. `following`: the address of the panels
    that come next, which are fetched."""
    way = Way(PACKINGS[packing.literal_value], num_digits.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, unpacked, num_blocks, x, num_rows, totals, following, panel_step, cursor = arguments

        def block_of(k: Any, _count: int) -> _Block:
            for block in blocks_of(b, way.kind, following, panel_step, k):
                fetch(b, way.kind, block, ahead=INT64(0))
            return _Unpacked(b, way, b.add(unpacked, b.mul(k, INT64(unpacked_bytes(way)))))

        _multiply(b, way, num_blocks, block_of, x, num_rows, totals, cursor)
        return context.get_dummy_value()

    return types.void(packing, num_digits, *[types.int64] * 8), generate


def _line(b: ir.IRBuilder, start: Any, number: int, panel: int) -> Any:
    return b.add(start, INT64((number * WIDTH + panel) * STEP_BYTES))


def _unpack_block(b: ir.IRBuilder, way: Way, blocks: Sequence[Any], out: Any) -> None:
    for j, block in enumerate(blocks):
        codes, line = codes_of(b, way.kind, block), 0
        for unit in range(way.num_units):
            for vector in way.lines(b, codes, INT64(unit)):
                store(b, vector, _line(b, out, line, j))
                line += 1
        for group in range(way.kind.num_groups):
            scale, middle = scale_and_middle(b, way.kind, block, group)
            store(b, scale, _line(b, out, line + 2 * group, j))
            if middle is not None:
                store(b, middle, _line(b, out, line + 2 * group + 1, j))


class _Unpacked:
    """A block of WIDTH panels, as `unpack` writes it. `unit` of its lines are given together."""

    unit = 1

    def __init__(self, b: ir.IRBuilder, way: Way, address: Any) -> None:
        self._b, self._way, self._address = b, way, address

    def codes(self, unit: Any, panel: int) -> list[Any]:
        b = self._b
        start = b.add(self._address, b.mul(unit, INT64(WIDTH * STEP_BYTES)))
        return [load(b, _line(b, start, 0, panel), INTS)]

    def scale_and_middle(self, panel: int, group: int) -> tuple[Any, Any]:
        places = [_line(self._b, self._address, self._way.num_lines + 2 * group + i, panel) for i in range(2)]
        return load(self._b, places[0], FLOATS), load(self._b, places[1], FLOATS) if self._way.kind.has_least else None


class _Packed:
    """Likewise, as it is packed: the addresses of a block of each panel."""

    def __init__(self, b: ir.IRBuilder, way: Way, blocks: Sequence[Any]) -> None:
        self._b, self._way, self._blocks = b, way, blocks
        self.unit = way.unit

    def codes(self, unit: Any, panel: int) -> list[Any]:
        return self._way.lines(self._b, codes_of(self._b, self._way.kind, self._blocks[panel]), unit)

    def scale_and_middle(self, panel: int, group: int) -> tuple[Any, Any]:
        return scale_and_middle(self._b, self._way.kind, self._blocks[panel], group)


_Block = _Unpacked | _Packed


def _multiply(
    b: ir.IRBuilder,
    way: Way,
    num_blocks: Any,
    block_of: Callable[[Any, int], _Block],
    x: Any,
    num_rows: Any,
    totals: Any,
    cursor: Any,
) -> None:
    """`block_of` gives a block by its number, for so many rows."""
    own, block_bytes = way.product, x_block_bytes(way)
    num_pieces = 2 if way.num_digits == THREE_DIGITS else 1  # so that there is time for them

    def of_rows(count: int) -> None:
        size = _tile_of(way, count)
        num_tiles = INT64(1) if size == count else b.sdiv(b.add(num_rows, INT64(size - 1)), INT64(size))

        def clear(i: Any, _state: list[Any]) -> list[Any]:
            for j in range(WIDTH):
                store(b, _ZEROS, b.add(total_at(b, totals, 0, j), b.mul(i, INT64(STEP_BYTES))))
            return []

        def step(k: Any, _state: list[Any]) -> list[Any]:
            block, x_start = block_of(k, count), b.add(x, b.mul(k, INT64(ROWS * block_bytes)))
            for panel in range(0, WIDTH, own.panels):
                loop_over(b, num_tiles, 1, [], partial(tile, block, x_start, range(panel, panel + own.panels)))
            fetch_pieces(b, cursor, num_pieces)
            return []

        def tile(block: _Block, x_start: Any, panels: range, number: Any, _state: list[Any]) -> list[Any]:
            first = b.mul(number, INT64(size))
            x_first = b.add(x_start, b.mul(first, INT64(block_bytes)))
            x_blocks = [b.add(x_first, INT64(i * block_bytes)) for i in range(size)]
            for group in range(way.kind.num_groups):
                add_group(block, x_blocks, panels, first, group)
            return []

        def add_group(block: _Block, x_blocks: Sequence[Any], panels: range, first: Any, group: int) -> None:
            sums = iter(_sums(b, way, block, x_blocks, panels, group))
            scales = {j: block.scale_and_middle(j, group) for j in panels}
            for i, x_block in enumerate(x_blocks):
                for j, (scale, middle) in scales.items():
                    place = b.add(total_at(b, totals, i, j), b.mul(first, INT64(STEP_BYTES)))
                    total = load(b, place, FLOATS)
                    if middle is not None:
                        x_sum = load_repeated(b, x_block, FLOAT, word_at(way, SUM, group))
                        total = fma(b, x_sum, middle, total)
                    product = next(sums)
                    if own.number_bytes < 4:
                        product = b.fmul(product, load_repeated(b, x_block, FLOAT, word_at(way, FACTOR, group)))
                    store(b, fma(b, product, scale, total), place)

        loop_over(b, b.mul(num_tiles, INT64(size)), 1, [], clear)
        loop_over(b, num_blocks, 1, [], step)

    # Those that are one tile, and what goes by tiles for all others.
    by_least(b, num_rows, [count for count in _COUNTS if count in (ROWS, _tile_of(way, count))], of_rows)


def _parts_at_once(way: Way) -> int:
    return len(parts_of(way)[0]) if way.product.is_joint else 1


def _tile_of(way: Way, count: int) -> int:
    """Rows of x that are multiplied together, of so many: as many of them as leave none for a smaller tile."""
    most = way.product.most_sums // (way.product.panels * _parts_at_once(way))
    return max(size for size in range(1, most + 1) if count % size == 0)


def _is_direct(way: Way, count: int) -> bool:
    """Whether codes are multiplied with so many rows as they are unpacked, in registers: where there are 32 of these;
    else where sums take half of those that they may. Digits that are multiplied one after the other unpack codes anew,
    which takes less than to store and read them; but not codes of 6 bits, where sums take all registers."""
    own = way.product
    if way.kind.bits == 6 and way.num_digits != ONE_DIGIT and count * own.panels == own.most_sums:
        return False
    return not own.is_narrow or 2 * count * own.panels * _parts_at_once(way) <= own.most_sums


def _sums(b: ir.IRBuilder, way: Way, block: _Block, x_blocks: Sequence[Any], panels: range, group: int) -> list[Any]:
    """Of the products of a group's codes, signed, and x, in whole numbers or as it is: float32, [row of x][panel]."""
    own, runs = way.product, runs_of(way)
    whole = [_whole_sums(b, way, block, x_blocks, panels, group, run) for run in range(len(parts_of(way)))]
    if own.number_bytes == 4:
        return whole[0]
    found = [b.sitofp(each, FLOATS) for each in whole[0]]
    for digits, sums in zip(runs[1:], whole[1:], strict=True):
        scale = splat(FLOATS, 256.0 ** len(digits))
        found = [fma(b, high, scale, b.sitofp(low, FLOATS)) for high, low in zip(found, sums, strict=True)]
    return found


def _whole_sums(
    b: ir.IRBuilder, way: Way, block: _Block, x_blocks: Sequence[Any], panels: range, group: int, run: int
) -> list[Any]:
    """Likewise, of one run of digits."""
    own, parts, at_once = way.product, parts_of(way)[run], _parts_at_once(way)
    offset_at, sums = word_at(way, OFFSETS + run, group), [_NO_SUMS] * (len(x_blocks) * len(panels))

    def begun(is_last: bool) -> list[Any]:
        """What the products are added to: those of digits before them, and with the last ones offsets."""
        found = [b.shl(each, splat(INTS, 8)) for each in sums]
        if not is_last or way.has_signs:
            return found
        offsets = [load_repeated(b, x_block, INT32, offset_at) for x_block in x_blocks for _ in panels]
        return [b.add(*each) for each in zip(found, offsets, strict=True)]

    for first in range(0, len(parts), at_once):
        some, is_last = parts[first : first + at_once], first + at_once >= len(parts)
        start = [own.start(each) for each in begun(is_last)]
        states = _dots(b, way, block, x_blocks, panels, group, some, start)
        # (Products add it at the start or at the end, where it has no register until then. LLVM drops the other.)
        sums = [own.end(b, *each) for each in zip(zip(*states, strict=True), begun(is_last), strict=True)]
    return sums


def _dots(
    b: ir.IRBuilder,
    way: Way,
    block: _Block,
    x_blocks: Sequence[Any],
    panels: range,
    group: int,
    parts: Sequence[int],
    start: Sequence[Any],
) -> list[list[Any]]:
    """By part of x, what its products with a group's codes leave: [row of x][panel]. `start`: likewise, of any part."""
    own, count, part_size = way.product, len(start), part_bytes(way)
    num_units = way.num_lines // way.kind.num_groups // block.unit

    def add(first: Any, count_of_units: int, state: list[Any]) -> list[Any]:
        found = list(state)
        for i in range(count_of_units):
            unit = b.add(first, INT64(i))
            codes, line = [block.codes(unit, j) for j in panels], b.mul(unit, INT64(block.unit))
            for number in range(block.unit):
                place = b.mul(b.add(line, INT64(number)), INT64(4))
                for p, part in enumerate(parts):
                    for row, x_block in enumerate(x_blocks):
                        some = load_repeated(b, b.add(x_block, place), INT32, part_size * part)
                        for j, lines in enumerate(codes):
                            at = p * count + row * len(panels) + j
                            found[at] = own.dot(b, some, lines[number], found[at])
        return found

    state = [each for _ in parts for each in start]
    # Where sums start from nothing, a unit by itself, ahead of the loop, spares the additions of it.
    ahead = 1 if own.is_joint else 0
    first_unit = group * num_units + ahead
    if ahead:
        state = add(INT64(group * num_units), 1, state)
    at_once = 1  # units
    if not own.is_narrow:  # one digit's products are so few that the end of a loop takes a tenth of their time
        some = max(1, ROWS // (len(x_blocks) * block.unit))
        at_once = num_units if way.num_digits == ONE_DIGIT else min(num_units, some)
    assert (num_units - ahead) % at_once == 0

    def step(first: Any, state: list[Any]) -> list[Any]:
        return add(b.add(first, INT64(first_unit)), at_once, state)

    state = loop_over(b, INT64(num_units - ahead), at_once, state, step, may_unroll=False)
    return [state[p * count : (p + 1) * count] for p in range(len(parts))]
