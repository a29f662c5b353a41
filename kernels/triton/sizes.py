"""Sizes of grids and tiles. Triton's functions of these names, which kernels may call as well, are slow: they were a
tenth of what the host takes for a layer that is launched kernel by kernel."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n, which is positive."""
    return 1 << (n - 1).bit_length()
