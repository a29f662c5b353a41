"""What all tests share. Environment variables are set here, before anything imports Ray, torch or transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.update(
    {
        "RAY_AUTH_MODE": "disabled",  # Ray would write a token file into the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",  # a test that reaches for a model hub fails at once, instead of when there is no network
        "TOKENIZERS_PARALLELISM": "false",  # tokenizers warns when a process that used it forks
        "NO_COLOR": "1",  # the text of the command line is compared without escape codes
        "COLUMNS": "120",
    }
)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws from torch does not depend on those that its process has run before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(11)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent
