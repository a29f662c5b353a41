"""A quantized checkpoint stays packed on a GPU, and answers as its numbers do. In Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def test_whole_models() -> None:
    finished = subprocess.run(
        [sys.executable, Path(__file__).with_name("packed_on_triton.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert {name: each["packed"] for name, each in found.items()} == {"awq": 4, "gpt-oss": 4}
    for each in found.values():
        assert each["tokens"] == each["expected"]
        assert len({*each["tokens"][0], *each["tokens"][1]}) > 2
