"""Runs a script in Triton's interpreter, which is chosen when triton is first imported: in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def interpreted(script: Path) -> Any:
    """What it prints last, as JSON. Skips the test where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    finished = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
