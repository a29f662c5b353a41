"""Linear layers on CPU: every weight is read once, at memory speed, until there is more to multiply than to read.

A step that decodes M requests multiplies M rows with each weight matrix. That is a matter of memory, not of
arithmetic, until M is some tens; the library's GEMM, made for large M, then reaches a fraction of the bandwidth. Two
kernels take its place:

    few_rows    in vectors: any CPU
    many_rows   in matrix tiles, where the CPU has them: more than a few rows of bfloat16 or int8, and prompts

Weights come in three precisions:

    float32     multiplied and added in float32
    bfloat16    x as well; products and sums in float32
    int8        x in 16 bits of its row's largest (`digits`), products and sums in whole numbers;
                in float32, where the CPU has no such instruction
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import digit_gemm, few_rows, many_rows, matrix_tiles
from .tiles import FORMATS, TILE_ROWS, best_format

MAX_ROWS = 128  # of float32: with more, the library's GEMM is as fast
MAX_ROWS_SHORT = 48  # of other weights
MAX_ROWS_INT8 = 32  # of int8 in digits
FEW_ROWS = 4  # what is read as fast without matrix tiles, where the CPU has them
_COMPILED = (torch.float32, torch.bfloat16)
_DEQUANTIZED_ROWS = 4096  # of an int8 weight at once, where there are many rows of x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    if x.dtype not in _COMPILED or x.dtype != weight.dtype or len(x) == 0 or not _alike(x, bias):
        return F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        if _fits(x, weight, "float32", MAX_ROWS):
            return few_rows.linear("float32", x, weight, None, bias)
    elif len(x) > FEW_ROWS and _in_matrix_tiles(weight):
        return many_rows.linear(x, weight, None, bias)
    elif _fits(x, weight, _bfloat16(), MAX_ROWS_SHORT):
        return few_rows.linear(_bfloat16(), x, weight, None, bias)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_int8`."""
    in_digits = _int8() == "int8 dot" and x.dtype in _COMPILED and len(x) > 0 and _alike(x, bias)
    if in_digits and len(x) > FEW_ROWS and _in_matrix_tiles(weight):
        return many_rows.linear(x, weight, scales, bias)
    if in_digits and _fits(x, weight, "int8 dot", MAX_ROWS_INT8):
        return few_rows.linear("int8 dot", x, weight, scales, bias)
    if x.dtype == torch.float32 and _alike(x, bias) and _fits(x, weight, "int8", MAX_ROWS_SHORT):
        return few_rows.linear("int8", x, weight, scales, bias)
    if in_digits and x.shape[1] % digit_gemm.STEP == 0:
        return digit_gemm.linear(x.contiguous(), weight, scales, bias)
    return _widened(x.float(), weight, scales, None if bias is None else bias.float()).to(x.dtype)


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`. CPUs have no instruction that reads such numbers: less memory, not more speed."""
    return _widened(x, weight, scales, bias)


def _widened(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _DEQUANTIZED_ROWS):
        rows = slice(start, start + _DEQUANTIZED_ROWS)
        out[:, rows] = F.linear(x, weight[rows].to(x.dtype).mul_(scales[rows, None].to(x.dtype)))
    return out if bias is None else out.add_(bias)


@cache
def _bfloat16() -> str:
    return best_format("bfloat16 dot", "bfloat16")


@cache
def _int8() -> str:
    return best_format("int8 dot", "int8")


def _alike(x: Tensor, bias: Tensor | None) -> bool:
    return bias is None or bias.dtype == x.dtype


def _in_matrix_tiles(weight: Tensor) -> bool:
    return matrix_tiles.are_available() and many_rows.fits(weight)


def _fits(x: Tensor, weight: Tensor, name: str, max_rows: int) -> bool:
    form = FORMATS[name]
    in_rows = 0 < x.shape[0] <= max_rows
    return in_rows and x.shape[1] % form.step == 0 and weight.shape[0] % TILE_ROWS == 0 and weight.is_contiguous()
