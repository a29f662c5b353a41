"""What every product of tiles is given (see `turned_tiles`), and the order of sums of float32.

    k   0 1 2 3 4 5 6 7 ... 511 | 512 ...        a, then b, c and d are added to the total, of these 512 numbers,
        a b c d a b c d ... d   | a b c d ...    then of the next

A class takes its products one after the other. Four lanes of a vector are a sum in `few_rows`, and one lane is in
`many_rows`, which give the same bits so. Where the weight is bfloat16, a word of 32 bits holds two numbers, and a class
has both: a a b b c c d d a a ...

A B has its words in that order, so that a class reads forwards: [span, class, word, row of x], where a span is what
all classes take before they are added to the total. Products that add in an order of their own have one class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

TILE = 16  # rows of a tile
STEP_BYTES = 64  # of a row of either operand, which one step of a product takes; a line of the cache, too
TILE_BYTES = TILE * STEP_BYTES
FETCHED_AT_ONCE = 4  # lines
CLASSES = 4  # of products that are summed side by side: a vector has a quarter for each of four sums
A_GOES_BY, B_GOES_BY = 1, 2
IN_A_ROW = 128  # products of a class, before it is added to the total: rounding errors stay small


def words_by_class(run: int) -> list[list[int]]:
    """The words of a step that each class takes, `run` of them in a row; 0 if all are one class."""
    words = range(STEP_BYTES // 4)
    return [[word for word in words if word // run % CLASSES == i] for i in range(CLASSES)] if run else [list(words)]


def span_bytes(run: int) -> int:
    """Of a row, in a whole span."""
    return 4 * IN_A_ROW * len(words_by_class(run))


class Operands(NamedTuple):
    """Of 16 or 32 rows of A times one or two B, which lie behind each other. LLVM values, int64."""

    a: Any  # address of the first row
    a_row: Any  # bytes from one row to the next
    b: Any  # address of the first B: the words of 16 rows of x, [span, class, word, row of x]
    goes_by: Any  # A_GOES_BY or B_GOES_BY, where not both can stay in the first cache; or 0
    row_bytes: Any  # that are multiplied, in steps of STEP_BYTES; a B has TILE times as many
    fetch: Any  # address of what is fetched into the caches on the way
    fetch_lines: Any  # of STEP_BYTES, in each step: a multiple of FETCHED_AT_ONCE, or 0
    sums: Any  # address of the results, float32 or int32
