# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product with a packed weight (`kernels.packed`) in float32, compiled with Numba and run on all threads; x may be
bfloat16, which becomes float32.

What decides is arithmetic, not memory: a packed weight is read in a seventh to a quarter of the time that its numbers
would take. So 16 rows of it, a panel, are packed again when they are loaded, such that a number of each is one vector:

    codes   [block][vector][row of the panel][8 numbers]   --unpack-->   [number][row of the panel] float32

That is for codes of 4 bits. Of 6 bits, vectors of the lower four are followed by vectors of the upper two, which have
16 numbers; of 8 bits, a vector is bytes of one number.

Few rows of x are multiplied with numbers as they are unpacked, in registers. With more, a thread unpacks the numbers of
a class, SPAN / 4 of one or two panels, which then stand in its first cache, and multiplies them with all rows of x.

Sums take their products in the order of `tile_product`, so that results have the bits that the same numbers have in
`few_rows` and `many_rows`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing, codes_of, in_bytes, lay_panels
from .claims import enter, take_item
from .features import IS_WIDE
from .intrinsics import pointer
from .many_rows import turn_rows
from .packed_call import (
    BIAS,
    CHUNK,
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
    widen_rows,
)
from .sources import digest_of, filed_as
from .tile_product import CLASSES, IN_A_ROW, STEP_BYTES, TILE
from .vectors import LANES

# Of x, where that pays: to unpack numbers for 4 rows in bfloat16 takes narrow vectors longer (it was measured with
# AVX2, whose products are others now) than to read them unpacked.
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16) if IS_WIDE else (torch.float32,)
SPAN = CLASSES * IN_A_ROW  # numbers of a row, whose sums are added to the totals together
assert all(SPAN % kind.unit == 0 for kind in PACKINGS.values()), "a span begins with what its blocks share"

_SOURCES = (
    *(
        "..packed",
        "call",
        "claims",
        "code_words",
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

    def in_vectors(codes: Tensor) -> Tensor:
        if packing.bits == 8:
            return codes.permute(0, 2, 3, 1)
        numbers = codes_of(codes, packing)
        fields = [(numbers & 15, 4)] + ([(numbers >> 4, 2)] if packing.bits == 6 else [])
        # [panel, block, vector, row, 4 bytes]
        vectors = [
            in_bytes(field.unflatten(3, (-1, 4, 8 // bits)).unbind(5), bits).permute(0, 2, 3, 1, 4)
            for field, bits in fields
        ]
        return torch.cat(vectors, dim=2)

    return lay_panels(rows, packing, PANEL, in_vectors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias. x and bias are both float32 or bfloat16; `out_dtype` is theirs, or float32.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    num_rows, in_features = x.shape
    out, are_few = x.new_empty(num_rows, weight.shape[0], dtype=out_dtype), num_rows <= FEW[-1]
    entry = _entry(packing.name, x.dtype == torch.bfloat16, out_dtype == torch.bfloat16)
    x = x.contiguous() if are_few else turn_rows(x)
    least, most = (1, FEW[-1]) if are_few else (FEW[-1] + 1, sys.maxsize)
    run_product(entry, x.data_ptr(), in_features, weight, bias, out, least_rows=least, most_rows=most)
    return out


@cache
def _entry(packing: str, has_short_x: bool, is_short: bool) -> Any:
    """`has_short_x`: it and the bias are bfloat16; `is_short`: results are."""
    return _worker(packing, has_short_x, is_short, f"{digest_of(*_SOURCES)} {PACKINGS[packing]}").ctypes


def _worker(packing: str, has_short_x: bool, is_short: bool, sources: str) -> Any:
    panel_block, out_size, bias_size = (
        PACKINGS[packing].panel_block_bytes(PANEL),
        2 if is_short else 4,
        2 if has_short_x else 4,
    )

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, has_short_x, is_short)
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, in_features = a[NUM_ROWS], a[OUT_FEATURES], a[IN_FEATURES]
        num_threads, claims, panel_bytes = a[NUM_THREADS], a[CLAIMS], in_features // BLOCK * panel_block
        thread, x_row, out_row, are_few = enter(claims), 4 * in_features, out_size * out_features, num_rows <= FEW[-1]
        num_chunks = (num_rows * x_row + a[CHUNK] - 1) // a[CHUNK]
        chunk_rows = (num_rows + num_chunks * TILE - 1) // (num_chunks * TILE) * TILE
        num_chunks = (num_rows + chunk_rows - 1) // chunk_rows  # each has some rows
        width = 1 if are_few else WIDTH  # panels at a time
        num_panels, totals_row = out_features // PANEL, VECTOR_BYTES * width
        num_blocks = (num_panels + width - 1) // width
        memory = np.empty((0 if are_few else IN_A_ROW * totals_row) + STEP_BYTES, np.int8)
        numbers = (memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        more_memory = np.empty((chunk_rows + SIZES[0]) * totals_row + STEP_BYTES, np.int8)
        totals = (more_memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        first_x, num_wide = a[X], num_rows * in_features if are_few and has_short_x else 0
        wide = np.empty(num_wide + LANES, np.float32)
        if num_wide > 0:
            widen_rows(first_x, num_wide, wide.ctypes.data)
            first_x = np.int64(wide.ctypes.data)  # uint64 and int64 would be a float64 together
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_blocks * num_chunks, thread, item, lap)
            if item < 0:
                break
            # The last panels may be multiplied twice, by two threads even: to the same bits.
            chunk, first = item // num_blocks, min(item % num_blocks * width, num_panels - width)
            row = chunk * chunk_rows
            count = min(chunk_rows, num_rows - row)
            x, panel = first_x + row * x_row, a[WEIGHT] + first * panel_bytes
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
            column = PANEL * first
            bias = a[BIAS] + bias_size * column if a[BIAS] != 0 else 0
            finish(
                is_short, has_short_x, totals, width, count, bias, a[OUT] + row * out_row + out_size * column, out_row
            )
        memory[0] = more_memory[0] = wide[0] = 0  # they live until here: Numba does not see who has their addresses

    return worker
