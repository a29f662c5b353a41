"""What the kernels ask about a GPU."""

from __future__ import annotations

from functools import cache

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU of NVIDIA; None for everything else, and in the interpreter."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return _cuda_capability(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _cuda_capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
