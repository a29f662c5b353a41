# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="call-arg, misc, no-untyped-call, untyped-decorator"
"""What products read of packed weights (`codes`, `dots`, `byte_dots`, `panels`, and `likeliest`), as LLVM vectors:
panels, block by block, as `packed.lay_panels` has them. Everything works on addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import BLOCK, Packing
from .tile_product import STEP_BYTES, TILE, TILE_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    call,
    fma,
    in_order,
    load,
    load_repeated,
    loop_over,
    prefetch,
    splat,
    store,
    take,
    to_bfloat16_by_instruction,
    to_bfloat16_pairs,
    widen_halves,
)

WIDTH = 2  # panels that are multiplied together
FUSED = 2  # groups of x that are multiplied together, and with a block as it is unpacked where there are no more
RING = 2  # blocks whose tiles are in memory
SUMS = RING * WIDTH * TILE_BYTES  # in scratch memory, behind those tiles; or what belongs to the rows of a block
SCRATCH_BYTES = SUMS + 2 * FUSED * WIDTH * TILE_BYTES  # sums of two blocks

PANEL_TOTALS = FUSED * TILE_BYTES  # from the totals of a panel to those of the next one
TOTALS_BYTES = WIDTH * PANEL_TOTALS

WORDS = ir.VectorType(INT16, 2 * LANES)
Step = Callable[[], None]  # generates something
Pair = tuple[Any, Any]  # which two numbers of a block, int64, and those of a panel: [row][number of the pair]

_HALVES = ir.VectorType(INT16, LANES)
_AHEAD = INT64(16384)  # bytes, from a block of tiles to what is fetched with it
_LEAST_AHEAD = 8192  # bytes, that are read until memory has answered
_LONG_PANEL = 16384  # bytes. Of longer ones two are more than is worth keeping until they are read.
_AHEAD_IN_IT = INT64(4096)  # bytes. 2, 6 and 16 KiB take as long or longer.


class Place(NamedTuple):
    """LLVM values: what products of `code_tiles` are given."""

    panel: Any
    panel_step: Any
    num_blocks: Any
    unpacked: Any
    x: Any
    scratch: Any
    totals: Any


def fits(out_features: int, in_features: int) -> bool:
    """Whether a packed weight of this shape can be multiplied so."""
    return out_features % TILE == 0 and out_features >= TILE * WIDTH and in_features % BLOCK == 0


class Block(NamedTuple):
    """Addresses, LLVM values: of a block of a panel (`packed.lay_panels`), and of what its scales are nested in."""

    own: Any
    shared: Any  # or None


def block_of(b: ir.IRBuilder, packing: Packing, panel: Any, k: Any) -> Block:
    """Block `k` of the panel at an address."""
    own_bytes = TILE * (packing.code_bytes + packing.num_nested)
    if not packing.is_nested:
        return Block(b.add(panel, b.mul(k, INT64(packing.panel_block_bytes(TILE)))), None)
    unit, number = b.udiv(k, INT64(packing.num_blocks)), b.urem(k, INT64(packing.num_blocks))
    shared = b.add(panel, b.mul(unit, INT64(packing.num_blocks * packing.panel_block_bytes(TILE))))
    first = b.add(shared, INT64(2 * TILE * packing.num_kinds))
    return Block(b.add(first, b.mul(number, INT64(own_bytes))), shared)


def blocks_of(b: ir.IRBuilder, packing: Packing, panel: Any, panel_step: Any, k: Any) -> list[Block]:
    """Block `k` of each panel."""
    return [block_of(b, packing, b.add(panel, b.mul(panel_step, INT64(j))), k) for j in range(WIDTH)]


def tile_of(b: ir.IRBuilder, start: Any, k: Any, j: int) -> Any:
    """The address of the tile of block `k` of panel `j`, [block][panel]."""
    return b.add(start, b.mul(b.add(b.mul(k, INT64(WIDTH)), INT64(j)), INT64(TILE_BYTES)))


def ring_tile_of(b: ir.IRBuilder, place: Place, k: Any, j: int) -> Any:
    """The address of that tile where blocks are unpacked on the way, and only RING of them are in memory."""
    return tile_of(b, place.scratch, b.srem(k, INT64(RING)), j)


def groups_of(b: ir.IRBuilder, place: Place, x_block: Any, count: int) -> list[Any]:
    """The addresses of groups of x, a block of which has `x_block` bytes."""
    group = b.mul(x_block, place.num_blocks)
    return [b.add(place.x, b.mul(group, INT64(g))) for g in range(count)]


def share_of(work: Sequence[Step], number: int, count: int) -> Sequence[Step]:
    """One of `count` even shares. Tiles take their time: what else there is to do is done between their products."""
    return work[number * len(work) // count : (number + 1) * len(work) // count]


def scales_of(b: ir.IRBuilder, packing: Packing, block: Block, group: int = 0) -> list[Any]:
    """The scales of a block's group of 16 rows, and their least numbers where those are stored."""
    found = []
    for kind in range(packing.num_kinds):
        halves = load(b, b.add(block.shared if packing.is_nested else block.own, INT64(2 * TILE * kind)), _HALVES)
        found.append(widen_halves(b, halves))
        if packing.is_nested:
            place = b.add(block.own, INT64(TILE * (kind * packing.num_groups + group)))
            found[-1] = b.fmul(b.sitofp(b.sext(load(b, place, INT8S), INTS), FLOATS), found[-1])
    return found


