"""What control groups leave a process, by folders like those that Linux shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.workers.cgroup import free_below_limits, usable_cores

GIB = 1 << 30


def group(folder: Path, **files: object) -> None:
    """A folder with files whose names have a dot for each first underscore."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def membership(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


def test_no_groups(tmp_path: Path, many_cores: None) -> None:
    assert free_below_limits(tmp_path / "none", tmp_path / "no file") == []
    assert usable_cores(tmp_path / "none", tmp_path / "no file") == 64


def test_memory_of_a_container(tmp_path: Path) -> None:
    """Pages of files are dropped when somebody needs memory: 1 GiB of 32 is taken, not 21."""
    inside = membership(tmp_path, "0::/")
    stat = f"anon {GIB}\nfile {20 * GIB}\ninactive_file {19 * GIB}\nactive_file {GIB}\nslab_reclaimable 4096"
    group(tmp_path / "tree", memory_max=32 * GIB, memory_current=21 * GIB, memory_stat=stat)
    assert free_below_limits(tmp_path / "tree", inside) == [31 * GIB]
    (tmp_path / "tree" / "memory.stat").unlink()
    assert free_below_limits(tmp_path / "tree", inside) == [11 * GIB]
    group(tmp_path / "tree", memory_max="max")
    assert free_below_limits(tmp_path / "tree", inside) == []


def test_more_pages_of_files_than_what_is_used(tmp_path: Path) -> None:
    """The two files are not read at the same time."""
    stat = f"inactive_file {3 * GIB}\nactive_file {GIB}"
    group(tmp_path / "tree", memory_max=2 * GIB, memory_current=GIB, memory_stat=stat)
    assert free_below_limits(tmp_path / "tree", membership(tmp_path, "0::/")) == [2 * GIB]


def test_memory_that_is_used_up(tmp_path: Path) -> None:
    group(tmp_path / "tree", memory_max=2 * GIB, memory_current=3 * GIB, memory_stat=f"anon {3 * GIB}")
    assert free_below_limits(tmp_path / "tree", membership(tmp_path, "0::/")) == [0]


def test_memory_of_version_1(tmp_path: Path) -> None:
    """`inactive_file` is of the group alone there, and `total_inactive_file` of those in it, too."""
    lines = membership(tmp_path, "9:name=systemd:/", "4:cpu,cpuacct:/", "3:memory:/", "0::/")
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}"
    limits = {"memory_limit_in_bytes": 8 * GIB, "memory_usage_in_bytes": 5 * GIB, "memory_stat": stat}
    group(tmp_path / "tree" / "memory", **limits)
    assert free_below_limits(tmp_path / "tree", lines) == [6 * GIB]
    group(tmp_path / "tree" / "memory", memory_limit_in_bytes=9223372036854771712)
    assert free_below_limits(tmp_path / "tree", lines) == []


@pytest.mark.parametrize("version", [1, 2])
def test_groups_around_a_group(tmp_path: Path, version: int, many_cores: None) -> None:
    """Each of them holds the process. On a host, all are seen."""
    line = "4:cpu,memory:/a.slice/b.scope" if version == 1 else "0::/a.slice/b.scope"
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    trees = {name: tmp_path / "tree" / (name if version == 1 else "") for name in ("memory", "cpu")}
    for path, limit, quota in (("a.slice", 3, 600_000), ("a.slice/b.scope", 5, 800_000)):
        sizes = {f"memory_{name}": size for name, size in zip(names, (limit, 1), strict=True)}
        group(trees["memory"] / path, **sizes)
        if version == 1:
            group(trees["cpu"] / path, cpu_cfs_quota_us=quota, cpu_cfs_period_us=100_000)
        else:
            group(trees["cpu"] / path, cpu_max=f"{quota} 100000")
    lines = membership(tmp_path, line)
    assert sorted(free_below_limits(tmp_path / "tree", lines)) == [2, 4]
    assert usable_cores(tmp_path / "tree", lines) == 6
    assert free_below_limits(tmp_path / "tree", membership(tmp_path, line.replace("/a.slice", "/other"))) == []


def test_a_container_that_is_told_its_place_on_the_host(tmp_path: Path, many_cores: None) -> None:
    """Docker with version 1: its own group is where the whole tree would be."""
    lines = membership(tmp_path, "4:cpu,cpuacct:/docker/4f2a", "3:memory:/docker/4f2a", "0::/../other")
    group(tmp_path / "tree" / "cpu", cpu_cfs_quota_us=250_000, cpu_cfs_period_us=100_000)
    group(tmp_path / "tree" / "memory", memory_limit_in_bytes=7, memory_usage_in_bytes=3)
    assert usable_cores(tmp_path / "tree", lines) == 2
    assert free_below_limits(tmp_path / "tree", lines) == [4]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 64), ("400000 100000", 4), ("50000 100000", 1), ("350000 100000", 3), ("9900000 100000", 64)],
)
def test_quotas(tmp_path: Path, quota: str, expected: int, many_cores: None) -> None:
    group(tmp_path / "tree", cpu_max=quota)
    assert usable_cores(tmp_path / "tree", membership(tmp_path, "0::/")) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 64), (400_000, 4), (5_000, 1)])
def test_quotas_of_version_1(tmp_path: Path, quota: int, expected: int, many_cores: None) -> None:
    group(tmp_path / "tree" / "cpu", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100_000)
    assert usable_cores(tmp_path / "tree", membership(tmp_path, "1:cpu:/", "0::/")) == expected
