"""The Triton kernels in Triton's interpreter, on CPU. It is switched on for a child process only."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import CASES

CHECKS = [case.name for case in CASES] + [f"write_kv-{dtype}" for dtype in ("float32", "bfloat16", "float16", "fp8")]


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_checks"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_triton_matches_reference(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None


def test_every_check_is_looked_at(results: dict[str, str | None]) -> None:
    assert sorted(results) == sorted(CHECKS)
