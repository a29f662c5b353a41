# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product of rows with a packed weight (`kernels.packed`) in the CPU's matrix tiles, which take bfloat16.

A code is a whole number of at most 8 bits, which bfloat16 has exactly. So its product with a part of x is exact, and
scales multiply the sums of a block's 32 products, which have one scale here (with two, `byte_dots` multiplies them):

    x  --split-->  1 or 3 parts  --times the codes of 32 rows of the weight-->  sums  --times scales-->  totals

    float32     x in three parts, which sum up to it from 2^-103 on; sums and totals in float32
    bfloat16    x as it is; likewise. Many rows, that is more than TILE of codes of 4 bits and than FUSED * TILE of
                others, are multiplied with numbers, rounded to bfloat16: they have the bits of weights in
                bfloat16

What is rounded is rounded to float32, as products of float32 are; where least numbers are stored, what is summed up is
of the size of the largest number that its block could have, and not of each. Three instructions for matrix tiles take
the place of 512 for vectors. (Henry, Tang and Heinecke, https://arxiv.org/abs/1904.06376, have float32 as three
bfloat16; there both operands are split, and six products are needed.) They take parts of x below 2^-126 for zero; and
sums of codes, which are not scaled yet, are finite while no number of x is above 2^115.

Rows of x are in groups of TILE; or of fewer, all of one size, where codes are multiplied as they are unpacked: to add
sums takes time, if a product does not. A row's result does not depend on the rows beside it, in bfloat16 as long as
they are many or are not: it takes its blocks in their order.

16 rows of a weight, a panel, lie block by block, as `packed.lay_panels` has them.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing, codes_of, in_bytes, lay_panels
from .call import Arguments, RowFunction, enter_rows, take_rows
from .claims import enter, take_item
from .code_results import BIASES, BIASES_STEP, COUNT, NUM_WORDS, RESULTS, RESULTS_STEP, TOTALS, finish
from .code_tiles import block_bytes, lay_columns, multiply, multiply_unpacked, split_row, unpack
from .code_words import FUSED, SCRATCH_BYTES, TOTALS_BYTES, WIDTH, fits, pair_of
from .exponential import GATES
from .intrinsics import pointer
from .matrix_tiles import begin, describe, end
from .number_sums import come_by_columns, have_tables
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
from .sources import digest_of, filed_as
from .tile_product import STEP_BYTES, TILE, TILE_BYTES

__all__ = ["DTYPES", "fits", "fits_gated", "lay_out", "linear", "linear_gated"]

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  # of x
_NUM_PARTS = {torch.float32: 3, torch.bfloat16: 1}

