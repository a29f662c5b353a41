# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product of rows of bfloat16 with a packed weight (`kernels.packed`), by dot products of two numbers in a vector's
lanes. For CPUs that are fast at them and have no matrix tiles for bfloat16.

    up to 16 rows   codes, which bfloat16 has exactly; scales multiply the sums of a group's products, as in `codes`
    more            numbers, rounded to bfloat16: the bits are those that `many_rows` has of weights in bfloat16

Codes are unpacked as they are multiplied, in registers; numbers into memory, which is the core's second cache where
rows of the weight are not much longer than 4,096 numbers. Panels lie as `codes` has them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing
from .claims import enter, even_chunks, first_item, take_item
from .code_results import BIASES, BIASES_STEP, COUNT, NUM_WORDS, RESULTS, RESULTS_STEP, TOTALS, finish
from .code_tiles import unpack
from .code_words import TOTALS_BYTES, WIDTH, fetch_pair, fetch_to_write, fits
from .codes import lay_out
from .dot_vectors import BLOCK_BYTES, ROWS, SUMMED, multiply_codes, multiply_unpacked, sum_groups
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
from .tile_product import STEP_BYTES, TILE, TILE_BYTES

__all__ = ["DTYPES", "fits", "lay_out", "linear", "linear_gated", "multiply"]

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16,)  # of x
FEW_ROWS = 2 * ROWS  # from some more on, to unpack numbers takes less time than to scale sums

_SOURCES = (
    "..packed",
    "call",
    "claims",
    "code_results",
    "code_sums",
    "code_tiles",
    "code_words",
    "codes",
    "digits",
    "dot_vectors",
    "exponential",
    "features",
    "intrinsics",
    "kv_prefetch",
    "matrix_tiles",
    "number_sums",
    "packed_call",
    "rows",
    "tile_product",
    "tiles",
    "turned_tiles",
    "vectors",
    "walk",
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias. x and bias are bfloat16; `out_dtype` is that, or float32.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    multiply(x, weight, bias, packing, out)
    return out


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, activation: str) -> Tensor:
    """activation(gate) * up, in bfloat16, where `linear` gives gates, then as many ups: see `codes.linear_gated`."""
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
    chosen: Tensor | None = None,
) -> None:
    """`linear` or `linear_gated` into `out`. `chosen`: see `run_product`."""
    x, entry = x.contiguous(), _entry(packing.name, out.dtype == torch.bfloat16, activation)
    fetches = has_time(len(x), num_digits=2)  # bfloat16 has as many
    run_product(entry, x.data_ptr(), x.shape[1], weight, bias, out, chosen=chosen, fetches=fetches)


@cache
def _entry(packing: str, is_short: bool, activation: str) -> Any:
    """`is_short`: results are bfloat16."""
    return _worker(packing, is_short, activation, f"{digest_of(*_SOURCES)} {PACKINGS[packing]}").ctypes


def _worker(packing: str, is_short: bool, activation: str, sources: str) -> Any:
    panel_block, size = PACKINGS[packing].panel_block_bytes(TILE), 2 if is_short else 4
    has_least, per_block = PACKINGS[packing].has_least, PACKINGS[packing].num_groups
    is_gated, bias_bytes = activation != "", 2 * TILE
    column_bytes = TILE * size * (1 if is_gated else WIDTH)  # of a row of results that are computed together

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, is_short, activation)
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, num_blocks = a[NUM_ROWS], a[OUT_FEATURES], a[IN_FEATURES] // BLOCK
        num_threads, claims, panel_bytes = a[NUM_THREADS], a[CLAIMS], num_blocks * panel_block
        thread, x_row, out_row = enter(claims), num_blocks * BLOCK_BYTES, out_features * size
        num_chunks = even_chunks((num_rows * x_row + a[CHUNK] - 1) // a[CHUNK], num_rows, num_threads)
        chunk_rows = (num_rows + num_chunks * ROWS - 1) // (num_chunks * ROWS) * ROWS
        num_chunks = (num_rows + chunk_rows - 1) // chunk_rows  # each has some rows
        num_panels = out_features // TILE  # of results
        num_pairs = num_panels if is_gated else (num_panels + WIDTH - 1) // WIDTH
        step = num_panels if is_gated else 1  # to the panel that is multiplied with one: the next, or that of the ups
        next_pair = panel_bytes if is_gated else WIDTH * panel_bytes
        panel_step, bias_step, are_few = step * panel_bytes, step * bias_bytes, num_rows <= FEW_ROWS
        own = np.empty(TOTALS_BYTES + STEP_BYTES, np.uint8)
        totals = (own.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        memory = np.empty((0 if are_few else num_blocks * WIDTH * TILE_BYTES) + STEP_BYTES, np.uint8)
        unpacked = (memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        num_groups, num_sums = num_blocks * per_block, num_rows if are_few and has_least else 0
        sums_row = (num_groups + SUMMED - 1) // SUMMED * SUMMED
        x_sums, sums_step = np.empty((num_sums, sums_row), np.float32), 4 * sums_row
        if num_sums > 0 and a[CHOSEN] == 0:
            pair = first_item(num_threads, num_pairs * num_chunks, thread) % num_pairs
            fetch_pair(a[WEIGHT] + pair * next_pair, panel_bytes, panel_step)
        for i in range(num_sums):
            sum_groups(per_block, a[X] + i * x_row, num_groups, x_sums.ctypes.data + i * sums_step)
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
                unpack(packing, 1, panel, panel_step, num_blocks, unpacked)
            while row < end:
                x, count = a[X] + row * x_row, min(ROWS, end - row)
                out = a[OUT] + row * out_row + column
                fetch_to_write(out, out_row, count, column_bytes)
                if are_few:
                    sums = x_sums.ctypes.data + row * sums_step
                    multiply_codes(
                        packing, panel, panel_step, num_blocks, x, x_row, count, sums, sums_step, totals, cursor_at
                    )
                else:
                    multiply_unpacked(
                        packing, unpacked, num_blocks, x, x_row, count, totals, panel + next_pair, panel_step, cursor_at
                    )
                results[COUNT], results[RESULTS] = count, out
                finish(activation, is_short, True, results.ctypes.data)
                row += count
        # They live until here: Numba does not see who has their addresses.
        own[0] = memory[0] = results[0] = cursor[0] = 0
        x_sums[:1, :1] = 0

    return worker
