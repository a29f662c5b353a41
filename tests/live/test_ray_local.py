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


def test_serve_looks_after_replicas_as_often_as_it_is_told(cluster: str) -> None:
    from ray.serve._private.constants import CONTROL_LOOP_INTERVAL_S

    assert float(os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"]) == CONTROL_LOOP_INTERVAL_S


@pytest.mark.parametrize(
    ("name", "ours", "chosen"),
    [("RAY_worker_niceness", "0", "15"), ("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.25", "0.1")],
)
def test_what_is_chosen_outside_stays(
    name: str, ours: str, chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert environment(tmp_path, haproxy=None)[name] == ours
    monkeypatch.setenv(name, chosen)
    assert environment(tmp_path, haproxy=None)[name] == chosen
