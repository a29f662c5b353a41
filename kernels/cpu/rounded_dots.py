"""`byte_dots` of x in 8 bits: each number is a whole multiple of 1/127 of the largest of those that meet the same
scales, one digit instead of two or three, of which each takes an instruction; and a weight's codes are what they were.
(Codes of 6 and 8 bits take AVX2 as long with one digit as with two; the results are those of other CPUs.)"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import Packing
from .byte_dots import DTYPES, fits, lay_out, multiply
from .byte_products import ONE_DIGIT

__all__ = ["DTYPES", "fits", "lay_out", "linear", "linear_gated"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype) -> Tensor:
    """See `byte_dots.linear`."""
    out = x.new_empty(len(x), len(weight), dtype=out_dtype)
    multiply(x, weight, bias, packing, out, num_digits=ONE_DIGIT)
    return out


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, activation: str) -> Tensor:
    """See `byte_dots.linear_gated`."""
    out = x.new_empty(len(x), len(weight) // 2)
    multiply(x, weight, bias, packing, out, activation, num_digits=ONE_DIGIT)
    return out