def scale_and_least(b: ir.IRBuilder, packing: Packing, block: Block, group: int = 0) -> list[Any]:
    """Of 16 rows whose codes have fewer than 8 bits."""
    scale, *stored = scales_of(b, packing, block, group)
    return [scale, *(stored or [b.fmul(scale, splat(FLOATS, -float(packing.zero)))])]


def scale_and_middle(b: ir.IRBuilder, packing: Packing, block: Block, group: int = 0) -> tuple[Any, Any]:
    """Of 16 rows: what the sums of a group's codes are multiplied with, and, where least numbers are stored, the sum of
    the group's numbers of x. (Codes are taken for `packing.zero` less than they are: it is what that one means.)"""
    scale, *stored = scales_of(b, packing, block, group)
    if not stored:
        return scale, None
    return scale, fma(b, scale, splat(FLOATS, float(packing.zero)), stored[0]) if packing.zero else stored[0]


def x_sum_at(b: ir.IRBuilder, packing: Packing, address: Any) -> Any:
    """The sum of a group's numbers of x, in all lanes, where least numbers are stored."""
    return load_repeated(b, address, FLOAT) if packing.has_least else None


def add_middle(b: ir.IRBuilder, total: Any, middle: Any, x_sum: Any) -> Any:
    """To the totals of a row of x, what belongs to a group's sum of it, by `scale_and_middle` and `x_sum_at`."""
    return total if middle is None else fma(b, x_sum, middle, total)


def total_at(b: ir.IRBuilder, totals: Any, row: int, panel: int) -> Any:
    """The address of the totals of a row of x and a panel: [panel][row of x][row of the panel]."""
    return b.add(totals, INT64(STEP_BYTES * row + PANEL_TOTALS * panel))


def codes_of(b: ir.IRBuilder, packing: Packing, block: Block) -> Any:
    """The address of a block's codes. `codes` and `dots` have them, of 8 bits, as [pair of numbers][row of the
    panel][number of the pair]; of 4, as four lines of words, [row of the panel][number of the pair], whose bits from
    4 * i on are of `pair_of(line, i)`. Of 6 bits, three such lines have the eight pairs of either half: a word has two,
    and above them four bits of the last two: the lower ones of the first, the upper ones of both, the lower ones of the
    second."""
    return b.add(block.own, INT64(TILE * (packing.num_nested if packing.is_nested else 2 * packing.num_kinds)))


