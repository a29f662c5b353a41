"""Linear layers on CPU: every weight is read once, at memory speed, until there is more to multiply than to read.

A step that decodes M requests multiplies M rows with each weight matrix. That is a matter of memory, not of
arithmetic, until M is some tens; the library's GEMM, made for large M, then reaches a fraction of the bandwidth. Two
kernels take its place:

    few_rows    a sum in all lanes of a vector
    many_rows   a sum in one lane, which is one row's, or in a matrix tile

Weights come in three precisions:

    float32     multiplied and added in float32
    bfloat16    x as well; products and sums in float32
    int8        x in 16 bits of its row's largest (`digits`), products and sums in whole numbers

A CPU on which no instruction for bfloat16 or int8 is faster than that multiplies them as float32. The library's product
of a prompt in bfloat16 takes two to six times as long on x86; elsewhere it was not measured, and is not replaced.

A row's result has the same bits whatever rows are beside it, among as many rows as one kernel takes, and always of int8
in digits: sums of numbers that are not whole are added in another order in each of `few_rows`, `many_rows` and the
library.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import few_rows, many_rows
from .features import IS_WIDE, dots_are_fast, library_is_slow
from .recording import as_one_action
from .tile_product import TILE
from .tiles import FORMATS, TILE_ROWS, best_format
from .turned_tiles import products

# The most rows for `few_rows`, by what multiplies more of them in `many_rows`.
FEW_ROWS = {"tdpbf16ps": 4, "tdpbssd": 4, "bfloat16 dot": 20, "int8 dot": 20, "float32": 24 if IS_WIDE else 12}
MAX_ROWS_BFLOAT16 = 48  # for `few_rows`, of weights that do not fit `many_rows` and are not widened
_COMPILED = (torch.float32, torch.bfloat16)
_WIDENED_ROWS = 4096  # of a weight at once


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    if x.dtype not in _COMPILED or x.dtype != weight.dtype or len(x) == 0 or not _alike(x, bias):
        return F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        if _fits(x, weight, "float32", FEW_ROWS["float32"]):
            return few_rows.linear("float32", x, weight, None, bias)
        return many_rows.linear(x, weight, None, bias) if _is_many(x, weight) else F.linear(x, weight, bias)
    few = FEW_ROWS["float32"] if _widens_bfloat16() else MAX_ROWS_BFLOAT16
    if _is_many(x, weight):
        return many_rows.linear(x, weight, None, bias)
    if _fits(x, weight, _bfloat16(), few):
        return few_rows.linear(_bfloat16(), x, weight, None, bias)
    if _widens_bfloat16() and len(x) > few:
        return _widened(x, weight, None, bias, torch.float32)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_int8`."""
    if x.dtype not in _COMPILED or len(x) == 0 or not _alike(x, bias):
        return _widened(x, weight, scales, bias, torch.float32)
    in_digits = _int8() == "int8 dot"
    whole = len(weight) // TILE * TILE
    if in_digits and 0 < whole < len(weight) and many_rows.fits(weight[:whole]):
        biases = (None, None) if bias is None else (bias[:whole], bias[whole:])
        most = linear_int8(x, weight[:whole], scales[:whole], biases[0])
        return torch.cat([most, _widened(x, weight[whole:], scales[whole:], biases[1], torch.float32)], dim=1)
    if _is_many(x, weight):
        return many_rows.linear(x, weight, scales, bias)
    if in_digits and _fits(x, weight, "int8 dot", FEW_ROWS[products(torch.int8)[0]]):
        return few_rows.linear("int8 dot", x, weight, scales, bias)
    if x.dtype == torch.float32 and _fits(x, weight, "int8", FEW_ROWS["float32"]):
        return few_rows.linear("int8", x, weight, scales, bias)
    return _widened(x, weight, scales, bias, torch.float32)


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`. CPUs have no instruction that reads such numbers: less memory, not more speed."""
    return _widened(x, weight, scales, bias, x.dtype)


def _widened(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplied in `dtype`, after a copy of each part of the weight. One action, as a graph would keep the copies."""
    out = x.new_empty(x.shape[0], weight.shape[0])

    def multiply(x: Tensor, out: Tensor) -> None:
        wide_x = x.to(dtype)
        for start in range(0, weight.shape[0], _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            wide = weight[rows].to(dtype)
            product = F.linear(wide_x, wide if scales is None else wide.mul_(scales[rows, None].to(dtype)))
            out[:, rows] = product if bias is None else product.add_(bias[rows].to(dtype))

    as_one_action(multiply, x.contiguous(), out)
    return out


def _is_many(x: Tensor, weight: Tensor) -> bool:
    """Whether `many_rows` is the fastest for so many rows."""
    if not many_rows.fits(weight):
        return False
    product = products(weight.dtype)[0]
    return FEW_ROWS[product] < len(x) <= most_rows(product, weight.dtype)


@cache
def most_rows(product: str, dtype: torch.dtype) -> int:
    """The most rows for `many_rows`. With more, that of the library is as fast, after a copy or without."""
    if product != "float32" or library_is_slow() or (IS_WIDE and dtype != torch.float32):
        return sys.maxsize
    return 64 if dtype == torch.float32 and not IS_WIDE else 256


@cache
def _bfloat16() -> str:
    return "bfloat16 dot" if dots_are_fast() else "bfloat16"


def _widens_bfloat16() -> bool:
    return products(torch.bfloat16)[:1] == ("float32",)


@cache
def _int8() -> str:
    return best_format("int8 dot", "int8")


def _alike(x: Tensor, bias: Tensor | None) -> bool:
    return bias is None or bias.dtype == x.dtype


def _fits(x: Tensor, weight: Tensor, name: str, max_rows: int) -> bool:
    form = FORMATS[name]
    in_rows = 0 < x.shape[0] <= max_rows
    return in_rows and x.shape[1] % form.step == 0 and weight.shape[0] % TILE_ROWS == 0 and weight.is_contiguous()
