# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Words to write rows of x as `byte_vectors` multiplies them, as LLVM vectors.

Rows are in groups of ROWS, in which the first blocks of all rows lie together, then the second ones: where one is
known, so is where the others are. A block of a row is `x_block_bytes`: its parts, [part][number in the order of lines],
then words, each for every group of it (`kernels.packed`): what a whole number is worth and the sum, float32, and for
each run of digits what is added to its sums, int32, where codes have no sign. A part is a digit, int8, the highest
first, or there is one: all digits as a word, or x in float32 as it is, of whose words the sums alone are used (see
`byte_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..packed import BLOCK, PACKINGS
from .byte_products import ONE_DIGIT, THREE_DIGITS, TWO_DIGITS, Way
from .digits import largest_bits, rounding
from .tile_product import STEP_BYTES
from .vectors import (
    BYTES,
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
    call,
    load_numbers,
    loop_over,
    splat,
    store,
    sum_lanes,
    take,
)

ROWS = 8  # of x at a time
FACTOR, SUM, OFFSETS = range(3)  # words of a group

_AT_ONCE = 4  # blocks that are split together
_LEAST = 2.0**-100  # with one digit, what a group's largest number is taken for where it is less
# The binary exponent of a group's largest whole number; digits reach twice that power, less half a percent.
_TOP = {THREE_DIGITS: 22, TWO_DIGITS: 14}


def runs_of(way: Way) -> list[tuple[int, ...]]:
    """Digits of x whose sums are one whole number: with three digits, sums of codes of 6 bits have 34 bits."""
    if way.kind.value_bits > 4 and way.num_digits == THREE_DIGITS:
        return [(0, 1), (2,)]
    return [tuple(range(way.num_digits))]


def parts_of(way: Way) -> list[tuple[int, ...]]:
    """Of each run, those that make its sums."""
    return runs_of(way) if way.product.number_bytes == 1 else [(0,)]


def part_bytes(way: Way) -> int:
    return BLOCK * way.product.number_bytes


def words_at(way: Way) -> int:
    """Where in a block of x its words are: behind all parts."""
    return sum(len(parts) for parts in parts_of(way)) * part_bytes(way)


def word_at(way: Way, word: int, group: int) -> int:
    """Where in a block of x one is."""
    return words_at(way) + 4 * (word * way.kind.num_groups + group)


def x_block_bytes(way: Way) -> int:
    """Whole lines of the cache."""
    num_words = OFFSETS + len(runs_of(way))
    if way.product.number_bytes == 4:
        num_words = OFFSETS if way.kind.has_least else 0
    return -(-word_at(way, num_words, 0) // STEP_BYTES) * STEP_BYTES


@njit(inline="always")
def place_of_row(row: int, num_blocks: int, block_bytes: int) -> int:
    """In bytes, where the first block of a row is."""
    return (row // ROWS * ROWS * num_blocks + row % ROWS) * block_bytes


@intrinsic(prefer_literal=True)
def split_row(
    typing_context: Any, packing: Any, num_digits: Any, x_bytes: Any, x: Any, num_blocks: Any, out: Any
) -> Any:
    """Write a row of x (4 bytes: float32, 2: bfloat16) as blocks of so many digits, for codes of a packing; all three
    are constants. `out`: where its first block goes, see `place_of_row`.

    A group's numbers become whole multiples of a power of two, which is 2^-22 of its largest or less (of those right
    below a power, 1.008 times that), with two digits 2^-14, and no less than 2^-126; with one digit, of 1/127 of its
    largest, or of 2^-100. If one of them is not finite, all their products become NaN: what is converted then does not
    matter. Where x is multiplied as float32, there are its numbers, and sums where least numbers are stored.
    """
    way, size = Way(PACKINGS[packing.literal_value], num_digits.literal_value), x_bytes.literal_value
    in_floats, num_groups = way.product.number_bytes == 4, way.kind.num_groups

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, _, x, num_blocks, out = arguments
        last = b.sub(num_blocks, INT64(1))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            numbers = [at_most(b, b.add(k, INT64(i)), last) for i in range(_AT_ONCE)]
            sources, targets = (
                [b.add(start, b.mul(number, INT64(step))) for number in numbers]
                for start, step in ((x, BLOCK * size), (out, ROWS * x_block_bytes(way)))
            )
            halves = [
                [load_numbers(b, b.add(source, INT64(first * size)), size) for first in (0, LANES)]
                for source in sources
            ]
            whole: list[list[Any]] = [[] for _ in halves]
            words: dict[int, Any] = {}  # by where they are
            for group in range(num_groups):
                own = [each[group * 2 // num_groups : (group + 1) * 2 // num_groups] for each in halves]
                if in_floats:
                    found, own_words = own, {SUM: _sum(b, own, b.fadd)} if way.kind.has_least else {}
                else:
                    found, own_words = _whole_of(b, way, own)
                whole = [[*before, *new] for before, new in zip(whole, found, strict=True)]
                words |= {word_at(way, word, group): values for word, values in own_words.items()}
            for each, target in zip(whole, targets, strict=True):
                _store_parts(b, way, each, target)
            for place, values in words.items():
                for i, target in enumerate(targets):
                    store(b, b.extract_element(values, INT32(i)), b.add(target, INT64(place)))
            return []

        loop_over(b, num_blocks, _AT_ONCE, [], step)
        return context.get_dummy_value()

    return types.void(packing, num_digits, x_bytes, *[types.int64] * 3), generate


def _sum(b: ir.IRBuilder, groups: Sequence[Sequence[Any]], add: Any) -> Any:
    """Of the numbers of each, which are one vector or two."""
    return sum_lanes(b, [add(*each) if len(each) > 1 else each[0] for each in groups])


def _whole_of(b: ir.IRBuilder, way: Way, groups: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], dict[int, Any]]:
    """The numbers of some groups as whole ones, and by word what belongs to each group."""
    is_one = way.num_digits == ONE_DIGIT
    factors, inverses = rounding(b, groups, _LEAST) if is_one else _splitting(b, groups, _TOP[way.num_digits])
    whole = []
    for i, group in enumerate(groups):
        inverse = broadcast(b, b.extract_element(inverses, INT32(i)), LANES)
        scaled = [b.fmul(each, inverse) for each in group]
        whole.append([b.fptosi(call(b, "llvm.rint.v16f32", FLOATS, [each]), INTS) for each in scaled])
    totals = _sum(b, whole, b.add)
    by_run = [totals]
    if len(runs_of(way)) > 1:
        lowest = _sum(b, [[_lowest(b, each) for each in group] for group in whole], b.add)
        by_run = [b.ashr(b.sub(totals, lowest), splat(totals.type, 8)), lowest]
    words = {FACTOR: factors}
    if way.kind.has_least:
        in_whole = b.fmul(b.sitofp(totals, factors.type), factors)
        words[SUM] = _sum(b, groups, b.fadd) if way.num_digits == THREE_DIGITS else in_whole
    if not way.has_signs:
        middle = 1 << (way.kind.value_bits - 1)
        words |= {run: b.mul(each, splat(totals.type, -middle)) for run, each in enumerate(by_run, OFFSETS)}
    return whole, words


def _splitting(b: ir.IRBuilder, groups: Sequence[Sequence[Any]], top: int) -> tuple[Any, Any]:
    """By group, for whole numbers up to two to the power `top` + 1: what one is worth, a power of two or NaN, and the
    inverse of it."""
    tops = largest_bits(b, groups)
    kind, floats = tops.type, ir.VectorType(FLOAT, tops.type.count)
    # The exponent of a number a little larger: what digits of -128 to 127 hold is not quite that much.
    exponents = b.lshr(b.add(tops, splat(kind, 1 << 17)), splat(kind, 23))
    least = splat(kind, top + 1)
    exponents = b.select(b.icmp_signed("<", exponents, least), least, exponents)
    factors = b.shl(b.sub(exponents, splat(kind, top)), splat(kind, 23))
    are_finite = b.icmp_signed("<", tops, splat(kind, 0x7F800000))
    factors = b.select(are_finite, factors, splat(kind, 0x7FC00000))
    inverses = b.shl(b.sub(splat(kind, 2 * 127 + top), exponents), splat(kind, 23))
    return b.bitcast(factors, floats), b.bitcast(inverses, floats)


def _lowest(b: ir.IRBuilder, whole: Any) -> Any:
    """The lowest digits of whole numbers."""
    return b.ashr(b.shl(whole, splat(INTS, 24)), splat(INTS, 24))


def _store_parts(b: ir.IRBuilder, way: Way, whole: Sequence[Any], target: Any) -> None:
    """Of two vectors of whole numbers, or of x as it is. Where 128 is added to every digit, digits are the bytes of the
    sum."""
    if way.product.number_bytes == 4:
        for start in range(0, BLOCK, LANES):
            numbers = take(b, whole[0], way.order[start : start + LANES], whole[1])
            store(b, numbers, b.add(target, INT64(4 * start)))
        return
    is_word = way.product.number_bytes == 2
    if is_word or way.num_digits == ONE_DIGIT:
        first, second = (b.trunc(each, ir.VectorType(INT16, LANES) if is_word else INT8S) for each in whole)
        store(b, take(b, first, way.order, second), target)
        return
    middle = splat(INTS, sum(128 << 8 * digit for digit in range(way.num_digits)))
    first, second = (b.bitcast(b.xor(b.add(each, middle), middle), BYTES) for each in whole)
    for digits in ((0, 1), (2,))[: way.num_digits - 1]:
        places = [4 * number + way.num_digits - 1 - digit for digit in digits for number in way.order]
        store(b, take(b, first, places, second), b.add(target, INT64(BLOCK * digits[0])))
