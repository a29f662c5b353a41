"""The Ray that `quire serve` starts for itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from quire.cluster.ray_local import environment


def test_what_ray_starts_is_as_urgent_as_who_asked(cluster: str) -> None:
    """At Ray's own 15, an engine gets a thirtieth of a core that another process wants."""

    @ray.remote(num_cpus=0)
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote(), timeout=60) == os.nice(0)


def test_how_nice_workers_are_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    assert environment(tmp_path, haproxy=None)["RAY_worker_niceness"] == "0"
    monkeypatch.setenv("RAY_worker_niceness", "15")
    assert environment(tmp_path, haproxy=None)["RAY_worker_niceness"] == "15"
