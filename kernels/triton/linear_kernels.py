# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""The kernels of linear layers: of one row, and of weights in 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from .chain import wait_for_others
from .numbers import scaled_dot, widen

TILES_OF_ROWS = tl.constexpr(8)  # of x, that are multiplied with a tile of the weight one after the other


@triton.jit
def row_kernel(
    out,  # [out_features]
    x,  # [in_features]
    weight,  # [out_features, in_features] the dtype of x
    bias,  # [out_features], or anything
    out_features,
    in_features,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program takes BLOCK_N rows of the weight. There is nothing here but to read it: the first part is asked for
    before the kernels before are done, and each next one before the last is multiplied."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + tl.minimum(feature, out_features - 1).to(tl.int64)[:, None] * weight_stride
    part = tl.load(rows + k[None, :], mask=(k < in_features)[None, :], other=0.0)
    wait_for_others(CHAINED)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        after = start + BLOCK_K + k
        next_part = tl.load(rows + after[None, :], mask=(after < in_features)[None, :], other=0.0)
        numbers = tl.load(x + start + k, mask=start + k < in_features, other=0.0)
        acc += part.to(tl.float32) * numbers.to(tl.float32)[None, :]
        part = next_part
    total = tl.sum(acc, axis=1)
    inside = feature < out_features
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + feature, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def weight8_kernel(
    out,  # [num_rows, out_features], contiguous
    x,  # [num_rows, in_features]
    weight,  # [out_features, in_features] int8, or bytes of e4m3
    scales,  # [out_features] float32, or [in_features / GROUP, out_features]
    bias,  # [out_features], or anything
    num_rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,  # see `widen`
    GROUP: tl.constexpr,  # see `scaled_dot`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program takes BLOCK_M rows of x and BLOCK_N of the weight. Scales multiply sums, of a whole row or of GROUP
    products; products are those of the numbers as they are stored."""
    wait_for_others(CHAINED)
    # Neighbours share rows of the weight, and further ones those of x, so that both come from the L2 cache: all tiles
    # of a group of rows before the next group.
    column_tiles = tl.cdiv(out_features, BLOCK_N)
    group = tl.program_id(0) // (TILES_OF_ROWS * column_tiles)
    in_group = tl.program_id(0) % (TILES_OF_ROWS * column_tiles)
    tiles_of_rows = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - group * TILES_OF_ROWS, TILES_OF_ROWS)
    row = (group * TILES_OF_ROWS + in_group % tiles_of_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = in_group // tiles_of_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows too many are not read, as a few of them would be the same one, which all programs would ask for at once.
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    row_used = (row < num_rows)[:, None]
    weight_rows = weight + tl.minimum(feature, out_features - 1).to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < in_features)[None, :]
        a = tl.load(x_rows + k[None, :], mask=row_used & inside, other=0.0)
        b = tl.load(weight_rows + k[None, :], mask=inside, other=0)
        b = tl.trans(widen(b, a.dtype, WEIGHT_FORMAT, UPCAST))
        own = scales + (start // GROUP if GROUP > 0 else 0) * out_features + feature
        acc = scaled_dot(a, b, acc, own, feature < out_features, GROUP, PRECISION, UPCAST)
    if GROUP == 0:
        acc = acc * tl.load(scales + feature, mask=feature < out_features, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + feature, mask=feature < out_features, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * out_features + feature[None, :]
    mask = (row < num_rows)[:, None] & (feature < out_features)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)
