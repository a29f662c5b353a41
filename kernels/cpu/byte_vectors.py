# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to multiply rows with packed weights by dot products of bytes (see `byte_dots`), as LLVM vectors:

    four digits of a row of x, in all lanes    dot    four codes of each row of a panel    ->    sums, int32

A block of a row of x is `x_block_bytes`: its digits, [digit, the highest first][number] int8, three to a number or one,
then words: what a whole number is worth and the sum of the block, float32, and for each of GROUPS what is added to its
sums, int32, as codes are unpacked without a sign. A block of WIDTH panels is unpacked as UNPACKED_BYTES: codes [four
numbers][panel][row of the panel][number] uint8, then scales [panel][row] and what belongs to sums of x, likewise,
float32.

Everything works on addresses. Totals are [panel][row of x][row of the panel], panels PANEL_TOTALS apart; behind as many
rows of x as there are, they are of no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS, Packing
from .code_words import WIDTH, blocks_of, codes_of, fetch, scale_and_middle, total_at
from .digits import dot_int8, largest_bits, rounding, unsigned
from .tile_product import STEP_BYTES
from .vectors import (
    BYTES,
    FLOAT,
    FLOATS,
    INT8S,
    INT32,
    INT64,
    INTS,
    LANES,
    at_most,
    broadcast,
    by_least,
    call,
    fma,
    load,
    load_numbers,
    loop_over,
    rows_at,
    splat,
    store,
    sum_lanes,
    take,
)

ROWS = 8  # of x at a time: their sums for WIDTH panels leave registers for what is multiplied
THREE_DIGITS, ONE_DIGIT = 3, 1  # digits of a number of x
QUADS = BLOCK // 4  # of numbers, that a lane multiplies at once
UNPACKED_BYTES = (QUADS + 2) * WIDTH * STEP_BYTES
# Digits of x whose sums are one whole number, by the bits of a code and how many digits there are: sums of codes of 8
# bits and three digits have 36.
GROUPS = {(4, 3): ((0, 1, 2),), (8, 3): ((0, 1), (2,)), (4, 1): ((0,),), (8, 1): ((0,),)}

_AT_ONCE = 4  # blocks of x that are split together
_COUNTS = (1, 2, 4, 6, ROWS)  # of rows, that something is generated for
_LEAST = 2.0**-100  # with one digit, what a block's largest number is taken for where it is less
_TOP = 22  # the binary exponent of the largest whole number of a block; digits reach 2^23 less half a percent
_FACTOR, _SUM, _OFFSETS = 0, 1, 2
_ZEROS, _NO_SUMS = splat(FLOATS, 0.0), splat(INTS, 0)


