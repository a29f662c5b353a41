"""`quire serve` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 120.0


@contextmanager
def run_service(log: Path, *arguments: str) -> Iterator[None]:
    """A service with these arguments of `quire serve`, from its first answer on."""
    command = [sys.executable, "-c", "from quire.cluster.cli import main; main()", "serve", *arguments]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT) as service:
        try:
            deadline = time.monotonic() + START_S
            while "Quire serves" not in log.read_text(errors="replace"):
                if service.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"The service did not start:\n{log.read_text(errors='replace')}")
                time.sleep(0.1)
            yield
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(30)
