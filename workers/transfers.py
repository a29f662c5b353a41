"""Numbers of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The same numbers on the device; on CPU, `array` itself. Nobody waits for what is under way there: from memory
    that is not page-locked, torch would (`cudaMemcpyAsync` and `cudaStreamSynchronize` in its copies)."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # torch keeps the page-locked memory until the copy has read it
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
