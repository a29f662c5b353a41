# mypy: disable-error-code="attr-defined"
# (numba.core.config makes its attributes when it is imported)
"""What this CPU can, and what it is fast at."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
from numba.core import config


@cache
def cpu_features() -> frozenset[str]:
    """What Numba compiles for, by LLVM's names: what this CPU has, or what NUMBA_CPU_NAME and _FEATURES leave of it."""
    if config.CPU_NAME or config.CPU_FEATURES:
        given = (config.CPU_FEATURES or "").split(",")
        return frozenset(feature[1:] for feature in given if feature.startswith("+"))
    return frozenset(feature for feature, has in llvm.get_host_cpu_features().items() if has)


@cache
def cpu_name() -> str:
    """Likewise, of its kind."""
    name: str = config.CPU_NAME or llvm.get_host_cpu_name()
    return name


IS_WIDE = "avx512f" in cpu_features()  # 32 registers of 16 lanes; AVX2 has 16 of 8, and others were not measured


# Whether what is read in the order of memory comes sooner where it is asked for some KiB ahead: on a Zen 5. On a Zen 4
# it was slower, in loops that took turns; by one instruction for all of it, as now, it was not measured there, nor on
# what comes after them (tests/benchmarks/HISTORY.md).
FETCHES_IN_ORDER = cpu_name() != "znver4"
# Whether the first-level cache, of 48 KiB, holds what is fetched for rows of up to 6 KiB. Measured on Zen 5 alone.
HAS_LARGE_CACHE = cpu_name() == "znver5"


def dots_are_fast() -> bool:
    """Whether a vector's dot products of bfloat16 take less than to multiply them as float32.

    Intel's Xeons start one in two cycles, which is half of what they multiply in float32, AMD's Zen 5 two in each,
    Zen 4 one. Measured on all three (tests/benchmarks/HISTORY.md).
    """
    return "avx512bf16" in cpu_features() and cpu_name().startswith("znver")
