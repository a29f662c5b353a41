# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""The likeliest token of each row by a packed head, most of whose logits are never computed.

With x in 8 bits of the largest of each block, a product takes a third of its time, or half of it where x has two digits
otherwise, and what it is off by is no more than the length of the weight's row times that of what rounding took from x
(Cauchy and Schwarz). So:

    1  for each pair of panels, 32 tokens, and each row of x: what no logit is above, and what the highest is not below
    2  a pair may have the likeliest token where, for some row, the first is no less than the highest of the second
    3  only these, a few percent where some tokens stand out, are multiplied: by the kernel that multiplies all others
    4  the likeliest of them

The token is the one that all logits would give, to the bit: bounds hold with what that kernel rounds, too. (Least
numbers that are stored may be large where the numbers are not: what is rounded then has nothing to do with the length
of a row, and all its logits are computed.) Where nothing stands out, or a number is not finite, all pairs are
multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing
from .bound_vectors import FACTOR, LOST, ROWS, SIZE, bound, round_row, x_block_bytes
from .call import Arguments, RowFunction, enter_rows, take_rows
from .code_words import WIDTH
from .intrinsics import pointer
from .sampling import highest, likeliest_of
from .sources import digest_of, filed_as
from .threads import run_call
from .tile_product import STEP_BYTES, TILE

PAIR = TILE * WIDTH  # tokens that are looked at together

# Computes the logits of the pairs that a tensor of uint8 has a 1 for, and leaves the others as they are.
Multiply = Callable[[Tensor, Tensor], None]

_MARGIN = 1 + 2.0**-8  # of what is rounded here
_LARGEST = 2.0**90  # the length of a row of x from which on sums could overflow, here or there: nothing is bounded
_BOUND = Arguments(
    "weight", "lengths", "num_panels", "x", "count", "in_features", "upper", "lower", "rounds", floats=("slack",)
)
_CHOOSE = Arguments("count", "upper", "lower", "chosen")
_BOUND_TYPE, _CHOOSE_TYPE = _BOUND.dtype, _CHOOSE.dtype


def likeliest(
    x: Tensor,
    weight: Tensor,
    packing: Packing,
    lengths: Tensor,
    multiply: Multiply,
    *,
    has_pairs: bool,
    rounds: bool = False,
    lost: float = 0.0,
) -> Tensor:
    """`sampling.likeliest_tokens` of the logits that `multiply(logits, chosen)` computes. Returns [num_rows] int64.

    x [num_rows, in_features] float32 or bfloat16; weight [out_features, row_bytes], whose codes lie in pairs or in
    fours (see `bound_vectors`), without least numbers; lengths [2, out_features] float32. `rounds`: whether
    `multiply` rounds numbers of the weight to bfloat16; `lost`: by the length of a row of x, what it takes from it.
    """
    upper, lower = bounds(x, weight, packing, lengths, has_pairs=has_pairs, rounds=rounds, lost=lost)
    (num_rows, num_pairs), out_features = upper.shape, len(weight)
    chosen = torch.empty(num_pairs, dtype=torch.uint8)
    _run(_choose, num_pairs, num_rows, num_rows, upper.data_ptr(), lower.data_ptr(), chosen.data_ptr())
    logits = torch.empty(num_rows, out_features, dtype=torch.float32)
    multiply(logits, chosen)
    return likeliest_of(logits, PAIR, chosen)  # (A panel that is in two pairs is chosen with both.)


