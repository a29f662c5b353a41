# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product with a packed weight (`kernels.packed`) in float32, compiled with Numba and run on all threads.

What decides is arithmetic, not memory: a packed weight is read in a seventh to a quarter of the time that its numbers
would take. So 16 rows of it, a panel, are packed again when they are loaded, such that a number of each is one vector:

    codes   [block][vector][row of the panel][8 numbers]   --unpack-->   [number][row of the panel] float32

Few rows of x are multiplied with numbers as they are unpacked, in registers. With more, a thread unpacks the numbers of
a class, SPAN / 4 of one or two panels, which then stand in its first cache, and multiplies them with all rows of x.

Sums take their products in the order of `tile_product`, so that results have the bits that the same numbers have in
`few_rows` and `many_rows`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing, join_blocks, panels_of
from .claims import enter, take_item
from .intrinsics import pointer
from .many_rows import CHUNK_BYTES, turn_rows
from .packed_call import (
    BIAS,
    CLAIMS,
    IN_FEATURES,
    NUM_ARGUMENTS,
    NUM_ROWS,
    NUM_THREADS,
    OUT,
    OUT_FEATURES,
    WEIGHT,
    X,
    run_product,
)
from .panel_vectors import (
    CODES,
    FEW,
    PANEL,
    SIZES,
    VECTOR_BYTES,
    WIDTH,
    finish,
    multiply,
    multiply_few,
    size_of,
    unpack,
)
from .sources import digest_of
from .tile_product import CLASSES, IN_A_ROW, STEP_BYTES, TILE

DTYPES: tuple[torch.dtype, ...] = (torch.float32,)  # of x
SPAN = CLASSES * IN_A_ROW  # numbers of a row, whose sums are added to the totals together

_SOURCES = (
    *(
        "call",
        "claims",
        "digits",
        "features",
        "intrinsics",
        "matrix_tiles",
        "many_rows",
        "packed_call",
        "panel_vectors",
    ),
    *("rows", "tile_product", "tiles", "turned_tiles", "vectors"),
)


def fits(out_features: int, in_features: int) -> bool:
    """Whether a packed weight of this shape can be multiplied so."""
    return out_features % PANEL == 0 and out_features >= PANEL * WIDTH and in_features % BLOCK == 0


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order that `linear` reads: as many bytes. [num_rows, row_bytes] uint8."""
    halves, codes = panels_of(rows, packing, PANEL)
    if packing.bits == 8:
        return join_blocks(halves, codes.permute(0, 2, 3, 1)).view(rows.shape)
    numbers = torch.cat([codes & 15, codes >> 4], dim=3).unflatten(3, (-1, CODES))
    pairs = numbers[..., ::2] | numbers[..., 1::2] << 4  # [panel, row, block, vector, 4 bytes]
    return join_blocks(halves, pairs.permute(0, 2, 3, 1, 4)).view(rows.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias, float32, as `out_dtype` is.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    num_rows, in_features = x.shape
    out, are_few = x.new_empty(num_rows, weight.shape[0], dtype=out_dtype), num_rows <= FEW[-1]
    x = x.contiguous() if are_few else turn_rows(x)
    least_rows = None if are_few else FEW[-1] + 1
    run_product(_entry(packing.name), x.data_ptr(), in_features, weight, bias, out, least_rows)
    return out


@cache
def _entry(packing: str) -> Any:
    return _worker(packing, f"{digest_of(*_SOURCES)} {CHUNK_BYTES} {PACKINGS[packing]}").ctypes


def _worker(packing: str, sources: str) -> Any:
    panel_block = PANEL * PACKINGS[packing].block_bytes

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, in_features = a[NUM_ROWS], a[OUT_FEATURES], a[IN_FEATURES]
        num_threads, claims, panel_bytes = a[NUM_THREADS], a[CLAIMS], in_features // BLOCK * panel_block
        thread, x_row, out_row, are_few = enter(claims), 4 * in_features, 4 * out_features, num_rows <= FEW[-1]
        num_chunks = (num_rows * x_row + CHUNK_BYTES - 1) // CHUNK_BYTES
        chunk_rows = (num_rows + num_chunks * TILE - 1) // (num_chunks * TILE) * TILE
        num_chunks = (num_rows + chunk_rows - 1) // chunk_rows  # each has some rows
        width = 1 if are_few else WIDTH  # panels at a time
        num_panels, totals_row = out_features // PANEL, VECTOR_BYTES * width
        num_blocks = (num_panels + width - 1) // width
        memory = np.empty((0 if are_few else IN_A_ROW * totals_row) + STEP_BYTES, np.int8)
        numbers = (memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        more_memory = np.empty((chunk_rows + SIZES[0]) * totals_row + STEP_BYTES, np.int8)
        totals = (more_memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_blocks * num_chunks, thread, item, lap)
            if item < 0:
                break
            # The last panels may be multiplied twice, by two threads even: to the same bits.
            chunk, first = item // num_blocks, min(item % num_blocks * width, num_panels - width)
            row = chunk * chunk_rows
            count = min(chunk_rows, num_rows - row)
            x, panel = a[X] + row * x_row, a[WEIGHT] + first * panel_bytes
            for k in range(0, in_features, SPAN):
                num_k, block = min(SPAN, in_features - k), panel + k // BLOCK * panel_block
                if are_few:
                    multiply_few(packing, count, block, x + 4 * k, x_row, num_k, k == 0, totals)
                    continue
                class_k = num_k // CLASSES
                for i in range(CLASSES):
                    unpack(packing, i, block, panel_bytes, num_k, numbers)
                    is_first, done = k == 0 and i == 0, 0
                    while done < count:
                        left = min(count, (done // TILE + 1) * TILE) - done
                        rows = x + ((done // TILE * in_features + k + i * class_k) * TILE + done % TILE) * 4
                        size = size_of(left)
                        multiply(size, numbers, rows, class_k, is_first, totals + done * totals_row)
                        done += size
            column = 4 * PANEL * first
            bias = a[BIAS] + column if a[BIAS] != 0 else 0
            finish(totals, width, count, bias, a[OUT] + row * out_row + column, out_row)
        memory[0] = more_memory[0] = 0  # they live until here: Numba does not see who has their addresses

    return worker
