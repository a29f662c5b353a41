"""What control groups leave this process: memory below their limits, and cores of their quotas of time.

A container has a limit of memory (`docker --memory`, `limits.memory` of Kubernetes) and may have a quota of time on
CPUs (`--cpus`, `limits.cpu`): it sees all cores and may use all of them at once, but only for a part of each period;
then all its threads stand still until the next. Both versions of control groups are read, and of nested groups all that
are seen: those around a process hold it as well. A container sees its own where the whole tree is mounted, whatever
`/proc/self/cgroup` calls it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TREE = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")  # lines of "number:controllers:path"; version 2 has no controllers
_NO_LIMIT = 1 << 62  # bytes: version 1 writes about 2^63 where there is none


def usable_cores(tree: Path = _TREE, membership: Path = _MEMBERSHIP) -> int:
    """As many as this process can keep busy: those it may run on, and no more than its smallest quota, of which a part
    of a core is not counted; at least one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *(max(1, quota // period) for quota, period in _quotas(tree, membership))])


def free_below_limits(tree: Path = _TREE, membership: Path = _MEMBERSHIP) -> list[int]:
    """Bytes that each limit of memory leaves; empty without one.

    Pages of files count as used there, though the system drops them as soon as somebody needs memory: one that has just
    read a checkpoint from disk would seem to have no room for it.
    """
    return [max(0, limit - max(0, used - pages)) for limit, used, pages in _limits(tree, membership)]


def _limits(tree: Path, membership: Path) -> Iterator[tuple[int, int, int]]:
    """Bytes of each limit of memory, how many of them are used, and by pages of files."""
    names = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    for group in _groups("memory", tree, membership):
        for limit_name, used_name, prefix in names:
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
                if limit < _NO_LIMIT:
                    yield limit, used, _pages_of_files(group / "memory.stat", prefix)


def _pages_of_files(stat: Path, prefix: str) -> int:
    """Bytes of the files that a group, and those in it, have in memory."""
    wanted = {f"{prefix}{name}" for name in ("inactive_file", "active_file")}
    try:
        pairs = [line.split() for line in stat.read_text().splitlines()]
        return sum(int(value) for name, value in pairs if name in wanted)
    except (OSError, ValueError):
        return 0


def _quotas(tree: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Microseconds that a group may use, on all cores together, of each period, and those of the period."""
    for group in _groups("cpu", tree, membership):
        with suppress(OSError, ValueError):  # no such file, or "max 100000"
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota), int(period)
        with suppress(OSError, ValueError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:  # -1: none
                yield int(quota), int(period)


def _groups(controller: str, tree: Path, membership: Path) -> list[Path]:
    """The groups of this process that can be seen, of both versions, each with those around it."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    found = [tree, tree / controller]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        root, own = tree / controller if controllers else tree, Path(path.lstrip("/"))
        if ".." not in own.parts:  # what lies outside of what is seen
            found += [root / each for each in (own, *own.parents) if each != Path()]
    return found
