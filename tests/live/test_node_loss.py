"""Three nodes: the head with the gateway, and two for engines, which are lost: the one at once, the other silently.

Every stream ends as it would have: elsewhere, on an engine that is there or on the one that Serve starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_processes import wait_for
from kill_service import MODEL, make_model
from kill_trial import Run, Stream, bodies
from several_nodes import Node, SeveralNodes

from quire.cluster.ray_local import free_ports
from quire.cluster.service_http import Service as HttpService
from quire.engine.errors import ExecutorError

APPLICATION = "nodes"
REPLICA = f"ray::ServeReplica:{APPLICATION}:Engine"
ENGINE_NODE = {"engine": 1.0}


def deploy(port: int, config: dict[str, Any], options: dict[str, dict[str, Any]]) -> None:
    from ray import serve

    from quire.cluster.app import bind
    from quire.cluster.config import QuireConfig

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(bind(QuireConfig.model_validate(config), options), name=APPLICATION, route_prefix="/")


def nodes_of_ranks(tensor: int, pipeline: int, stage_placement: str) -> list[str]:
    """Reserve the places of ranks, and tell the node of each, in rank order."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from quire.cluster import placement
    from quire.engine.config import ParallelConfig

    config = ParallelConfig.model_validate(
        {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "stage_placement": stage_placement}
    )
    group = placement.reserve(placement.plan_ranks(config, on_gpu=False), timeout_s=20, can_grow=False)
    node_of: Any = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    tasks = []
    for rank in range(config.world_size):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // tensor)
        tasks.append(node_of.options(num_cpus=placement.CPU_PER_RANK, scheduling_strategy=place).remote())
    nodes: list[str] = ray.get(tasks)
    placement.release(group)
    return nodes


class Service:
    """The tiny model on a cluster whose joined nodes have room for one engine each."""

    def __init__(self, folder: Path) -> None:
        self._model = make_model(folder)
        self._port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self._port}"
        self.cluster = SeveralNodes()

    def deploy(self) -> None:
        config = {
            "model": {
                "model": str(self._model),
                "served_model_name": MODEL,
                "device": "cpu",
                "num_threads": 1,
                "chat_template": "hermes",
            },
            "cache": {"num_kv_blocks": 1024},
            "api": {"failover_timeout_s": 200.0},
        }
        on_joined_nodes = {"num_cpus": 0.5, "resources": ENGINE_NODE}
        on_the_head = {"num_cpus": 0.1, "resources": {"head": 0.1}}
        options = {
            "Engine": {"num_replicas": 2, "health_check_period_s": 1.0, "ray_actor_options": on_joined_nodes},
            "Gateway": {"num_replicas": 1, "ray_actor_options": on_the_head},
        }
        self.cluster.call(deploy, self._port, config, options)
        wait_for(lambda: self.num_engines() == 2, 60, self.num_engines)

    def nodes_with_engines(self) -> list[Node]:
        return [node for node in self.cluster.joined if node.processes(REPLICA)]

    def num_engines(self) -> int:
        """Those that the gateway is connected to."""
        return len(self._values("quire:num_requests_running"))

    def num_resumed(self) -> float:
        """Requests that the engines have taken up with tokens of their own."""
        return sum(self._values("quire:resumed_requests_total"))

    def _values(self, name: str) -> list[float]:
        samples = HttpService(self.url).samples()
        return [value for (sample, _), value in samples.items() if sample == name]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("nodes"))
    try:
        for _ in range(2):
            made.cluster.join(ENGINE_NODE)
        yield made
    finally:
        made.cluster.stop()


def start_in_the_middle(service: Service, requests: list[dict], expected: list[Stream]) -> Run:
    """All streams, when a quarter of their text has come."""
    in_all = sum(stream.num_characters for stream in expected)
    run = Run(service.url, requests)
    wait_for(lambda: run.num_characters > in_all / 4, 120, lambda: run.num_characters)
    assert not run.is_over
    return run


def check_all(run: Run, expected: list[Stream]) -> None:
    for before, now in zip(expected, run.wait(), strict=True):
        assert (now.error, now.is_done) == (None, True)
        assert (now.texts, now.calls, now.ends, now.usage) == (before.texts, before.calls, before.ends, before.usage)


def test_the_ranks_of_a_stage_share_a_node(service: Service) -> None:
    """And the stages do not where there is another one; what cannot be is refused with what is there."""
    reserve = service.cluster.call
    spread = reserve(nodes_of_ranks, 2, 2, "spread")
    assert spread[0] == spread[1] != spread[2] == spread[3]
    strict = reserve(nodes_of_ranks, 2, 3, "strict_spread")
    assert strict[0::2] == strict[1::2]
    assert len(set(strict)) == 3
    assert len(set(reserve(nodes_of_ranks, 2, 2, "pack"))) == 1
    with pytest.raises(ExecutorError, match=r"4 times, each on a node of its own.* there is 4 CPU; 4 CPU; 4 CPU"):
        reserve(nodes_of_ranks, 1, 4, "strict_spread")


@pytest.mark.timeout(300)
def test_nodes_that_are_lost_take_no_stream_with_them(service: Service) -> None:
    """One is killed, then the other one vanishes: its processes stop, and its connections stay.

    After the first loss the streams go on with the engine that is left, after the second with one that Serve starts
    when a node has joined.
    """
    service.deploy()
    requests = bodies(MODEL, seed=3)[::2]  # one of each kind
    expected = Run(service.url, requests).wait()

    killed, vanished = service.nodes_with_engines()
    run = start_in_the_middle(service, requests, expected)
    killed.kill()
    check_all(run, expected)
    assert service.num_resumed() > 0
    assert service.nodes_with_engines() == [vanished]

    run = start_in_the_middle(service, requests, expected)
    vanished.vanish()
    joined = service.cluster.join(ENGINE_NODE)
    try:
        check_all(run, expected)
    finally:
        vanished.kill()
    assert service.num_resumed() > 0
    assert service.nodes_with_engines() == [joined]
    assert httpx.get(f"{service.url}/health").status_code == 200
