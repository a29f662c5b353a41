"""Sums of products of a block's codes and numbers of x, by what this CPU has for them:

    DOT        bytes: four products are added to each lane of 32 bits, by one instruction
    IN_BYTES   AVX2, codes of 4 bits: two to a lane of 16, which holds a group's; then both lanes of a row to one of 32
    IN_WORDS   AVX2: two products of words to a lane of 32 bits
    IN_FLOATS  AVX2: one product of float32 to a lane

All but the last are of whole numbers, whose sums are exact: where CPUs take the same digits of x (`byte_rows`), they
have the same sums. Two products of bytes may be more than 16 bits hold where codes have 8, and a group's where they
have 6. Two digits of x are a word: words take one and a half times as long as one digit does in bytes. Three digits and
codes of 8 bits would take longer than float32. (Those of 6 bits go with them, which was not measured.)

A panel has 16 rows. A line of a block's packed codes, 64 bytes, has four bytes of each row, in the order that `packed`
has (`byte_dots.lay_out`). One becomes a unit of lines to multiply, or three of codes of 6 bits do, of which the fourth
are in what the others leave. x has its numbers in the order of these lines (`Way.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from ..packed import BLOCK, Packing
from .digits import dot_int8, unsigned
from .features import IS_WIDE, cpu_features
from .tile_product import STEP_BYTES
from .vectors import BYTES, FLOATS, INT8, INT16, INT32, INT64, INTS, LANES, call, fma, load, splat, take

THREE_DIGITS, TWO_DIGITS, ONE_DIGIT = 3, 2, 1  # of 8 bits each, of a number of x

_WORDS = ir.VectorType(INT16, 2 * LANES)  # two of each row
_HALF = LANES // 2  # rows of a register of AVX2
_BYTES_OF_HALF, _WORDS_OF_HALF, _INTS_OF_HALF = (
    ir.VectorType(kind, _HALF * count) for kind, count in ((INT8, 4), (INT16, 2), (INT32, 1))
)


class Product(NamedTuple):
    """One of these. Codes and numbers of x are given as INTS, whatever their lanes hold."""

    number_bytes: int  # of a number of x and of a code as they are multiplied
    start: Callable[[Any], Any]  # from sums, to which a block's are to be added
    dot: Callable[[ir.IRBuilder, Any, Any, Any], Any]  # (b, a word of x in all lanes, codes, sums) -> sums
    # (b, what `dot` gave in the end for each part of x, the highest digit first, what `start` was given) -> sums
    end: Callable[[ir.IRBuilder, Sequence[Any], Any], Any]
    is_narrow: bool  # a panel's sums are two registers, of 16, and not one of 32
    is_joint: bool = False  # all parts of x are multiplied at once, from nothing, and not one after the other

    @property
    def panels(self) -> int:
        """That are multiplied together."""
        return 1 if self.is_narrow else 2

    @property
    def most_sums(self) -> int:
        """Of panels, so that registers are left for codes and numbers of x."""
        return 6 if self.is_narrow else 16


class Way(NamedTuple):
    """How x in so many digits is multiplied with codes of a packing."""

    kind: Packing
    num_digits: int

    @property
    def product(self) -> Product:
        return PRODUCTS[self.kind.value_bits, self.num_digits]

    @property
    def num_lines(self) -> int:
        """To multiply, that a block of a panel has."""
        return BLOCK * self.product.number_bytes // 4

    @property
    def packed_lines(self) -> int:
        """Of a unit."""
        return 3 if self.kind.bits == 6 else 1

    @property
    def num_units(self) -> int:
        """Of a block of a panel."""
        return self.kind.code_bytes // 4 // self.packed_lines

    @property
    def unit(self) -> int:
        """Lines to multiply that it has."""
        return self.num_lines // self.num_units

    @property
    def order(self) -> list[int]:
        """The numbers of a block as its lines have them."""
        of_four, firsts = (0, 2, 1, 3) if self.product.number_bytes == 2 else range(4), list(range(0, BLOCK, 4))
        if self.kind.bits == 4:
            lower = [first for first in firsts if first // self.kind.fold % 2 == 0]
            firsts = [first + half for first in lower for half in (0, self.kind.fold)]
        return [first + i for first in firsts for i in of_four]

    @property
    def has_signs(self) -> bool:
        """Whether codes are multiplied with a sign; otherwise they are more by half of what their bits count."""
        return self.kind.value_bits > 4 and self.product.number_bytes > 1

    def lines(self, b: ir.IRBuilder, codes: Any, unit: Any) -> list[Any]:
        """Those of a unit, by its number, of the codes of a block, whose address is given."""
        found = self._bytes(b, codes, unit)
        if self.product.number_bytes == 1:
            return [unsigned(b, line) for line in found] if self.kind.value_bits == 8 else found
        split = _words_of if self.product.number_bytes == 2 else _floats_of
        return [part for line in found for part in split(b, line)]

    def _bytes(self, b: ir.IRBuilder, codes: Any, unit: Any) -> list[Any]:
        """Likewise, of a byte for each code."""
        start = b.add(codes, b.mul(unit, INT64(self.packed_lines * STEP_BYTES)))
        packed = [load(b, b.add(start, INT64(i * STEP_BYTES)), INTS) for i in range(self.packed_lines)]
        if self.kind.bits == 8:
            return packed
        if self.kind.bits == 4:
            low = splat(INTS, 0x0F0F0F0F)
            halves = [b.and_(packed[0], low), b.and_(b.lshr(packed[0], splat(INTS, 4)), low)]
            return [_look_up(b, self.kind.table, half) for half in halves] if self.kind.table else halves
        lines = [b.and_(line, splat(INTS, 0x3F3F3F3F)) for line in packed]
        rests = [b.lshr(line, splat(INTS, 6 - 2 * i)) for i, line in enumerate(packed)]
        fields = [b.and_(rest, splat(INTS, 0x03030303 << 2 * i)) for i, rest in enumerate(rests)]
        lines.append(b.or_(b.or_(fields[0], fields[1]), fields[2]))
        if self.has_signs:
            zero = splat(BYTES, self.kind.zero)
            lines = [b.bitcast(b.sub(b.bitcast(line, BYTES), zero), INTS) for line in lines]
        return lines


def has_products() -> bool:
    """Whether this CPU has one of these. (AVX-512 without dot products was not measured.)"""
    return "avx512vnni" in cpu_features() or ("avx2" in cpu_features() and not IS_WIDE)


def _look_up(b: ir.IRBuilder, table: Sequence[int], places: Any) -> Any:
    """The bytes of a table of 16 at places that are bytes."""
    found, bytes_of_half = ir.Constant(BYTES, 4 * list(table)), _BYTES_OF_HALF
    if IS_WIDE:
        return b.bitcast(call(b, "llvm.x86.avx512.pshuf.b.512", BYTES, [found, b.bitcast(places, BYTES)]), INTS)
    return b.bitcast(_by_halves(b, "llvm.x86.avx2.pshuf.b", (bytes_of_half, bytes_of_half), found, places), INTS)


def _words_of(b: ir.IRBuilder, line: Any) -> list[Any]:
    """The bytes of a line, with their signs: the first and third of each row, then the others."""
    words, byte = b.bitcast(line, _WORDS), splat(_WORDS, 8)
    return [b.bitcast(part, INTS) for part in (b.ashr(b.shl(words, byte), byte), b.ashr(words, byte))]


def _floats_of(b: ir.IRBuilder, line: Any) -> list[Any]:
    """The first byte of each row, with its sign, then the second ..."""
    parts = [b.ashr(b.shl(line, splat(INTS, 24 - 8 * i)), splat(INTS, 24)) for i in range(4)]
    return [b.bitcast(b.sitofp(part, FLOATS), INTS) for part in parts]


def _by_halves(b: ir.IRBuilder, name: str, kinds: tuple[ir.Type, ir.Type], x: Any, y: Any) -> Any:
    """An instruction of AVX2 that takes and gives vectors of these kinds, for all 16 rows."""
    given, result = kinds
    found, whole = [], [b.bitcast(each, INTS) if each.type != INTS else each for each in (x, y)]
    for half in range(2):
        places = range(half * _HALF, (half + 1) * _HALF)
        found.append(call(b, name, result, [b.bitcast(take(b, each, places), given) for each in whole]))
    return take(b, found[0], range(2 * result.count), found[1])


def _add_pairs(b: ir.IRBuilder, words: Any, others: Any) -> Any:
    """The sums of the products of two words of either, in each lane of INTS."""
    return _by_halves(b, "llvm.x86.avx2.pmadd.wd", (_WORDS_OF_HALF, _INTS_OF_HALF), words, others)


def _dot_bytes(b: ir.IRBuilder, x: Any, codes: Any, sums: Any) -> Any:
    """Of 32 products of codes of 4 bits and numbers of 8, sixteen come to one word: 16 * 15 * 128 is less than 2^15.
    (Or of 16 eight.)"""
    return b.add(sums, _by_halves(b, "llvm.x86.avx2.pmadd.ub.sw", (_BYTES_OF_HALF, _WORDS_OF_HALF), codes, x))


def _end_bytes(b: ir.IRBuilder, sums: Sequence[Any], begun: Any) -> Any:
    """A digit is worth 256 times the one behind it: the instruction that adds up two words multiplies by that as well,
    and shifts do the rest. Sums may leave 32 bits on the way, but not in the end (`byte_rows`)."""
    for place, digit in enumerate(reversed(sums)):
        worth = splat(INTS, 0x01000100 if place else 0x00010001)
        pairs = _add_pairs(b, b.bitcast(digit, INTS), worth)
        begun = b.add(begun, pairs if place < 2 else b.shl(pairs, splat(INTS, 8 * (place - 1))))
    return begun


def _dot_words(b: ir.IRBuilder, x: Any, codes: Any, sums: Any) -> Any:
    return b.add(sums, _add_pairs(b, codes, x))


def _dot_floats(b: ir.IRBuilder, x: Any, codes: Any, sums: Any) -> Any:
    return fma(b, b.bitcast(x, FLOATS), b.bitcast(codes, FLOATS), sums)


def _as_begun(begun: Any) -> Any:
    return begun


def _as_added(_b: ir.IRBuilder, sums: Sequence[Any], _begun: Any) -> Any:
    return sums[0]


DOT = Product(1, _as_begun, dot_int8, _as_added, is_narrow=False)
IN_BYTES = Product(1, lambda _begun: splat(_WORDS, 0), _dot_bytes, _end_bytes, is_narrow=True, is_joint=True)
IN_WORDS = Product(2, _as_begun, _dot_words, _as_added, is_narrow=True)
IN_FLOATS = Product(4, lambda _begun: splat(FLOATS, 0.0), _dot_floats, _as_added, is_narrow=True)
_ON_AVX2 = {
    (4, THREE_DIGITS): IN_BYTES,
    (4, TWO_DIGITS): IN_WORDS,
    (4, ONE_DIGIT): IN_BYTES,
    **{(bits, THREE_DIGITS): IN_FLOATS for bits in (6, 8)},
    **{(bits, digits): IN_WORDS for bits in (6, 8) for digits in (TWO_DIGITS, ONE_DIGIT)},
}
PRODUCTS = dict.fromkeys(_ON_AVX2, DOT) if "avx512vnni" in cpu_features() else _ON_AVX2  # by bits of a code, and digits