def x_block_bytes(num_digits: int) -> int:
    """Whole lines of the cache."""
    most_words = _OFFSETS + max(len(groups) for (_, count), groups in GROUPS.items() if count == num_digits)
    return -(-(num_digits * BLOCK + 4 * most_words) // STEP_BYTES) * STEP_BYTES


@intrinsic(prefer_literal=True)
def split_row(typing_context: Any, bits: Any, num_digits: Any, x_bytes: Any, x: Any, num_blocks: Any, out: Any) -> Any:
    """Write a row of x (4 bytes: float32, 2: bfloat16) as blocks of so many digits, for codes of so many bits; all
    three are constants.

    A block's numbers become whole multiples of a power of two, which is 2^-22 of its largest or less (of those right
    below a power, 1.008 times that), and no less than 2^-126; with one digit, of 1/127 of its largest, or of 2^-100. If
    one of them is not finite, all their products become NaN: what is converted then does not matter.
    """
    count, size, code_bits = num_digits.literal_value, x_bytes.literal_value, bits.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, _, x, num_blocks, out = arguments
        last = b.sub(num_blocks, INT64(1))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            numbers = [at_most(b, b.add(k, INT64(i)), last) for i in range(_AT_ONCE)]
            sources, targets = (
                [b.add(start, b.mul(number, INT64(step))) for number in numbers]
                for start, step in ((x, BLOCK * size), (out, x_block_bytes(count)))
            )
            halves = [
                [load_numbers(b, b.add(source, INT64(first * size)), size) for first in (0, LANES)]
                for source in sources
            ]
            factors, inverses = rounding(b, halves, _LEAST) if count == ONE_DIGIT else _splitting(b, halves)
            whole = []
            for i, each in enumerate(halves):
                inverse = broadcast(b, b.extract_element(inverses, INT32(i)), LANES)
                whole.append(
                    [b.fptosi(call(b, "llvm.rint.v16f32", FLOATS, [b.fmul(half, inverse)]), INTS) for half in each]
                )
            for each, target in zip(whole, targets, strict=True):
                _store_digits(b, each, count, target)
            totals = sum_lanes(b, [b.add(*each) for each in whole])
            by_group = [totals]
            if len(GROUPS[code_bits, count]) > 1:
                lowest = sum_lanes(b, [b.add(*(_lowest(b, half) for half in each)) for each in whole])
                by_group = [b.ashr(b.sub(totals, lowest), splat(totals.type, 8)), lowest]
            offsets = [b.mul(each, splat(totals.type, -1 << (code_bits - 1))) for each in by_group]
            if count == ONE_DIGIT:
                sums = b.fmul(b.sitofp(totals, factors.type), factors)
            else:
                sums = sum_lanes(b, [b.fadd(*each) for each in halves])
            for number, words in enumerate((factors, sums, *offsets)):
                for i, target in enumerate(targets):
                    store(b, b.extract_element(words, INT32(i)), b.add(target, INT64(count * BLOCK + 4 * number)))
            return []

        loop_over(b, num_blocks, _AT_ONCE, [], step)
        return context.get_dummy_value()

    return types.void(bits, num_digits, x_bytes, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def unpack(typing_context: Any, packing: Any, panel: Any, panel_step: Any, num_blocks: Any, out: Any) -> Any:
    """Write WIDTH panels, `panel_step` bytes from one to the next, block by block. `packing` is a constant."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, panel, panel_step, num_blocks, out = arguments

        def step(k: Any, _state: list[Any]) -> list[Any]:
            _unpack_block(b, kind, blocks_of(b, kind, panel, panel_step, k), _unpacked_at(b, out, k))
            return []

        loop_over(b, num_blocks, 1, [], step)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 4), generate


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
    x_row: Any,
    num_rows: Any,
    totals: Any,
) -> Any:
    """totals = the products of `num_rows` rows of x, ROWS at most, which are `x_row` bytes apart, and WIDTH panels,
    `panel_step` bytes from one to the next, unpacked on the way. `packing` and `num_digits` are constants; scratch:
    UNPACKED_BYTES."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, panel, panel_step, num_blocks, scratch, x, x_row, num_rows, totals = arguments

        def block_of(k: Any) -> Any:
            blocks = blocks_of(b, kind, panel, panel_step, k)
            for block in blocks:
                fetch(b, kind, block)
            _unpack_block(b, kind, blocks, scratch)
            return scratch

        _multiply(b, kind, num_digits.literal_value, num_blocks, block_of, (x, x_row, num_rows), totals)
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
    x_row: Any,
    num_rows: Any,
    totals: Any,
    following: Any,
    panel_step: Any,
) -> Any:
    """Likewise, with what `unpack` wrote. `following`: the address of the panels that come next, which are fetched."""
    kind = PACKINGS[packing.literal_value]

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, unpacked, num_blocks, x, x_row, num_rows, totals, following, panel_step = arguments

        def block_of(k: Any) -> Any:
            for block in blocks_of(b, kind, following, panel_step, k):
                fetch(b, kind, block, ahead=0)
            return _unpacked_at(b, unpacked, k)

        _multiply(b, kind, num_digits.literal_value, num_blocks, block_of, (x, x_row, num_rows), totals)
        return context.get_dummy_value()

    return types.void(packing, num_digits, *[types.int64] * 8), generate


def _splitting(b: ir.IRBuilder, blocks: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """By block, for whole numbers of 24 bits: what one is worth, a power of two or NaN, and the inverse of it."""
    tops = largest_bits(b, blocks)
    kind, floats = tops.type, ir.VectorType(FLOAT, tops.type.count)
    # The exponent of a number a little larger: digits of -128 to 127 do not reach 2^23.
    exponents = b.lshr(b.add(tops, splat(kind, 1 << 17)), splat(kind, 23))
    least = splat(kind, _TOP + 1)
    exponents = b.select(b.icmp_signed("<", exponents, least), least, exponents)
    factors = b.shl(b.sub(exponents, splat(kind, _TOP)), splat(kind, 23))
    are_finite = b.icmp_signed("<", tops, splat(kind, 0x7F800000))
    factors = b.select(are_finite, factors, splat(kind, 0x7FC00000))
    inverses = b.shl(b.sub(splat(kind, 2 * 127 + _TOP), exponents), splat(kind, 23))
    return b.bitcast(factors, floats), b.bitcast(inverses, floats)


def _lowest(b: ir.IRBuilder, whole: Any) -> Any:
    """The lowest digits of whole numbers."""
    return b.ashr(b.shl(whole, splat(INTS, 24)), splat(INTS, 24))


def _store_digits(b: ir.IRBuilder, whole: Sequence[Any], num_digits: int, target: Any) -> None:
    """Of two vectors of whole numbers. Where 128 is added to every digit, digits are the bytes of the sum."""
    if num_digits == 1:
        first, second = (b.trunc(each, INT8S) for each in whole)
        store(b, take(b, first, range(BLOCK), second), target)
        return
    middle = splat(INTS, 0x808080)
    first, second = (b.bitcast(b.xor(b.add(each, middle), middle), BYTES) for each in whole)
    for digits in ((0, 1), (2,)):
        places = [4 * number + num_digits - 1 - digit for digit in digits for number in range(BLOCK)]
        store(b, take(b, first, places, second), b.add(target, INT64(BLOCK * digits[0])))


def _unpacked_at(b: ir.IRBuilder, unpacked: Any, k: Any) -> Any:
    return b.add(unpacked, b.mul(k, INT64(UNPACKED_BYTES)))


def _line(b: ir.IRBuilder, start: Any, number: int, panel: int) -> Any:
    return b.add(start, INT64((number * WIDTH + panel) * STEP_BYTES))


def _unpack_block(b: ir.IRBuilder, kind: Packing, blocks: Sequence[Any], out: Any) -> None:
    low = splat(INTS, 0x0F0F0F0F)
    for j, block in enumerate(blocks):
        codes = codes_of(b, kind, block)
        for i in range(BLOCK * kind.bits // 8 // 4):
            words = load(b, b.add(codes, INT64(STEP_BYTES * i)), INTS)
            if kind.bits == 8:
                store(b, unsigned(b, words), _line(b, out, i, j))
            else:
                store(b, b.and_(words, low), _line(b, out, i, j))
                store(b, b.and_(b.lshr(words, splat(INTS, 4)), low), _line(b, out, QUADS // 2 + i, j))
        scale, middle = scale_and_middle(b, kind, block)
        store(b, scale, _line(b, out, QUADS, j))
        if middle is not None:
            store(b, middle, _line(b, out, QUADS + 1, j))


def _multiply(
    b: ir.IRBuilder,
    kind: Packing,
    num_digits: int,
    num_blocks: Any,
    block_of: Callable[[Any], Any],
    rows: tuple[Any, Any, Any],
    totals: Any,
) -> None:
    """`block_of` gives the address of a block that is unpacked, by its number; `rows`: the address of the first, the
    bytes from one to the next, and how many there are."""

    def of_rows(count: int) -> None:
        starts, places = rows_at(b, *rows, count), [(i, j) for i in range(count) for j in range(WIDTH)]
        for place in places:
            store(b, _ZEROS, total_at(b, totals, *place))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            place_in_row = b.mul(k, INT64(x_block_bytes(num_digits)))
            block, x_blocks = block_of(k), [b.add(start, place_in_row) for start in starts]
            words = [b.add(x_block, INT64(num_digits * BLOCK)) for x_block in x_blocks]
            sums = _sums(b, block, x_blocks, words, GROUPS[kind.bits, num_digits])
            scales, middles = ([load(b, _line(b, block, QUADS + i, j), FLOATS) for j in range(WIDTH)] for i in range(2))
            for number, (i, j) in zip(sums, places, strict=True):
                place = total_at(b, totals, i, j)
                total = load(b, place, FLOATS)
                if kind.has_least:
                    total = fma(b, _word(b, words[i], _SUM, FLOAT), middles[j], total)
                product = b.fmul(number, _word(b, words[i], _FACTOR, FLOAT))
                store(b, fma(b, product, scales[j], total), place)
            return []

        loop_over(b, num_blocks, 1, [], step)

    by_least(b, rows[2], _COUNTS, of_rows)


def _sums(
    b: ir.IRBuilder, block: Any, x_blocks: Sequence[Any], words: Sequence[Any], groups: Sequence[Sequence[int]]
) -> list[Any]:
    """Of the products of a block's codes, signed, and whole numbers of x: float32, [row of x][panel]."""
    found: list[Any] = []
    for number, digits in enumerate(groups):
        offsets = [_word(b, each, _OFFSETS + number, INT32) for each in words for _ in range(WIDTH)]
        parts = [b.sitofp(each, FLOATS) for each in _whole_sums(b, block, x_blocks, digits, offsets)]
        scale = splat(FLOATS, 256.0 ** len(digits))
        found = [fma(b, high, scale, low) for high, low in zip(found, parts, strict=True)] if found else parts
    return found


def _whole_sums(
    b: ir.IRBuilder, block: Any, x_blocks: Sequence[Any], digits: Sequence[int], offsets: Sequence[Any]
) -> list[Any]:
    """Likewise, of codes as they are unpacked and some digits as one number, and `offsets`: int32."""
    is_one = len(digits) == 1
    sums, at_once = list(offsets) if is_one else [_NO_SUMS] * len(offsets), max(1, ROWS // len(x_blocks))
    for digit in digits:
        if digit != digits[0]:
            sums = [b.shl(each, splat(INTS, 8)) for each in sums]

        def step(first: Any, sums: list[Any], digit: int = digit) -> list[Any]:
            found = list(sums)
            for quad in (b.add(first, INT64(i)) for i in range(at_once)):
                start = b.add(block, b.mul(quad, INT64(WIDTH * STEP_BYTES)))
                codes = [load(b, _line(b, start, 0, j), INTS) for j in range(WIDTH)]
                for i, x_block in enumerate(x_blocks):
                    place = b.add(b.add(x_block, INT64(BLOCK * digit)), b.mul(quad, INT64(4)))
                    four = broadcast(b, load(b, place, INT32), LANES)
                    for j, each in enumerate(codes):
                        found[i * WIDTH + j] = dot_int8(b, four, each, found[i * WIDTH + j])
            return found

        sums = loop_over(b, INT64(QUADS), at_once, sums, step, may_unroll=False)
    return sums if is_one else [b.add(*each) for each in zip(sums, offsets, strict=True)]


def _word(b: ir.IRBuilder, words: Any, number: int, word: ir.Type) -> Any:
    return broadcast(b, load(b, b.add(words, INT64(4 * number)), word), LANES)
