# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Rows of float32 or bfloat16 in memory, into float32 scratch and back. For compiled functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from .intrinsics import narrowed, pointer, widened


@njit(error_model="numpy")
def load_row(address: int, count: int, short: int, row: Any) -> None:
    """`count` numbers at an address into float32 scratch; `short` where they are bfloat16."""
    if short:
        bits = carray(pointer(address), (count,), np.uint16)
        for i in range(count):
            row[i] = widened(bits[i])
    else:
        values = carray(pointer(address), (count,), np.float32)
        for i in range(count):
            row[i] = values[i]


@njit(error_model="numpy")
def store_row(row: Any, count: int, short: int, address: int) -> None:
    """The way back, rounded to nearest, ties to even. NaN stays NaN."""
    if short:
        bits = carray(pointer(address), (count,), np.uint16)
        for i in range(count):
            bits[i] = narrowed(row[i], bits[i])
    else:
        values = carray(pointer(address), (count,), np.float32)
        for i in range(count):
            values[i] = row[i]
