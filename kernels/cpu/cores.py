"""The cores that threads run on: each has a place, so that threads on different ones can be told apart, and a cache."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt


def place_cores(cores: Collection[int], siblings: Mapping[int, Sequence[int]]) -> list[int]:
    """By number of a core, its place among `cores`. Those that share their hardware with an earlier one (`siblings`,
    by number) come behind all others, so that as many threads as there is hardware for are in different places."""

    def rank(core: int) -> int:
        return [each for each in siblings.get(core, [core]) if each in cores].index(core)

    places = [0] * (max(cores) + 1)
    for place, core in enumerate(sorted(cores, key=lambda core: (rank(core), core))):
        places[core] = place
    return places


def _siblings(core: int) -> list[int]:
    """The cores on the same hardware, as Linux tells: "0,8" or "0-1". It alone, where nobody does."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        spans = [[int(end) for end in span.split("-")] for span in path.read_text().split(",")]
    except (OSError, ValueError):
        return [core]
    found = [each for first, *last in spans for each in range(first, (last or [first])[0] + 1)]
    return found if core in found else [core]


def _places() -> npt.NDArray[np.int64]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    places = place_cores(allowed, {core: _siblings(core) for core in allowed})
    return np.array([len(places), *places], np.int64)


def _half_a_cache() -> int:
    """Bytes: of a core's second-level cache, or of 2 MiB where the system does not tell its size; at least 256 KiB."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return max(int(size.removesuffix("K\n")) << 9, 1 << 18)
    except (OSError, ValueError):
        return 1 << 20


CHUNK_BYTES = _half_a_cache()  # of x: what stays there while a weight goes by

# How many follow, and by number of a core, its place among those that this process might use when it began; others have
# one as well, which is another core's.
PLACES = _places()
