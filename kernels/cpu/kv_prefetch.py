# mypy: disable-error-code="attr-defined, call-arg, no-untyped-call, type-var, untyped-decorator"
# (compiled functions and their views into memory are not Python to a type checker)
"""Keys and values that attention is about to read, fetched into the caches while products compute.

Attention of decodes waits for memory, which products of many rows hardly use. So in the graph of a decode step
(`graph`) products with packed weights, by kernels that can (`byte_dots`, `dots`), fetch a share of what the next
attention reads, some lines behind every block that they multiply:

    cores    | products: o, gate and up, down, q and k and v | attention | products ...
    memory   |   keys and values of that attention           |           |   of the next ...

Keys are fetched in pieces of PIECE bytes, values with them, which lie at the same places of their own cache. A thread
fetches about what it will attend itself, as both divide their items alike. What a product has no time for is left, from
the end of each of its items.

Results do not depend on it: only the list of pieces is read, never what they name, so that a wrong one does no harm.
Before the first attention that uses a plan, where pieces are listed, they are those of earlier steps of this graph, or
the cache's first.

It was measured on two cores of a Zen 5 (tests/benchmarks/HISTORY.md). Where these do not share a third-level cache,
each has memory to itself: nothing is gained, and 0 to 2.5% lost in int8. With fewer rows, products need the memory
themselves. Products in matrix tiles (`codes`) fetch nothing: what they read comes from the second-level cache the same
way, and on a Xeon they lost more than attention won.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit

from .features import IS_WIDE
from .intrinsics import pointer
from .recording import CompiledCall
from .vectors import INT64, load, prefetch, store

PIECE = 256  # bytes of keys, and as many of values
MOST_PIECES = 24 << 10  # of a layer: 12 MiB. What a third-level cache does not keep is fetched in vain.
# Digits of 8 bits that a weight is multiplied with, in all rows of x, so that there is time to fetch something.
_LEAST_DIGITS = 24

# What a product knows of its share: what attention reads (`Reads`), and which part of it, from BEGIN to END of OF; all
# are 0 where it fetches nothing.
PIECES, COUNT, KEYS, VALUES, BEGIN, END, OF, NUM_WORDS = range(8)
# And a thread, amid an item of it: addresses of the next piece and behind the last, and of the caches.
_NEXT, _STOP, _KEYS, _VALUES, _NUM_CURSOR_WORDS = range(5)

_INT32 = ir.IntType(32)


class Reads(NamedTuple):
    """What a call of attention reads, as addresses."""

    pieces: int  # int32: where they lie in a cache, counted in pieces
    num_pieces: int  # int64: how many they are
    keys: int
    values: int


class Lists(NamedTuple):
    """What a call lists: the address of the pieces."""

    pieces: int


class Fetches(NamedTuple):
    """A product that may fetch a share."""

    words: int  # address of NUM_WORDS among its arguments
    num_weights: int  # by which shares are divided


def new_pieces() -> npt.NDArray[np.int32]:
    """Memory for a list. One more than there may be: some are read two by two."""
    return np.zeros(MOST_PIECES + 1, np.int32)


def has_time(num_rows: int, num_digits: int) -> bool:
    """Whether a product of so many rows of x, in so many digits of 8 bits, should fetch something."""
    return IS_WIDE and num_rows * num_digits >= _LEAST_DIGITS


def share_out(calls: Sequence[CompiledCall]) -> None:
    """Give each product that may fetch its part, by its weights, of what the next attention among the calls of a graph
    reads.

    What nobody fetches by is not listed.
    """
    products: list[Fetches] = []
    fetched = set()
    for part in (call.prefetch for call in calls):
        if isinstance(part, Fetches):
            products.append(part)
        elif isinstance(part, Reads):
            done, total = 0, sum(product.num_weights for product in products)
            for product in products:
                share = [*part, done, done + product.num_weights, total]
                words = (ctypes.c_int64 * NUM_WORDS).from_address(product.words)
                words[:] = share  # type: ignore[assignment]  # numbers will do
                done += product.num_weights
                fetched.add(part.pieces)
            products = []
    for call in calls:
        if isinstance(call.prefetch, Lists) and call.prefetch.pieces not in fetched:
            call.arguments.num_rows = 0


@njit(error_model="numpy")
def new_cursor() -> npt.NDArray[np.int64]:
    """With nothing to fetch. Whoever gives its address away keeps it."""
    return np.zeros(_NUM_CURSOR_WORDS, np.int64)


@njit(error_model="numpy")
def point_to_share(cursor: Any, words: int, num_threads: int, item: int, num_items: int) -> None:
    """Let it go along the part of an item. `words`: the address of what its product knows.

    The items that a thread has at first (`claims.take_item`) have the same part of the pieces, whichever product it is;
    where there are fewer items than threads, some parts are nobody's.
    """
    share = carray(pointer(words), (NUM_WORDS,), np.int64)
    if share[OF] == 0:
        return
    pieces, count = share[PIECES], carray(pointer(share[COUNT]), (1,), np.int64)[0]
    thread = ((item + 1) * num_threads - 1) // num_items
    first_item, last_item = thread * num_items // num_threads, (thread + 1) * num_items // num_threads
    first, size = thread * count // num_threads, (thread + 1) * count // num_threads - thread * count // num_threads
    before, parts, own = item - first_item, share[OF] * (last_item - first_item), share[END] - share[BEGIN]
    begin = share[BEGIN] * (last_item - first_item) + own * before
    cursor[_NEXT] = pieces + 4 * (first + size * begin // parts)
    cursor[_STOP] = pieces + 4 * (first + size * (begin + own) // parts)
    cursor[_KEYS], cursor[_VALUES] = share[KEYS], share[VALUES]


def fetch_pieces(b: ir.IRBuilder, cursor: Any, count: int) -> None:
    """The next pieces of a share, if there are any. `cursor` is an address."""
    place = load(b, b.add(cursor, INT64(8 * _NEXT)), INT64)
    with b.if_then(b.icmp_signed("<", place, load(b, b.add(cursor, INT64(8 * _STOP)), INT64))):
        for i in range(count):  # the last ones may be of the next share
            offset = b.mul(b.zext(load(b, b.add(place, INT64(4 * i)), _INT32), INT64), INT64(PIECE))
            for cache in (_KEYS, _VALUES):
                start = b.add(load(b, b.add(cursor, INT64(8 * cache)), INT64), offset)
                for line in range(0, PIECE, 64):
                    prefetch(b, b.add(start, INT64(line)), level=2)
        store(b, b.add(place, INT64(4 * count)), b.add(cursor, INT64(8 * _NEXT)))
