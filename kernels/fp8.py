"""Keys and values of a cache in 8 bits: float8 e4m3fn (https://arxiv.org/abs/2209.05433), times a scale per layer.

Numbers are quantized here for all backends, so that they differ in nothing they store.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0


def quantize(x: Tensor, scale: float) -> Tensor:
    """The nearest number to x / scale, ties to even; what is beyond the largest becomes the largest."""
    return (x.float() / scale).clamp_(-LARGEST, LARGEST).to(DTYPE)
