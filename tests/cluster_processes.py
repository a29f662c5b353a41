"""Looking at other processes, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def wait_for(condition: Callable[[], object], timeout_s: float, describe: Callable[[], object] = lambda: "") -> None:
    """Until `condition()` is true. Polls, because it is other processes that are waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {describe()}"
        time.sleep(0.05)


def processes(name: str) -> list[psutil.Process]:
    """The processes of this session's Ray whose name begins so, oldest first."""
    found = [p for p in psutil.Process().children(recursive=True) if command(p).startswith(name)]
    return sorted(found, key=lambda process: process.create_time())


def command(process: psutil.Process) -> str:
    """The first word of a process's command line; empty for one that has ended."""
    try:
        return (process.cmdline() or [""])[0]
    except psutil.NoSuchProcess:
        return ""
