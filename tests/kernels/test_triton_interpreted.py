"""The Triton kernels in Triton's interpreter, on CPU. It is switched on for a child process only."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_checks import checks

CHECKS = list(checks())


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    finished = subprocess.run(
        [sys.executable, Path(__file__).with_name("triton_checks.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_triton_matches_reference(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None
