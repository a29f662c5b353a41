# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to bound the products of rows with packed weights (see `likeliest`), as LLVM vectors:

    some numbers of a row of x, in all lanes    dot    as many codes of each row of a panel    ->    sums, int32

A block of a row of x is `x_block_bytes`: words, float32: what a whole number is worth, and the sums of the squares of
what rounding took from x, and of x, in units of that worth; by group what is added to its sums (int32), where codes are
unpacked without a sign; then 32 numbers, whole ones of -127 to 127, in the order of codes (see `byte_products`). Behind
the last block is how far a product may be from what it is computed as, float32, for each unit of the length of a row
of the weight, and then of what was taken from that row.

Everything works on addresses. Packings have no least numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS, Packing
from .byte_products import ONE_DIGIT, Way
from .code_words import WIDTH, WORDS, ahead_of, blocks_of, codes_of, fetch, pair_of, scales_of, six_bits_of
from .digits import rounding, unsigned
from .features import IS_WIDE
from .tile_product import STEP_BYTES, TILE
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT32,
    INT64,
    INTS,
    LANES,
    at_most,
    broadcast,
    by_least,
    call,
    fma,
    join_lanes,
    load,
    load_numbers,
    load_repeated,
    loop_over,
    rows_at,
    splat,
    store,
    sum_lanes,
    take,
)

ROWS = 8 if IS_WIDE else 4  # of x at a time: a block's sums stay in registers
assert 2 * 4 * ROWS <= STEP_BYTES, "bounds have more than the line that is kept for them"
FACTOR, LOST, SIZE, _OFFSETS = range(4)  # words of a block

_AT_ONCE = 4  # blocks of x that are rounded together
_COUNTS = tuple(count for count in (1, 2, 4, 8) if count <= ROWS)  # of rows, that something is generated for
_JOINED = 4  # rows whose lanes `join_lanes` joins
_LEAST = 2.0**-60  # what a block's largest number is taken for where it is less: others take numbers near 2^-126 for 0
_INFINITY = float("inf")
_NO_SUMS = splat(INTS, 0)


