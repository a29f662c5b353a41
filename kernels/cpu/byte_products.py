"""Sums of products of a block's codes and numbers of x, by what this CPU has for them:

    DOT        bytes: four products are added to each lane of 32 bits, by one instruction
    IN_BYTES   AVX2, codes of 4 bits: two to a lane of 16, which holds a block's; then both lanes of a row to one of 32
    IN_WORDS   AVX2: two products of words to a lane of 32 bits
    IN_FLOATS  AVX2: one product of float32 to a lane

All but the last are of whole numbers, whose sums are exact: where CPUs take the same digits of x (`byte_rows`), they
have the same sums. Two products of bytes may be more than 16 bits hold where codes have 8. Two digits of x are a word:
words take one and a half times as long as one digit does in bytes. Three digits and codes of 8 bits would take longer
than float32.

A panel has 16 rows. A line of a block's packed codes, 64 bytes, has four bytes of each row: four numbers, or eight of
4 bits, the upper halves of which are half a block behind (`byte_dots.lay_out`). It becomes some lines to multiply, and
x has its numbers in the order of these (`Way.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from ..packed import BLOCK, Packing
from .digits import dot_int8, unsigned
from .features import IS_WIDE, cpu_features
from .vectors import FLOATS, INT8, INT16, INT32, INTS, LANES, call, fma, splat, take

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
        return PRODUCTS[self.kind.bits, self.num_digits]

    @property
    def num_lines(self) -> int:
        """To multiply, that a block of a panel has."""
        return BLOCK * self.product.number_bytes // 4

    @property
    def num_packed_lines(self) -> int:
        return BLOCK * self.kind.bits // 8 // 4

    @property
    def order(self) -> list[int]:
        """The numbers of a block as its lines have them."""
        of_four = (0, 2, 1, 3) if self.product.number_bytes == 2 else range(4)
        halves = (0, BLOCK // 2) if self.kind.bits == 4 else (0,)
        return [first + half + i for first in range(0, BLOCK // len(halves), 4) for half in halves for i in of_four]

    @property
    def has_signs(self) -> bool:
        """Whether codes are multiplied with a sign; otherwise they are more by half of what their bits count."""
        return self.kind.bits == 8 and self.product.number_bytes > 1

    def lines(self, b: ir.IRBuilder, packed: Any) -> list[Any]:
        """Those that a packed one becomes."""
        found = [packed]
        if self.kind.bits == 4:
            low = splat(INTS, 0x0F0F0F0F)
            found = [b.and_(packed, low), b.and_(b.lshr(packed, splat(INTS, 4)), low)]
        if self.product.number_bytes == 1:
            return found if self.kind.bits == 4 else [unsigned(b, packed)]
        split = _words_of if self.product.number_bytes == 2 else _floats_of
        return [part for line in found for part in split(b, line)]


def has_products() -> bool:
    """Whether this CPU has one of these. (AVX-512 without dot products was not measured.)"""
    return "avx512vnni" in cpu_features() or ("avx2" in cpu_features() and not IS_WIDE)


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
    found = []
    for half in range(2):
        places = range(half * _HALF, (half + 1) * _HALF)
        found.append(call(b, name, result, [b.bitcast(take(b, each, places), given) for each in (x, y)]))
    return take(b, found[0], range(2 * result.count), found[1])


def _add_pairs(b: ir.IRBuilder, words: Any, others: Any) -> Any:
    """The sums of the products of two words of either, in each lane of INTS."""
    return _by_halves(b, "llvm.x86.avx2.pmadd.wd", (_WORDS_OF_HALF, _INTS_OF_HALF), words, others)


def _dot_bytes(b: ir.IRBuilder, x: Any, codes: Any, sums: Any) -> Any:
    """Of 32 products of codes of 4 bits and numbers of 8, sixteen come to one word: 16 * 15 * 128 is less than 2^15."""
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
    (8, THREE_DIGITS): IN_FLOATS,
    (8, TWO_DIGITS): IN_WORDS,
    (8, ONE_DIGIT): IN_WORDS,
}
PRODUCTS = dict.fromkeys(_ON_AVX2, DOT) if "avx512vnni" in cpu_features() else _ON_AVX2  # by bits of a code, and digits