def bounds(
    x: Tensor,
    weight: Tensor,
    packing: Packing,
    lengths: Tensor,
    *,
    has_pairs: bool,
    rounds: bool = False,
    lost: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """For each row of x and pair of panels of the weight, what no product is above, and what the largest is not below:
    [num_rows, num_pairs] float32 each. Where the number of panels is odd, the last pair is the last two."""
    x, (num_rows, in_features), out_features = x.contiguous(), x.shape, len(weight)
    num_pairs = -(-out_features // PAIR)
    upper, lower = (torch.empty(num_rows, num_pairs, dtype=torch.float32) for _ in range(2))
    # What sums of float32 are off by, there and here, by the sum of the sizes of all products; and what x loses there.
    slack = 2.0**-23 * (in_features + 64) + lost
    _run(
        _bound(packing.name, has_pairs, x.dtype == torch.bfloat16), num_pairs, num_rows * in_features,
        weight.data_ptr(), lengths.data_ptr(), out_features // TILE, x.data_ptr(), num_rows, in_features,
        upper.data_ptr(), lower.data_ptr(), rounds, slack,
    )  # fmt: skip
    return upper, lower


def _run(function: RowFunction, num_rows: int, row_size: int, *arguments: float) -> None:
    """For these rows alone."""
    run_call(function.call(num_rows, row_size, *arguments)._replace(rows=None))


@cache
def _bound(packing: str, has_pairs: bool, has_short_x: bool) -> RowFunction:
    compiled = partial(_bound_worker, packing, has_pairs, has_short_x, f"{digest_of(*_SOURCES)} {PACKINGS[packing]}")
    return RowFunction(compiled, _BOUND, 0.3, is_idempotent=True)  # ns for a product of 32 rows of the weight


@njit(error_model="numpy")
def _reach(blocks: Any) -> Any:
    """Of a row of x: the length of what rounding has taken, and of x."""
    lost, size = 0.0, 0.0
    for block in blocks:
        square = np.float64(block[FACTOR]) * np.float64(block[FACTOR])
        lost += np.float64(block[LOST]) * square
        size += np.float64(block[SIZE]) * square
    return np.sqrt(lost), np.sqrt(size)


def _bound_worker(packing: str, has_pairs: bool, has_short_x: bool, sources: str) -> Any:
    panel_block, x_bytes = PACKINGS[packing].panel_block_bytes(TILE), 2 if has_short_x else 4
    block_bytes = x_block_bytes(PACKINGS[packing])

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, has_pairs, has_short_x)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _BOUND_TYPE)[0]
        num_pairs, count, num_blocks = a.num_rows, a.count, a.in_features // BLOCK
        num_panels, panel_bytes = a.num_panels, num_blocks * panel_block
        x_row = (num_blocks + 1) * block_bytes
        own = np.empty(count * x_row + 2 * STEP_BYTES, np.uint8)
        both = (own.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        blocks = both + STEP_BYTES
        for i in range(count):  # each thread for itself: nobody waits
            row = blocks + i * x_row
            round_row(packing, has_pairs, x_bytes, a.x + i * a.in_features * x_bytes, num_blocks, row)
            lost, size = _reach(carray(pointer(row), (num_blocks, block_bytes // 4), np.float32))
            reach = carray(pointer(row + num_blocks * block_bytes), (2,), np.float32)
            if size < _LARGEST:
                reach[0] = np.float32((lost + a.slack * size) * _MARGIN)
                reach[1] = np.float32(size * _MARGIN if a.rounds else 0.0)
            else:
                reach[:] = np.float32(np.nan)
        found = carray(pointer(both), (2, ROWS), np.float32)
        upper = carray(pointer(a.upper), (count, num_pairs), np.float32)
        lower = carray(pointer(a.lower), (count, num_pairs), np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                break
            for pair in range(first, stop):
                panel = min(WIDTH * pair, num_panels - WIDTH)
                start, lengths = a.weight + panel * panel_bytes, a.lengths + panel * STEP_BYTES
                taken = lengths + num_panels * STEP_BYTES
                for row in range(0, count, ROWS):
                    number = min(ROWS, count - row)
                    x, fetches = blocks + row * x_row, np.int64(row == 0)
                    bound(packing, has_pairs, start, num_blocks, lengths, taken, x, x_row, number, fetches, both)
                    for i in range(number):
                        upper[row + i, pair] = found[0, i]
                        lower[row + i, pair] = found[1, i]
        own[0] = 0  # it lives until here: Numba does not see who has its address

    return worker


def _choose_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (1,), _CHOOSE_TYPE)[0]
        num_pairs, count = a.num_rows, a.count
        upper = carray(pointer(a.upper), (count, num_pairs), np.float32)
        chosen = carray(pointer(a.chosen), (num_pairs,), np.uint8)
        reached = np.empty(count, np.float32)
        for row in range(count):
            reached[row] = highest(carray(pointer(a.lower + 4 * row * num_pairs), (num_pairs,), np.int32))[0]
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for pair in range(first, stop):
                may = np.uint8(0)
                for row in range(count):
                    may |= np.uint8(upper[row, pair] >= reached[row])
                chosen[pair] = may  # written once: others may read it already

    return worker


_SOURCES = (
    "..packed",
    "bound_vectors",
    "byte_products",
    "call",
    "claims",
    "code_words",
    "digits",
    "exponential",
    "features",
    "intrinsics",
    "sampling",
    "tile_product",
    "vectors",
    "walk",
)
_choose = RowFunction(partial(_choose_worker, digest_of(*_SOURCES)), _CHOOSE, 1.0, is_idempotent=True)
FUNCTIONS = (_choose,)
