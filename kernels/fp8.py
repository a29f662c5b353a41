"""Keys and values of a cache in 8 bits: float8 e4m3fn (https://arxiv.org/abs/2209.05433), times a scale per layer.

`quantize` says what a number becomes; backends that have code of their own for it store the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
BYTES = torch.uint8  # few operations of any backend know the type


def quantize(x: Tensor, scale: float) -> Tensor:
    """The nearest number to x / scale, ties to even; what is beyond the largest becomes the largest."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(DTYPE)


def stored(x: Tensor, cache: Tensor, scale: float) -> Tensor:
    """What a cache keeps of x: bytes, where it has bytes."""
    return quantize(x, scale).view(BYTES) if cache.dtype == BYTES else x