def x_block_bytes(kind: Packing) -> int:
    """Whole lines of the cache."""
    return -(-4 * (_num_words(kind) + Way(kind, ONE_DIGIT).num_lines) // STEP_BYTES) * STEP_BYTES


def _num_words(kind: Packing) -> int:
    """Before the numbers of a block."""
    return _OFFSETS + kind.num_groups


@intrinsic(prefer_literal=True)
def round_row(
    typing_context: Any, packing: Any, has_pairs: Any, x_bytes: Any, x: Any, num_blocks: Any, out: Any
) -> Any:
    """Write a row of x (4 bytes: float32, 2: bfloat16) as blocks, for codes of a packing, a constant, that lie in pairs
    (as `codes` has them) or in fours (`byte_dots`). Where a number is not finite, so are words of its block."""
    kind, size = PACKINGS[packing.literal_value], x_bytes.literal_value
    way, places = Way(kind, ONE_DIGIT), _order(kind, has_pairs.literal_value)
    middle = 0 if way.has_signs else 1 << (kind.bits - 1)
    lanes = ir.VectorType(INT16, LANES) if way.product.number_bytes == 2 else INT8S

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, _, x, num_blocks, out = arguments
        last = b.sub(num_blocks, INT64(1))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            numbers = [at_most(b, b.add(k, INT64(i)), last) for i in range(_AT_ONCE)]
            sources = [b.add(x, b.mul(number, INT64(BLOCK * size))) for number in numbers]
            blocks = [
                [load_numbers(b, b.add(source, INT64(first * size)), size) for first in (0, LANES)]
                for source in sources
            ]
            factors, inverses = rounding(b, blocks, _LEAST)
            rounded, lost, sizes = [], [], []
            for i, block in enumerate(blocks):
                inverse = broadcast(b, b.extract_element(inverses, INT32(i)), LANES)
                scaled = [b.fmul(half, inverse) for half in block]
                whole = [call(b, "llvm.rint.v16f32", FLOATS, [half]) for half in scaled]
                less = [b.fsub(*each) for each in zip(scaled, whole, strict=True)]
                lost.append(b.fadd(*(b.fmul(half, half) for half in less)))
                sizes.append(b.fadd(*(b.fmul(half, half) for half in scaled)))
                rounded.append([b.fptosi(half, INTS) for half in whole])
            words = {FACTOR: factors, LOST: sum_lanes(b, lost), SIZE: sum_lanes(b, sizes)}
            by_group = list(zip(*rounded, strict=True)) if kind.num_groups > 1 else [[b.add(*each) for each in rounded]]
            for word, of_group in enumerate(by_group, _OFFSETS):
                totals = sum_lanes(b, of_group)
                words[word] = b.mul(totals, splat(totals.type, -middle))
            for i, number in enumerate(numbers):
                target = b.add(out, b.mul(number, INT64(x_block_bytes(kind))))
                halves = [b.trunc(half, lanes) for half in rounded[i]]
                store(b, take(b, halves[0], places, halves[1]), b.add(target, INT64(4 * _num_words(kind))))
                for word, values in words.items():
                    store(b, b.extract_element(values, INT32(i)), b.add(target, INT64(4 * word)))
            return []

        loop_over(b, num_blocks, _AT_ONCE, [], step)
        return context.get_dummy_value()

    return types.void(packing, has_pairs, x_bytes, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def bound(
    typing_context: Any,
    packing: Any,
    has_pairs: Any,
    panel: Any,
    num_blocks: Any,
    lengths: Any,
    taken: Any,
    x: Any,
    x_row: Any,
    num_rows: Any,
    fetches: Any,
    out: Any,
) -> Any:
    """Write for `num_rows` rows of x, ROWS at most, which are `x_row` bytes apart, what none of their products with
    WIDTH panels is above, and then what the largest of these is not below: each [ROWS] float32.

    `lengths`, `taken`: the addresses of those of the rows of the weight, and of what was taken from them, float32. What
    is not finite bounds nothing. `fetches`: whether what comes later of the weight is fetched, 0 or 1. Constants are
    `packing` and `has_pairs` (see `round_row`).
    """
    kind, in_pairs = PACKINGS[packing.literal_value], has_pairs.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, num_blocks, lengths, taken, x, x_row, num_rows, fetches, out = arguments
        panel_step = b.mul(num_blocks, INT64(kind.panel_block_bytes(TILE)))

        def of_rows(count: int) -> None:
            starts = rows_at(b, x, x_row, num_rows, count)

            def step(k: Any, totals: list[Any]) -> list[Any]:
                blocks = blocks_of(b, kind, panel, panel_step, k)
                x_blocks = [b.add(start, b.mul(k, INT64(x_block_bytes(kind)))) for start in starts]
                with b.if_then(b.icmp_signed("!=", fetches, INT64(0))):
                    ahead = ahead_of(b, kind, panel_step, num_blocks, k)
                    for block in blocks:
                        fetch(b, kind, block, ahead)
                found = list(totals)
                for group in range(kind.num_groups):
                    sums = _sums(b, kind, in_pairs, blocks, x_blocks, group)
                    scales = [scales_of(b, kind, block, group)[0] for block in blocks]
                    for i, x_block in enumerate(x_blocks):
                        factor = load_repeated(b, x_block, FLOAT, 4 * FACTOR)
                        for j, scale in enumerate(scales):
                            number = b.fmul(b.sitofp(sums[i * WIDTH + j], FLOATS), factor)
                            found[i * WIDTH + j] = fma(b, number, scale, found[i * WIDTH + j])
                return found

            totals = loop_over(b, num_blocks, 1, [splat(FLOATS, 0.0)] * (count * WIDTH), step)
            own = [
                [load(b, b.add(address, INT64(STEP_BYTES * j)), FLOATS) for address in (lengths, taken)]
                for j in range(WIDTH)
            ]
            uppers, lowers = [], []
            for i, start in enumerate(starts):
                x_end = b.add(start, b.mul(num_blocks, INT64(x_block_bytes(kind))))
                reach, size = (load_repeated(b, x_end, FLOAT, 4 * word) for word in range(2))
                distances = [fma(b, length, reach, b.fmul(less, size)) for length, less in own]
                both = list(zip(totals[i * WIDTH : (i + 1) * WIDTH], distances, strict=True))
                uppers.append(_larger(b, *(_finite_or(b, b.fadd(*each), _INFINITY) for each in both)))
                lowers.append(_larger(b, *(_finite_or(b, b.fsub(*each), -_INFINITY) for each in both)))
            for number, bounds in enumerate((uppers, lowers)):
                padded = [bounds[min(i, count - 1)] for i in range(ROWS)]
                for row in range(0, ROWS, _JOINED):
                    joined = join_lanes(b, padded[row : row + _JOINED], lambda *two: _larger(b, *two))
                    store(b, joined, b.add(out, INT64(4 * (ROWS * number + row))))

        by_least(b, num_rows, _COUNTS, of_rows)
        return context.get_dummy_value()

    return types.void(packing, has_pairs, *[types.int64] * 9), generate


def _order(kind: Packing, in_pairs: bool) -> list[int]:
    """The numbers of a block as its lines have them."""
    if kind.bits == 8 or not in_pairs:
        return Way(kind, ONE_DIGIT).order
    pairs = [(pair, pair + 1) for pair in range(0, BLOCK // 2, 2)]
    if kind.bits == 4:
        pairs = [(pair_of(kind, line, half), pair_of(kind, line, half + 2)) for line in range(4) for half in range(2)]
    return [2 * pair + number for both in pairs for number in range(2) for pair in both]


def _lines(b: ir.IRBuilder, kind: Packing, in_pairs: bool, codes: Any, unit: Any) -> list[Any]:
    """Those of a unit: see `Way.lines`."""
    if kind.bits == 8 and in_pairs:  # words of one pair of each row, then of the next
        both = load(b, b.add(codes, b.mul(unit, INT64(STEP_BYTES))), WORDS)
        return [unsigned(b, b.bitcast(take(b, both, [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]), INTS))]
    if kind.bits == 6 and in_pairs:  # bytes of two pairs of each row
        words = six_bits_of(b, codes, unit)
        lows = [b.and_(each, splat(WORDS, 0x3F)) for each in words[::2]]
        highs = [b.and_(b.shl(each, splat(WORDS, 8)), splat(WORDS, 0x3F00)) for each in words[1::2]]
        return [b.bitcast(b.or_(*both), INTS) for both in zip(lows, highs, strict=True)]
    return Way(kind, ONE_DIGIT).lines(b, codes, unit)


def _sums(
    b: ir.IRBuilder, kind: Packing, in_pairs: bool, blocks: Sequence[Any], x_blocks: Sequence[Any], group: int
) -> list[Any]:
    """Of the products of a group's codes, signed, and whole numbers of x: int32, [row of x][panel]."""
    way, starts = Way(kind, ONE_DIGIT), [codes_of(b, kind, block) for block in blocks]
    own, num_lines, num_units = way.product, way.unit, way.num_units // kind.num_groups
    sums: list[Any] = [None] * (len(x_blocks) * WIDTH)

    def of_panels(panels: range) -> None:
        def step(k: Any, state: list[Any]) -> list[Any]:
            found, unit = list(state), b.add(k, INT64(group * num_units))
            codes = [_lines(b, kind, in_pairs, starts[j], unit) for j in panels]
            for line in range(num_lines):
                word = b.add(b.mul(unit, INT64(4 * num_lines)), INT64(4 * (_num_words(kind) + line)))
                for i, x_block in enumerate(x_blocks):
                    some = load_repeated(b, b.add(x_block, word), INT32)
                    for number, lines in enumerate(codes, i * len(panels)):
                        found[number] = own.dot(b, some, lines[line], found[number])
            return found

        offset_at = 4 * (_OFFSETS + group)
        offsets = [_NO_SUMS if way.has_signs else load_repeated(b, x_block, INT32, offset_at) for x_block in x_blocks]
        begun = [offset for offset in offsets for _ in panels]
        # Lines whose products do not wait for each other.
        at_once = min(num_units, max(1, ROWS * own.panels // WIDTH // len(x_blocks)))
        found = loop_over(
            b,
            INT64(num_units),
            at_once,
            [own.start(each) for each in begun],
            lambda unit, state: _steps(b, step, unit, at_once, state),
            may_unroll=False,
        )
        for number, each in enumerate(found):
            sums[number // len(panels) * WIDTH + panels[number % len(panels)]] = own.end(b, [each], begun[number])

    for panel in range(0, WIDTH, own.panels):
        of_panels(range(panel, panel + own.panels))
    return sums


def _steps(b: ir.IRBuilder, step: Any, k: Any, count: int, state: list[Any]) -> list[Any]:
    for i in range(count):
        state = step(b.add(k, INT64(i)), state)
    return state


def _larger(b: ir.IRBuilder, first: Any, second: Any) -> Any:
    return b.select(b.fcmp_ordered(">", first, second), first, second)


def _finite_or(b: ir.IRBuilder, values: Any, other: float) -> Any:
    """An infinity says no more than NaN: what is computed with all digits may be finite yet."""
    sizes = b.bitcast(b.and_(b.bitcast(values, INTS), splat(INTS, 0x7FFFFFFF)), FLOATS)
    return b.select(b.fcmp_ordered("<", sizes, splat(FLOATS, _INFINITY)), values, splat(FLOATS, other))
