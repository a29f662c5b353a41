"""Runs a compiled function on the threads that torch itself uses, where it comes between operators of torch.

There, a second pool of threads costs more than it brings: torch's OpenMP workers keep spinning for a while after each
operation, and the two pools fight for the cores. Measured on 2 cores, linear layers of 1.7 ms followed by an attention
of 1.0 ms took 3.6 ms with Numba's own pool. OpenMP's entry point for compiled code, `GOMP_parallel`, is a plain C
function; calling it in the copy of the library that torch has loaded reuses torch's team.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .recording import CompiledCall, recorder

logger = logging.getLogger(__name__)


def has_helpers(num_threads: int) -> bool:
    """Whether a `team.Team` of so many does anything before it is joined. Apple's system has no such semaphores.

    Asked before anything of it is compiled."""
    return num_threads > 1 and sys.platform == "linux"


def run_call(call: CompiledCall) -> None:
    """Call it once on each of torch's threads, and return when all have returned."""
    run_parallel(call.function, ctypes.addressof(call.arguments), torch.get_num_threads())
    listener = recorder()
    if listener is not None:
        listener.add_call(call)


def run_parallel(function: Any, argument: int, num_threads: int) -> None:
    """Call `function(argument)` once on each of `num_threads` threads, and return when all have returned.

    `function` is a ctypes function pointer `void (void *)`; its calls divide the work among themselves. Where torch
    brings no such library (other systems), it is called once, on this thread.
    """
    library = _gomp()
    if num_threads == 1 or library is None:
        function(argument)
    else:
        library.GOMP_parallel(function, argument, num_threads, 0)


@cache
def _gomp() -> ctypes.CDLL | None:
    """GNU OpenMP as torch has loaded it: `void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned)`."""
    package = Path(torch.__file__).parent
    for path in sorted([*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")]):
        library = ctypes.CDLL(str(path))
        entry = getattr(library, "GOMP_parallel", None)
        if entry is not None:
            entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            entry.restype = None
            return library
    logger.info("torch brings no GNU OpenMP library: compiled kernels run on one thread")
    return None
