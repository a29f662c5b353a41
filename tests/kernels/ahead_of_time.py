"""Compiles Triton kernels for a GPU that is not there, just as they would be launched on it.

The interpreter takes what the compiler refuses: other shapes in the two branches of an `if`, a tile that does not fit
in shared memory. The compiler and NVIDIA's assembler, both part of the triton package, need no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from quire.kernels.dispatch import forced_backend
from quire.kernels.triton import devices

CAPABILITY = (9, 0)  # H100, H200
SHARED_MEMORY = 227 * 1024  # bytes that a program may have there


class _AbsentGPU:
    """As much of a driver as compiling asks for."""

    def get_current_device(self) -> str:
        return "absent"  # kernels are remembered by device: no real one may find these

    def get_current_stream(self, _device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)


@contextmanager
def compiled_launches() -> Iterator[list[Any]]:
    """Operations inside take the Triton backend; what they would launch is compiled, and collected here instead."""
    launched: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        launched.append(run(self, *args, grid=grid, warmup=True, **options))

    with pytest.MonkeyPatch.context() as patch, forced_backend("triton"):
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(devices, "capability", lambda _device: CAPABILITY)
        patch.setattr(driver, "_active", _AbsentGPU())  # what is active by default asks for a GPU
        yield launched
