"""`quire serve` waits for its deployments as long as they may take, and says why they are not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire.cluster import ray_local
from quire.cluster.config import QuireConfig
from quire.cluster.config_file import ServiceConfig
from quire.cluster.local_deploy import GRACE_S, check_room, wait_until_running
from quire.engine.errors import ConfigError, EngineError

NODE = {"CPU": 8.0, "GPU": 1.0, "memory": 1e10}


@dataclass
class Deployment:
    status: str
    message: str = ""


@dataclass
class Application:
    """As `serve.status()` tells of it."""

    status: str
    deployments: dict[str, Deployment] = field(default_factory=dict)
    message: str = ""


class Waiting:
    """Looks again each second, and sees one of `looks` after the other, the last one for ever."""

    def __init__(self, *looks: Application | None) -> None:
        self._looks = list(looks)
        self.now_s = 0.0

    def wait(self, timeout_s: float = 10.0) -> None:
        def look() -> Any:
            return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

        def sleep(_: float) -> None:
            self.now_s += 1.0

        wait_until_running(look, timeout_s, lambda: self.now_s, sleep)


def test_it_waits_until_the_application_runs() -> None:
    waiting = Waiting(None, Application("DEPLOYING"), Application("DEPLOYING"), Application("RUNNING"))
    waiting.wait()
    assert waiting.now_s == 3


def test_a_failure_ends_the_wait_with_its_last_line() -> None:
    traceback = "The deployment failed to start.\nTraceback:\n  File\nquire.engine.errors.ExecutorError: Rank 1: no."
    failed = {"Engine": Deployment("DEPLOY_FAILED", traceback), "Gateway": Deployment("HEALTHY", "fine")}
    with pytest.raises(EngineError) as caught:
        Waiting(Application("DEPLOYING"), Application("DEPLOY_FAILED", failed)).wait()
    assert caught.value.message == "The service could not start. Engine: Rank 1: no."


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (None, "Serve says nothing of it."),
        (Application("DEPLOYING", {"Engine": Deployment("UPDATING")}), "Engine has not started."),
        (
            Application("DEPLOYING", {"Engine": Deployment("UPDATING", "Waits for {'GPU': 1.0}.\nMore.")}),
            "Engine: Waits for {'GPU': 1.0}.",
        ),
    ],
)
def test_what_does_not_come_in_time_is_given_up(seen: Application | None, said: str) -> None:
    waiting = Waiting(seen)
    with pytest.raises(EngineError) as caught:
        waiting.wait(10.0)
    assert caught.value.message == f"The service is not ready after 30 s. {said}"
    assert waiting.now_s == 10 + GRACE_S + 1


def service(deployments: dict[str, dict[str, Any]] | None = None, **sections: Any) -> ServiceConfig:
    config = QuireConfig.model_validate({"model": {"device": "cpu"}, **sections})
    return ServiceConfig(quire=config, deployments=deployments or {})


def test_what_fits_is_let_through() -> None:
    check_room(service(), [NODE])
    check_room(service(parallel={"tensor_parallel_size": 7, "pipeline_parallel_size": 2}), [NODE])
    check_room(service({"Engine": {"ray_actor_options": {"num_cpus": 8, "num_gpus": 1}}}), [NODE])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            service(parallel={"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),  # and the engine's own actor
            "4 CPU on one node are needed, 2 times; there is that much, but it is in use.",
        ),
        (
            service(model={"device": "cuda"}, parallel={"tensor_parallel_size": 2}),
            "1 CPU and 2 GPU on one node are needed, and no node has that: there is 8 CPU and 1 GPU.",
        ),
        (
            service(parallel={"tensor_parallel_size": 32}),
            "16 CPU on one node are needed, and no node has that: there is 8 CPU.",
        ),
        (
            service(parallel={"pipeline_parallel_size": 2, "stage_placement": "strict_spread"}),
            "0.5 CPU on one node are needed, 2 times, each on a node of its own, and the nodes do not have that: "
            "there is 8 CPU.",
        ),
        (
            service({"Engine": {"ray_actor_options": {"num_cpus": 1, "resources": {"fast": 1}}}}),
            "1 CPU and 1 fast on one node are needed, and no node has that: there is 8 CPU and 0 fast.",
        ),
    ],
)
def test_what_can_never_be_is_refused_with_what_there_is(asked: ServiceConfig, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_room(asked, [NODE])
    assert caught.value.message == f"Engine has no place here: {said}"


def engines(device: str, count: int, **parallel: Any) -> ServiceConfig:
    models = [{"model": {"served_model_name": f"m{i}"}, "parallel": parallel} for i in range(count)]
    return ServiceConfig(quire=QuireConfig.model_validate({"model": {"device": device}, "models": models}))


def test_engines_that_fit_only_one_by_one_are_refused() -> None:
    check_room(engines("cuda", 1), [NODE])
    check_room(engines("cuda", 2), [NODE, NODE])
    check_room(engines("cpu", 16), [NODE])
    with pytest.raises(ConfigError) as caught:
        check_room(engines("cuda", 2), [NODE])
    shortage = "0.5 CPU and 1 GPU on one node are needed; a node has that much, but it is in use."
    assert caught.value.message == f"Engine-m1 has no place here: {shortage}"
    with pytest.raises(ConfigError, match=r"^Engine-m16 has no place here"):
        check_room(engines("cpu", 17), [NODE])
    assert NODE == {"CPU": 8.0, "GPU": 1.0, "memory": 1e10}


@pytest.mark.parametrize(
    ("options", "num_gpus"),
    [
        ({"num_replicas": 2}, 2),
        ({"autoscaling_config": {"min_replicas": 2, "max_replicas": 5}}, 2),
        ({"autoscaling_config": {"min_replicas": 0, "initial_replicas": 3, "max_replicas": 5}}, 3),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 5}}, 1),
    ],
)
def test_all_replicas_that_start_at_once_need_room(options: dict[str, Any], num_gpus: int) -> None:
    asked = service({"Engine": options}, model={"device": "cuda"})
    check_room(asked, [{"CPU": 8.0, "GPU": float(num_gpus)}])
    if num_gpus > 1:
        with pytest.raises(ConfigError, match=r"^Engine has no place here: .* but it is in use"):
            check_room(asked, [{"CPU": 8.0, "GPU": num_gpus - 1.0}])


def test_stages_apart_are_taken_on_nodes_of_their_own() -> None:
    apart = {"pipeline_parallel_size": 2, "stage_placement": "strict_spread"}
    check_room(engines("cuda", 1, **apart), [NODE, NODE])
    with pytest.raises(ConfigError, match=r"^Engine-m0 has no place here: .* each on a node of its own"):
        check_room(engines("cuda", 1, **apart), [{"CPU": 8.0, "GPU": 2.0}])
    with pytest.raises(ConfigError, match=r"^Engine-m1 has no place here: .* but it is in use"):
        check_room(engines("cuda", 2, **apart), [NODE, NODE])


@pytest.mark.parametrize(("usable", "expected"), [(4, 8), (20, 20)])
def test_a_private_ray_has_as_many_cores(
    usable: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts a Python process for each. The least are logical, for replicas that ask for parts of one."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray_local, "usable_cores", lambda: usable)
    monkeypatch.setattr(ray_local, "environment", lambda folder, haproxy: {})
    monkeypatch.setattr("ray.init", lambda **options: asked.update(options))
    ray_local.LocalRay.start(tmp_path)
    assert asked["num_cpus"] == expected
