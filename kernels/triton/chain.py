# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Kernels that follow each other closely: a launch does not wait until the one before it has drained.

From compute capability 9.0 on, a kernel may be launched while the one before it still runs ("programmatic dependent
launch", CUDA C++ Programming Guide, 2024). Until `wait_for_others` it may read what no kernel of a step writes, which
is weights (none that the kernel just before has made); there it waits until all of what came before is done, and lets
the next one in. What launches it passes `chained(device)`, and every program of it must call `wait_for_others` before
it returns: a kernel whose programs had not waited could be done before the one before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import devices


def chained(device: torch.device) -> dict[str, bool]:
    """Options of a launch: CHAINED, and what makes it one where the device can do that."""
    if (devices.capability(device) or (0, 0)) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def wait_for_others(CHAINED: tl.constexpr):
    """What the kernels before have written can be read from here on. To be called once, by all."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
