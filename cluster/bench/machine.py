"""On what a benchmark ran: a figure without its machine says little. Nothing here imports torch or Ray."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SHOWN_PACKAGES = ("quire", "torch", "triton", "ray", "transformers", "numpy")


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, GPUs, operating system."""
    machine = {
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "gpu": _gpu_names() or "none",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
    load = os.getloadavg()[0]
    machine["load"] = f"{load:.1f} (1 minute, at the start)"
    return machine


def package_versions() -> dict[str, str]:
    """Installed versions of what matters to speed."""
    versions = {}
    for name in SHOWN_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_names() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return ", ".join(listed.split("\n")).strip(", ")
