"""The Triton kernels in Triton's interpreter, on CPU. It is switched on for a child process only."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_checks import checks

from tests.interpreted import interpreted

CHECKS = list(checks())


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    found: dict[str, str | None] = interpreted(Path(__file__).with_name("triton_checks.py"))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_triton_matches_reference(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None
