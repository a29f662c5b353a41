# mypy: disable-error-code="attr-defined, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Numbers become e4m3fn, the bits that `kernels.fp8` stores. For compiled functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from ..fp8 import LARGEST
from .intrinsics import pointer
from .rows import load_row

_SIGN = np.uint32(1 << 31)
_SUBNORMAL = np.uint32(121 << 23)  # the least normal number's exponent, 2^-6, in float32: below, steps are of one size
_STEPS = np.float32(1 << 9)  # of those in 1
_MOST = np.float32(LARGEST)


@njit(error_model="numpy")
def store_float8(address: int, count: int, short: int, scale: float, row: Any, target: int) -> None:
    """`count` numbers at an address, bfloat16 where `short`, else float32, divided by a scale (float32), to the nearest
    with ties to even; what is beyond the largest becomes the largest, and NaN stays one. `row`: float32 scratch."""
    load_row(address, count, short, row)
    bits, codes = row.view(np.uint32), carray(pointer(target), (count,), np.uint8)
    for i in range(count):
        number = row[i] / scale
        number = _MOST if number > _MOST else number
        row[i] = -_MOST if number < -_MOST else number
    for i in range(count):
        sign = bits[i] & _SIGN
        magnitude = bits[i] ^ sign
        odd = (magnitude >> np.uint32(20)) & np.uint32(1)
        normal = (magnitude - np.uint32(120 << 23) + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
        subnormal = np.uint32(np.rint(abs(row[i]) * _STEPS)) if magnitude < _SUBNORMAL else np.uint32(0)
        code = subnormal if magnitude < _SUBNORMAL else normal
        code = np.uint32(0x7F) if magnitude > np.uint32(0x7F800000) else code
        codes[i] = np.uint8(code | (sign >> np.uint32(24)))
