"""Linear layers for the few rows of a decode step: every weight is read once, at memory speed.

A step that decodes M requests multiplies M rows with each weight matrix. That is a matter of memory, not of
arithmetic, until M is some tens; the library's GEMM, made for large M, then reaches a fraction of the bandwidth.
`few_rows` compiles what takes its place. Weights come in three precisions:

    float32     multiplied and added in float32
    bfloat16    x as well; products and sums in float32 (`vdpbf16ps`, or widened by a shift)
    int8        x in 16 bits of its row's largest (`digits`), products and sums in whole numbers (`vpdpbusd`);
                in float32, where the CPU has no such instruction
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import digit_gemm, few_rows
from .tiles import FORMATS, TILE_ROWS, best_format, cpu_features

MAX_ROWS = 48  # with more, the library's GEMM is as fast
MAX_ROWS_AMX = 24  # of bfloat16 where the library multiplies matrix tiles
MAX_ROWS_INT8 = 32  # of int8 in digits
_DEQUANTIZED_ROWS = 4096  # of an int8 weight at once, where there are many rows of x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    if x.dtype == torch.float32:
        name, max_rows = "float32", MAX_ROWS
    else:
        name, max_rows = _bfloat16()
    if x.dtype == weight.dtype and x.dtype != torch.float16 and _fits(x, weight, name, max_rows):
        return few_rows.linear(name, x, weight, None, bias)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_int8`."""
    in_digits = _int8() == "int8 dot"
    if in_digits and x.dtype != torch.float16 and _fits(x, weight, "int8 dot", MAX_ROWS_INT8):
        return few_rows.linear("int8 dot", x, weight, scales, bias)
    if x.dtype == torch.float32 and _fits(x, weight, "int8", MAX_ROWS):
        return few_rows.linear("int8", x, weight, scales, bias)
    if in_digits and x.dtype != torch.float16 and len(x) > 0 and x.shape[1] % digit_gemm.STEP == 0:
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
def _bfloat16() -> tuple[str, int]:
    return best_format("bfloat16 dot", "bfloat16"), MAX_ROWS_AMX if "amx-bf16" in cpu_features() else MAX_ROWS


@cache
def _int8() -> str:
    return best_format("int8 dot", "int8")


def _fits(x: Tensor, weight: Tensor, name: str, max_rows: int) -> bool:
    form = FORMATS[name]
    in_rows = 0 < x.shape[0] <= max_rows
    return in_rows and x.shape[1] % form.step == 0 and weight.shape[0] % TILE_ROWS == 0 and weight.is_contiguous()