_SOURCES = (
    "..packed",
    "call",
    "claims",
    "code_results",
    "code_sums",
    "code_tiles",
    "code_words",
    "digits",
    "exponential",
    "features",
    "intrinsics",
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

_SPLIT = Arguments("x", "in_features", "parts", "num_x")
_SPLIT_TYPE = _SPLIT.dtype
_SPLIT_NS = 0.3  # about what an element takes


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order that `linear` reads: as many bytes. [num_rows, row_bytes] uint8."""

    def in_pairs(codes: Tensor) -> Tensor:
        if packing.bits == 8:  # [panel, block, pair of numbers, row, 2]
            return codes.reshape(*codes.shape[:3], -1, 2).permute(0, 2, 3, 1, 4)
        pairs = codes_of(codes, packing).unflatten(3, (-1, 2)).permute(0, 2, 3, 1, 4)  # [panel, block, pair, row, 2]
        if packing.bits == 4:
            lines = [[pair_of(packing, line, i) for line in range(4)] for i in range(4)]
            parts = [pairs[:, :, of_lines] for of_lines in lines]  # by i: [panel, block, line, row, 2]
            return torch.stack([in_bytes(parts[:2], 4), in_bytes(parts[2:], 4)], dim=5)
        halves = pairs.unflatten(2, (2, 8)).unbind(3)  # by pair of a half: [panel, block, half, row, 2]
        first, last = halves[6:]
        rests = [first & 15, first >> 4 | last >> 4 << 2, last & 15]
        words = []
        for low, high, rest in zip(halves[:6:2], halves[1:6:2], rests, strict=True):
            words.append(torch.stack([low | high << 6, high >> 2 | rest << 4], dim=5))
        return torch.stack(words, dim=3)

    return lay_panels(rows, packing, TILE, in_pairs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """x @ weight.T + bias. x and bias are both float32 or bfloat16; `out_dtype` is theirs, or float32.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    _multiply(x, weight, bias, packing, out)
    return out


def fits_gated(out_features: int, activation: str) -> bool:
    """Whether `linear_gated` can do it."""
    return out_features % (2 * TILE) == 0 and activation in GATES


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, activation: str) -> Tensor:
    """activation(gate) * up, in the dtype of x and bias, where `linear` gives gates, then as many ups. They are not
    rounded before: a panel of gates is multiplied together with its panel of ups."""
    out = x.new_empty(len(x), len(weight) // 2)
    _multiply(x, weight, bias, packing, out, activation)
    return out


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out: Tensor, activation: str = ""
) -> None:
    """Fill `out`. With an activation, the weight is of gates and then as many ups."""
    x, (num_rows, in_features) = x.contiguous(), x.shape
    num_parts, num_groups = _NUM_PARTS[x.dtype], -(-num_rows // TILE)
    parts = torch.empty(num_groups * in_features // BLOCK * block_bytes(num_parts, TILE) + STEP_BYTES, dtype=torch.int8)
    first = parts.data_ptr() + -parts.data_ptr() % STEP_BYTES  # a row of a tile is then a line of the cache
    split = _splitter(num_parts, have_tables(packing, num_parts))
    entry = _entry(packing.name, num_parts, out.dtype == torch.bfloat16, activation)
    group_size = -(-num_rows // num_groups) * in_features
    split(num_rows, group_size, x.data_ptr(), in_features, first, num_rows, per=TILE, also="num_x")
    run_product(entry, first, in_features, weight, bias, out)


@cache
def _splitter(num_parts: int, looked_up: bool) -> RowFunction:
    compiled = partial(_split_worker, num_parts, looked_up, digest_of(*_SOURCES))
    return RowFunction(compiled, _SPLIT, _SPLIT_NS, is_idempotent=True)


@cache
def _entry(packing: str, num_parts: int, is_short: bool, activation: str) -> Any:
    """What multiplies parts of x; `is_short`: its results are bfloat16."""
    sources = f"{digest_of(*_SOURCES)} {PACKINGS[packing]}"
    return _worker(packing, num_parts, is_short, activation, sources).ctypes


@njit(error_model="numpy")
def rows_of_group(num_rows: int, num_groups: int, looked_up: bool) -> int:
    """As few as there can be where codes are multiplied as they are unpacked. `looked_up`: of `have_tables`."""
    if num_groups > FUSED or come_by_columns(looked_up, num_groups):
        return TILE
    return (num_rows + num_groups - 1) // num_groups


def _split_worker(num_parts: int, looked_up: bool, sources: str) -> Any:
    x_bytes = 4 if num_parts > 1 else 2

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(num_parts, looked_up)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _SPLIT_TYPE)[0]
        group_rows = rows_of_group(a.num_x, a.num_rows, looked_up)
        block, part, x_row = block_bytes(num_parts, group_rows), group_rows * STEP_BYTES, a.in_features * x_bytes
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for group in range(first, stop):
                out = a.parts + group * (a.in_features // BLOCK) * block
                first_row = group * group_rows
                if come_by_columns(looked_up, a.num_rows):
                    lay_columns(a.x + first_row * x_row, x_row, a.num_x - first_row, a.in_features, out, block)
                    continue
                for i in range(group_rows):  # the last group may have some that are not there
                    x = a.x + min(first_row + i, a.num_x - 1) * x_row
                    split_row(num_parts, x, a.in_features, out + i * STEP_BYTES, block, part, i)

    return worker


def _worker(packing: str, num_parts: int, is_short: bool, activation: str, sources: str) -> Any:
    panel_block, size = PACKINGS[packing].panel_block_bytes(TILE), 2 if is_short else 4
    looked_up = have_tables(PACKINGS[packing], num_parts)
    is_gated, has_short_bias = activation != "", num_parts == 1
    bias_bytes = TILE * (2 if has_short_bias else 4)

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing, num_parts, is_short, activation)
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, num_blocks = a[NUM_ROWS], a[OUT_FEATURES], a[IN_FEATURES] // BLOCK
        num_threads, claims, panel_bytes = a[NUM_THREADS], a[CLAIMS], num_blocks * panel_block
        thread, out_row = enter(claims), out_features * size
        num_groups = (num_rows + TILE - 1) // TILE
        group_rows = rows_of_group(num_rows, num_groups, looked_up)
        group_bytes = num_blocks * block_bytes(num_parts, group_rows)
        num_chunks = (num_groups * group_bytes + a[CHUNK] - 1) // a[CHUNK]
        chunk_groups = max((num_groups + num_chunks - 1) // num_chunks, FUSED)
        num_chunks = (num_groups + chunk_groups - 1) // chunk_groups
        num_panels = out_features // TILE  # of results
        num_pairs = num_panels if is_gated else (num_panels + WIDTH - 1) // WIDTH
        step = num_panels if is_gated else 1  # to the panel that is multiplied with one: the next, or that of the ups
        panel_step, bias_step = step * panel_bytes, step * bias_bytes
        is_fused = num_groups <= FUSED
        own = np.empty(SCRATCH_BYTES + 2 * TOTALS_BYTES + 2 * STEP_BYTES, np.uint8)
        config = own[:STEP_BYTES]
        scratch = (own.ctypes.data + 2 * STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        totals = scratch + SCRATCH_BYTES  # of these rows, and of those before, which are stored meanwhile
        behind = np.empty(NUM_WORDS, np.int64)  # their memory: see `code_results`
        behind[BIASES_STEP], behind[RESULTS_STEP] = bias_step, out_row
        unpacked = np.empty((0 if is_fused else num_blocks * WIDTH * TILE_BYTES) + STEP_BYTES, np.uint8)
        codes = (unpacked.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        describe(config, group_rows)
        begin(own.ctypes.data)
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_pairs * num_chunks, thread, item, lap)
            if item < 0:
                break
            # The last panels may be multiplied twice, by two threads even: to the same bits.
            chunk, pair = item // num_pairs, item % num_pairs
            first = pair if is_gated else min(WIDTH * pair, num_panels - WIDTH)
            panel, column = a[WEIGHT] + first * panel_bytes, first * TILE * size
            behind[BIASES] = a[BIAS] + first * bias_bytes if a[BIAS] != 0 else 0
            behind[COUNT] = 0
            if not is_fused:
                unpack(packing, num_parts, panel, panel_step, num_blocks, codes)
            last_group = min((chunk + 1) * chunk_groups, num_groups)
            for group in range(chunk * chunk_groups, last_group, FUSED):
                count, x, row = min(FUSED, last_group - group), a[X] + group * group_bytes, group * group_rows
                found = totals + group // FUSED % 2 * TOTALS_BYTES
                if is_fused:  # all there are
                    multiply(packing, num_parts, count, group_rows, panel, panel_step, num_blocks, x, scratch, found)
                else:
                    multiply_unpacked(
                        packing, num_parts, activation, is_short, has_short_bias,
                        count, panel, panel_step, num_blocks, codes, x, scratch, found, behind.ctypes.data,
                    )  # fmt: skip
                behind[TOTALS], behind[COUNT] = found, min(count * group_rows, num_rows - row)
                behind[RESULTS] = a[OUT] + row * out_row + column
            finish(activation, is_short, has_short_bias, behind.ctypes.data)
        end()
        own[0] = unpacked[0] = behind[0] = 0  # they live until here: Numba does not see who has their addresses

    return worker
