"""The kill test: whatever dies under streams of every kind, each answer is the one that it would have been.

`python -m tests.live.kill_table` repeats it with other seeds, and prints what each fault costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_processes import processes, wait_for
from kill_service import APPLICATION, MODEL, deploy_tiny, make_model
from kill_trial import Trial
from ray.util.placement_group import placement_group_table

from quire.cluster.ray_local import free_ports

WORKER = "ray::WorkerActor"
FAULTS = [("kill-worker", 1), ("stop-worker", 0), ("kill-engine", 0)]


@pytest.fixture(scope="module")
def url(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        (port,) = free_ports(1)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
    else:
        port = client.http_config.port
    model: Path = make_model(tmp_path_factory.mktemp("tiny"))
    yield deploy_tiny(f"http://127.0.0.1:{port}", model)
    serve.delete(APPLICATION)
    if client is None:
        serve.shutdown()
    wait_for(nothing_is_left, 30, lambda: (processes("ray::"), placement_group_table()))


def nothing_is_left() -> bool:
    groups = placement_group_table().values()
    ours = [*processes(WORKER), *processes(f"ray::ServeReplica:{APPLICATION}")]
    return not ours and all(group["state"] == "REMOVED" for group in groups)


@pytest.mark.timeout(600)
def test_no_stream_is_dropped(url: str) -> None:
    trial = Trial(url, MODEL, seed=1)
    costs = trial.strike(FAULTS)
    assert [cost.fault for cost in costs] == [fault for fault, _ in FAULTS]
    assert all(cost.streams_lost == 0 and cost.detected_s < cost.pause_s for cost in costs), costs
    trial.check_nothing_is_held()
    wait_for(lambda: len(processes(WORKER)) == 2, 30, lambda: processes(WORKER))  # none is left of those before
    assert len(processes(f"ray::ServeReplica:{APPLICATION}:Engine")) == 1
