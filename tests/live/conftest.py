"""One private Ray for all of these tests, and one service on it that `serve run` has started from a file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from cluster_processes import wait_for
from leaks import Session, adopt_orphans, nothing_left_over

from quire.cluster.ray_local import LocalRay, environment, free_ports, make_folder

_FOLDER = make_folder()
os.environ.update(environment(_FOLDER, haproxy=None))  # before anything imports Ray
_SESSION = Session()
adopt_orphans()


def pytest_unconfigure() -> None:
    shutil.rmtree(_FOLDER, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks() -> Iterator[None]:
    """What the tests of a module have started has ended when they have: set up first, so that it looks last."""
    with nothing_left_over(_SESSION):
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray on this machine, to which this process is connected."""
    import ray

    local = LocalRay.start(_FOLDER)
    _SESSION.adopt()
    yield ray.get_runtime_context().gcs_address
    local.stop()


@pytest.fixture(scope="session")
def service(cluster: str, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root of a service: configs/smollm2-cpu.yaml with another port and two gateways, through `serve run`."""
    (port,) = free_ports(1)
    config = yaml.safe_load((repo_root / "configs/smollm2-cpu.yaml").read_text())
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["deployments"][0]["autoscaling_config"]["min_replicas"] = 2
    application["args"]["cache"] = {"num_kv_blocks": 1024}  # quickly filled
    folder = tmp_path_factory.mktemp("service")
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).parent / "serve"), "run", "service.yaml", "--address", cluster]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=heed_interrupts)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(url), 120, lambda: (folder / "log").read_text())
        _SESSION.adopt(application="quire")
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)  # Serve lets its replicas finish, one deployment after the other
        finally:
            process.kill()


def heed_interrupts() -> None:
    """In a new process: a shell that runs tests in the background lets them, and so their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def answers(url: str) -> bool:
    """Whether a service gives a first answer."""
    body = {"model": "smollm2-135m-instruct", "prompt": [0], "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False
