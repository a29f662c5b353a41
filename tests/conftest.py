"""What all tests share. Environment variables are set here, before anything imports Ray, torch or transformers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NEED_RAY = frozenset({"cluster", "service_url"})  # fixtures


def take_a_share_of_the_cores() -> None:
    """One of several processes (`QUIRE_TEST_PART=1/2`, see .ci/test) keeps to cores of its own, with what it starts.

    So a service under test is not slowed by whatever else is tested, and nobody starts more threads than there are
    cores for them.
    """
    part = os.environ.get("QUIRE_TEST_PART")
    if part is not None and hasattr(os, "sched_setaffinity"):
        number, count = map(int, part.split("/"))
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number - 1 :: count] or cores)


take_a_share_of_the_cores()  # before anything counts them

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


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ray: starts a Ray, or is in the file of a test that does")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a Ray by a fixture; by files, so that what the tests of one share is made once."""
    with_ray = {item.path for item in items if not NEED_RAY.isdisjoint(getattr(item, "fixturenames", ()))}
    for item in items:
        if item.path in with_ray:
            item.add_marker(pytest.mark.ray)
