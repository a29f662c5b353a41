# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product of rows with a packed weight (`kernels.packed`) by products of bytes. For CPUs that have dot products of
them in vectors of 64 bytes and no matrix tiles, and for those with AVX2 and no wider vectors (`byte_products`).

A code is a byte, and numbers of x that meet the same scales, 32 or 16, become whole numbers, digits to the base 256:

    x  --split-->  digits  --times the codes of 32 rows of the weight-->  sums  --times scales-->  totals

    float32     three digits
    bfloat16    two: what x was rounded to before is off by 2^-9 of its largest numbers

Sums of whole numbers are exact. What is rounded is x, to about 2^-23 of the largest of them or less (to
2^-127 where that is below 2^-104; with two digits 2^-15, 2^-127 and 2^-112), and totals, to float32: in float32, where
blocks are some, errors are no larger than those of products of float32. Sums of codes, which are not scaled yet, are
finite while no number of x is above 2^115.

A dot product multiplies four digits in each lane, so that three digits take three quarters of the products of float32;
to scale the sums takes the rest. What is won is that codes stay codes: 64 are unpacked by a mask, where 16 numbers take
four instructions. (With AVX2, x in float32 and codes of 6 and 8 bits are multiplied as float32.)

On two cores of a Zen 4 with AVX-512 it is no slower than `panels` for any number of rows. With AVX2 alone, eight rows
and fewer take less time; many take a fourteenth more in float32, and three tenths less in bfloat16
(tests/benchmarks/HISTORY.md). On others it was not measured.

x and results are float32 or bfloat16. A row's result does not depend on the rows beside it.
Panels lie as `codes` has them, but for their codes: four numbers of a row lie together.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing, lay_panels
from .byte_products import ONE_DIGIT, THREE_DIGITS, TWO_DIGITS, Way
from .byte_rows import ROWS, place_of_row, split_row, words_at, x_block_bytes
from .byte_vectors import multiply_packed, multiply_unpacked, unpack, unpacked_bytes
from .call import Arguments, RowFunction, enter_rows, take_rows
from .claims import enter, even_chunks, first_item, take_item
from .code_results import BIASES, BIASES_STEP, COUNT, NUM_WORDS, RESULTS, RESULTS_STEP, TOTALS, finish
from .code_words import TOTALS_BYTES, WIDTH, fetch_pair, fetch_to_write, fits
from .intrinsics import pointer
from .kv_prefetch import has_time, new_cursor, point_to_share
from .packed_call import (
    BIAS,
    CHOSEN,
    CHUNK,
    CLAIMS,
    IN_FEATURES,
    NUM_ARGUMENTS,
    NUM_ROWS,
    NUM_THREADS,
    OUT,
    OUT_FEATURES,
    SHARE,
    WEIGHT,
    X,
    run_product,
)
from .sources import digest_of, filed_as
from .tile_product import STEP_BYTES, TILE

__all__ = ["DTYPES", "LOST", "bounds_pay", "fits", "lay_out", "linear", "linear_gated", "multiply"]

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # of x
_DIGITS = {torch.float32: THREE_DIGITS, torch.bfloat16: TWO_DIGITS}
# What rounding takes from x, by the length of it, at most: of each of a block's 32 numbers half a unit. (What it takes
# from float32 is less than what products of float32 may be off by. Of blocks below 2^-112 it may take more, but what
# `likeliest` rounds x to is nothing from 2^-68 downwards, so that it tells no tokens apart, and 2^-127 is nothing
# beside what this is of larger ones.)
LOST = {torch.float32: 0.0, torch.bfloat16: 1.01 * 2.0**-15 * 32**0.5}

_SOURCES = (
    "..packed",
    "byte_products",
    "byte_rows",
    "byte_vectors",
    "call",
    "claims",
    "code_results",
    "code_words",
    "digits",
    "exponential",
    "features",
    "intrinsics",
    "kv_prefetch",
    "matrix_tiles",
    "packed_call",
    "rows",
    "tile_product",
    "tiles",
    "turned_tiles",
    "vectors",
    "walk",
)

_SPLIT = Arguments("x", "in_features", "digits")
_SPLIT_TYPE = _SPLIT.dtype
_SPLIT_NS = 0.3  # about what an element takes


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order that `linear` reads: as many bytes. [num_rows, row_bytes] uint8."""
    return lay_panels(rows, packing, TILE, lambda codes: codes.unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias. x and bias are both float32 or bfloat16; `out_dtype` is theirs, or float32.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    multiply(x, weight, bias, packing, out)
    return out


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, activation: str) -> Tensor:
    """activation(gate) * up, in the dtype of x, where `linear` gives gates, then as many ups: see
    `codes.linear_gated`."""
    out = x.new_empty(len(x), len(weight) // 2)
    multiply(x, weight, bias, packing, out, activation)
    return out


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packing: Packing,
    out: Tensor,
    activation: str = "",
    *,
    num_digits: int | None = None,
    chosen: Tensor | None = None,
) -> None:
    """`linear` or `linear_gated` into `out`. `num_digits`: of x, if not those of its dtype; `chosen`: see
    `run_product`."""
    x, (num_rows, in_features), has_short_x = x.contiguous(), x.shape, x.dtype == torch.bfloat16
    num_digits = num_digits or _DIGITS[x.dtype]
    entry = _entry(packing.name, num_digits, has_short_x, out.dtype == torch.bfloat16, activation)
    run = partial(run_product, entry, chosen=chosen, fetches=has_time(num_rows, num_digits))
    if num_rows <= ROWS:
        run(x.data_ptr(), in_features, weight, bias, out, most_rows=ROWS)
        return
    row_bytes = in_features // BLOCK * x_block_bytes(Way(packing, num_digits))
    rows_read = -(-num_rows // ROWS) * ROWS  # whatever is behind the last
    digits = torch.empty(rows_read * row_bytes + STEP_BYTES, dtype=torch.int8)
    first = digits.data_ptr() + -digits.data_ptr() % STEP_BYTES  # a block is then whole lines of the cache
    _splitter(packing.name, num_digits, has_short_x)(num_rows, in_features, x.data_ptr(), in_features, first)
    run(first, in_features, weight, bias, out, least_rows=ROWS + 1)


def bounds_pay(packing: Packing, dtype: torch.dtype) -> bool:
    """Whether to bound products (`likeliest`), which takes one digit of x, takes less than to compute them: where it
    has fewer bytes so. (Two digits are one word.)"""
    return words_at(Way(packing, ONE_DIGIT)) < words_at(Way(packing, _DIGITS[dtype]))


@cache
def _splitter(packing: str, num_digits: int, has_short_x: bool) -> RowFunction:
    compiled = partial(_split_worker, packing, num_digits, 2 if has_short_x else 4, _sources(packing))
    return RowFunction(compiled, _SPLIT, _SPLIT_NS, is_idempotent=True)


@cache
def _entry(packing: str, num_digits: int, has_short_x: bool, is_short: bool, activation: str) -> Any:
    """`is_short`: results are bfloat16."""
    return _worker(packing, num_digits, has_short_x, is_short, activation, _sources(packing)).ctypes


def _sources(packing: str) -> str:
    return f"{digest_of(*_SOURCES)} {PACKINGS[packing]}"


def _split_worker(packing: str, num_digits: int, x_bytes: int, sources: str) -> Any:
    block_bytes = x_block_bytes(Way(PACKINGS[packing], num_digits))

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, num_digits, x_bytes)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _SPLIT_TYPE)[0]
        num_blocks, thread, item, lap = a.in_features // BLOCK, enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                target = a.digits + place_of_row(row, num_blocks, block_bytes)
                split_row(packing, num_digits, x_bytes, a.x + row * a.in_features * x_bytes, num_blocks, target)

    return worker


def _worker(packing: str, num_digits: int, has_short_x: bool, is_short: bool, activation: str, sources: str) -> Any:
    way, is_gated, x_bytes = Way(PACKINGS[packing], num_digits), activation != "", 2 if has_short_x else 4
    panel_block, size, bias_bytes = way.kind.panel_block_bytes(TILE), 2 if is_short else 4, TILE * x_bytes
    block_bytes, block_unpacked = x_block_bytes(way), unpacked_bytes(way)
    column_bytes = TILE * size * (1 if is_gated else WIDTH)  # of a row of results that are computed together

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, num_digits, has_short_x, is_short, activation)
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, in_features = a[NUM_ROWS], a[OUT_FEATURES], a[IN_FEATURES]
        num_blocks = in_features // BLOCK
        num_threads, claims, panel_bytes = a[NUM_THREADS], a[CLAIMS], num_blocks * panel_block
        thread, x_row, out_row = enter(claims), num_blocks * block_bytes, out_features * size
        num_chunks = even_chunks((num_rows * x_row + a[CHUNK] - 1) // a[CHUNK], num_rows, num_threads)
        chunk_rows = (num_rows + num_chunks * ROWS - 1) // (num_chunks * ROWS) * ROWS
        num_chunks = (num_rows + chunk_rows - 1) // chunk_rows  # each has some rows
        num_panels = out_features // TILE  # of results
        num_pairs = num_panels if is_gated else (num_panels + WIDTH - 1) // WIDTH
        step = num_panels if is_gated else 1  # to the panel that is multiplied with one: the next, or that of the ups
        next_pair = panel_bytes if is_gated else WIDTH * panel_bytes
        panel_step, bias_step, are_few = step * panel_bytes, step * bias_bytes, num_rows <= ROWS
        own_bytes = block_unpacked + ROWS * x_row if are_few else num_blocks * block_unpacked
        own = np.empty(TOTALS_BYTES + own_bytes + STEP_BYTES, np.uint8)
        totals = (own.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        unpacked, digits = totals + TOTALS_BYTES, a[X]
        if are_few:  # each thread for itself: nobody waits
            if a[CHOSEN] == 0:
                pair = first_item(num_threads, num_pairs, thread)
                fetch_pair(a[WEIGHT] + pair * next_pair, panel_bytes, panel_step)
            digits = unpacked + block_unpacked
            for i in range(num_rows):
                row = a[X] + i * in_features * x_bytes
                split_row(
                    packing, num_digits, x_bytes, row, num_blocks, digits + place_of_row(i, num_blocks, block_bytes)
                )
        results = np.empty(NUM_WORDS, np.int64)  # see `code_results`
        results[TOTALS], results[BIASES_STEP], results[RESULTS_STEP] = totals, bias_step, out_row
        cursor = new_cursor()
        cursor_at = np.int64(cursor.ctypes.data)
        chooses, chosen = a[CHOSEN] != 0, carray(pointer(a[CHOSEN]), (num_pairs,), np.uint8)
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_pairs * num_chunks, thread, item, lap)
            if item < 0:
                break
            # The last panels may be multiplied twice, by two threads even: to the same bits.
            chunk, pair = item // num_pairs, item % num_pairs
            if chooses and chosen[pair] == 0:
                continue
            point_to_share(cursor, address + 8 * SHARE, num_threads, item, num_pairs * num_chunks)
            first = pair if is_gated else min(WIDTH * pair, num_panels - WIDTH)
            panel, column = a[WEIGHT] + first * panel_bytes, first * TILE * size
            results[BIASES] = a[BIAS] + first * bias_bytes if a[BIAS] != 0 else 0
            row, end = chunk * chunk_rows, min((chunk + 1) * chunk_rows, num_rows)
            if not are_few:
                unpack(packing, num_digits, panel, panel_step, num_blocks, unpacked)
            while row < end:
                x, count = digits + place_of_row(row, num_blocks, block_bytes), min(ROWS, end - row)
                out = a[OUT] + row * out_row + column
                fetch_to_write(out, out_row, count, column_bytes)
                if are_few:
                    multiply_packed(
                        packing, num_digits,
                        panel, panel_step, num_blocks, unpacked, x, count, totals, cursor_at,
                    )  # fmt: skip
                else:
                    multiply_unpacked(
                        packing, num_digits,
                        unpacked, num_blocks, x, count, totals, panel + next_pair, panel_step, cursor_at,
                    )  # fmt: skip
                results[COUNT], results[RESULTS] = count, out
                finish(activation, is_short, has_short_x, results.ctypes.data)
                row += count
        own[0] = results[0] = cursor[0] = 0  # they live until here: Numba does not see who has their addresses

    return worker