def pair_of(packing: Packing, line: int, i: int) -> int:
    """Which pair of numbers it is, where codes have 4 bits. Of a block that is two groups, a line has pairs of one."""
    return 4 * i + line if packing.num_groups == 1 else 8 * (line // 2) + 2 * i + line % 2


def six_bits_of(b: ir.IRBuilder, codes: Any, half: Any) -> list[Any]:
    """By pair of one half of a block, codes of 6 bits and anything above them."""
    start = b.add(codes, b.mul(half, INT64(3 * STEP_BYTES)))
    lines = [load(b, b.add(start, INT64(STEP_BYTES * i)), WORDS) for i in range(3)]
    found = [words for line in lines for words in (line, b.lshr(line, splat(WORDS, 6)))]
    for line, shift in ((lines[0], 8), (lines[2], 10)):
        field = b.and_(b.lshr(lines[1], splat(WORDS, shift)), splat(WORDS, 0x30))
        found.append(b.or_(b.lshr(line, splat(WORDS, 12)), field))
    return found


def look_up(b: ir.IRBuilder, table: Any, places: Any) -> Any:
    """The words of a table of 32 at the places that the lower five bits of others say."""
    return call(b, "llvm.x86.avx512.permvar.hi.512", WORDS, [table, places])


def look_up_in_two(b: ir.IRBuilder, tables: Sequence[Any], places: Any) -> Any:
    """Likewise, of two tables, one behind the other, by six bits."""
    return call(b, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [tables[0], places, tables[1]])


def fetch(b: ir.IRBuilder, packing: Packing, block: Block, ahead: Any = _AHEAD) -> None:
    """What comes some blocks later, so many bytes. (Blocks lie in a row but for what some of them share.)"""
    place = b.add(block.own, ahead)
    if packing.is_nested:
        prefetch(b, b.add(block.shared, ahead), level=2)
    for line in range(0, packing.panel_block_bytes(TILE), STEP_BYTES):
        prefetch(b, b.add(place, INT64(line)), level=2)


def ahead_of(b: ir.IRBuilder, packing: Packing, panel_step: Any, num_blocks: Any, k: Any) -> Any:
    """How many bytes behind block `k` of WIDTH panels, `panel_step` bytes apart, lies what is fetched with it.

    It is the same block of the panels that are multiplied next, or, where these are small, of those behind them; of
    long ones what comes a little later, at the end of a panel the beginning of the one that it is read after: where two
    lie side by side the next but one. What the last panels of a thread fetch is read by nobody, or was read by another.
    """
    block = INT64(packing.panel_block_bytes(TILE))
    panel = b.mul(num_blocks, block)
    # Side by side, the next ones are behind both; of gates and ups, behind the gate.
    pair = b.select(b.icmp_signed("==", panel_step, panel), b.mul(panel, INT64(WIDTH)), panel)
    count = b.sdiv(b.add(pair, INT64(_LEAST_AHEAD - 1)), pair)
    is_inside = b.icmp_signed("<", b.add(b.mul(k, block), _AHEAD_IN_IT), panel)
    beyond = b.add(_AHEAD_IN_IT, b.sub(pair, panel))
    later = b.select(is_inside, _AHEAD_IN_IT, beyond)
    return b.select(b.icmp_signed(">", panel, INT64(_LONG_PANEL)), later, b.mul(pair, count))


@intrinsic(prefer_literal=True)
def fetch_line(typing_context: Any, address: Any, to_write: Any) -> Any:
    """The line of the cache at an address: into the second-level cache, where it is read soon, or, by a constant 1,
    into the first, where it is written."""
    is_written = bool(to_write.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        prefetch(b, arguments[0], level=1 if is_written else 2, to_write=is_written)
        return context.get_dummy_value()

    return types.void(types.int64, to_write), generate


@njit(inline="always")  # a call takes longer than what it does
def fetch_to_write(address: int, row_bytes: int, num_rows: int, num_bytes: int) -> None:
    """So many bytes, a constant, of each of some rows, `row_bytes` from one to the next. Where another core has read or
    written them, its copy has to go before this one may write; stores wait for each other, and these wait together.
    Rows that begin amid a line have one more, which is left."""
    for row in range(num_rows):
        for place in range(0, num_bytes, STEP_BYTES):
            fetch_line(address + row * row_bytes + place, 1)


@njit(error_model="numpy")
def fetch_pair(panel: int, panel_bytes: int, panel_step: int) -> None:
    """WIDTH panels, `panel_step` bytes from one to the next, that a thread begins with when it has done something else;
    of long ones the beginning. (Where `ahead_of` goes further than to the next ones, these are left.)"""
    for j in range(WIDTH):
        for place in range(0, min(panel_bytes, _LONG_PANEL), STEP_BYTES):
            fetch_line(panel + j * panel_step + place, 0)


def unpack_steps(b: ir.IRBuilder, packing: Packing, block: Block, out: Any, *, as_numbers: bool) -> list[Step]:
    """What writes the codes of a block, signed, as a tile of bfloat16, step by step: [pair of numbers][row of the
    panel][number of the pair]; or its numbers, rounded."""

    def write(some: Callable[[Any], Iterator[Pair]], number: int) -> None:
        for pair, vector in some(INT64(number)):
            store(b, vector, b.add(out, b.mul(pair, INT64(STEP_BYTES))))

    some, count = _pairs(b, packing, block, as_numbers=as_numbers)
    return [partial(fetch, b, packing, block), *(partial(write, some, number) for number in range(count))]


def loop_over_pairs(
    b: ir.IRBuilder,
    packing: Packing,
    blocks: Sequence[Block],
    start: list[Any],
    body: Callable[[Any, list[Any], list[Any]], list[Any]],
    group: int = 0,
) -> list[Any]:
    """`state = body(pair, codes, state)` for all pairs of numbers of a group of some blocks, an int64 and what each
    block has of their codes, signed, as bfloat16: [row of the panel][number of the pair]."""
    unpackers = [_pairs(b, packing, block, as_numbers=False) for block in blocks]
    count = unpackers[0][1] // packing.num_groups
    # A loop's turn: four pairs, or eight of codes of 6 bits. A loop of two turns takes longer than none.
    at_once = max(1, count // 4) if packing.num_groups == 1 else count

    def step(number: Any, state: list[Any]) -> list[Any]:
        for i in range(at_once):
            place = b.add(number, INT64(group * count + i))
            for found in zip(*(some(place) for some, _ in unpackers), strict=True):
                state = body(found[0][0], [vector for _, vector in found], state)
        return state

    return in_order(b, loop_over(b, INT64(count), at_once, start, step, may_unroll=False))


def _pairs(
    b: ir.IRBuilder, packing: Packing, block: Block, *, as_numbers: bool
) -> tuple[Callable[[Any], Iterator[Pair]], int]:
    """What unpacks some pairs of a block, by a number of it, an LLVM value below the second result."""
    codes, zero = codes_of(b, packing, block), 0 if as_numbers else packing.zero
    values = packing.table or range(-zero, (1 << packing.bits) - zero)  # of codes
    if packing.bits == 8:
        groups = _by_pairs(b, packing, block) if as_numbers else []

        def of_bytes(pair: Any) -> Iterator[Pair]:
            start = b.add(codes, b.mul(pair, INT64(2 * LANES)))
            parts = [load(b, b.add(start, INT64(LANES * i)), INT8S) for i in range(2)]
            numbers = [b.sitofp(b.sext(part, INTS), FLOATS) for part in parts]
            if as_numbers:
                is_first = b.icmp_signed("<", pair, INT64(BLOCK // 4))
                own = (
                    groups[0] if len(groups) == 1 else [b.select(is_first, *both) for both in zip(*groups, strict=True)]
                )
                scales, least = own[:2], own[2:] or [splat(FLOATS, -0.0)] * 2
                numbers = [fma(b, *each) for each in zip(numbers, scales, least, strict=True)]
            yield pair, to_bfloat16_by_instruction(b, *numbers)

        return of_bytes, BLOCK // 2

    ways = [scale_and_least(b, packing, block, group) for group in range(packing.num_groups)] if as_numbers else []

    def number_of(found: Any, half: Any) -> Any:
        """Of codes, in bfloat16, of one half of a block's numbers: what is asked for."""
        if not as_numbers:
            return found
        is_first = b.icmp_signed("<", half, INT64(1))
        own = ways[0] if len(ways) == 1 else [b.select(is_first, *both) for both in zip(*ways, strict=True)]
        bits = b.bitcast(found, INTS)
        both = (b.shl(bits, splat(INTS, 16)), b.and_(bits, splat(INTS, -65536)))
        return to_bfloat16_pairs(b, *(fma(b, b.bitcast(each, FLOATS), *own) for each in both))

    if packing.bits == 6:
        words = [_bfloat16(value) for value in values]
        tables = [ir.Constant(WORDS, words[start : start + 2 * LANES]) for start in (0, 2 * LANES)]

        def of_half(half: Any) -> Iterator[Pair]:
            # Of a place in the tables six bits count: above them is anything.
            for i, places in enumerate(six_bits_of(b, codes, half)):
                found = number_of(look_up_in_two(b, tables, places), half)
                yield b.add(b.mul(half, INT64(BLOCK // 4)), INT64(i)), found

        return of_half, 2

    # Four bits of a place in it are a code, and one is of the next: anything.
    table = ir.Constant(WORDS, 2 * [_bfloat16(value) for value in values])

    def of_words(line: Any) -> Iterator[Pair]:
        words, half = load(b, b.add(codes, b.mul(line, INT64(STEP_BYTES))), WORDS), b.lshr(line, INT64(1))
        for i in range(4):
            found = look_up(b, table, b.lshr(words, splat(WORDS, 4 * i)) if i else words)
            pair = b.add(line, INT64(4 * i))
            if packing.num_groups > 1:
                pair = b.add(b.add(b.mul(half, INT64(8)), b.and_(line, INT64(1))), INT64(2 * i))
            yield pair, number_of(found, half)

    return of_words, 4


def _by_pairs(b: ir.IRBuilder, packing: Packing, block: Block) -> list[list[Any]]:
    """By group, scales and least numbers of 16 rows, each once for either number of a pair: of 8 rows, then 8 more."""
    return [
        [take(b, each, [i // 2 for i in range(start, start + LANES)]) for each in stored for start in (0, LANES)]
        for stored in (scales_of(b, packing, block, group) for group in range(packing.num_groups))
    ]


def _bfloat16(number: int) -> int:
    return int(np.float32(number).view(np.uint32)) >> 16
