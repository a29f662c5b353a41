# mypy: disable-error-code="untyped-decorator"
"""The exponential function, for compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@njit(fastmath={"contract"}, error_model="numpy", cache=True)
def exp(x: Any) -> Any:
    """exp(x) to 2 units of float32, in operations that vectorise; at most 2 ** 127 and at least 2 ** -126."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    whole = np.floor(x * _LOG2_E + np.float32(0.5))
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = np.float32(1.9875691500e-4)  # the polynomial of Cephes' expf on [-ln(2) / 2, ln(2) / 2]
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
