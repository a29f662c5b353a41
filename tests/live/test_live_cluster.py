"""`quire deploy`, `status` and `top` on a cluster that `ray start` has started, with two models in one service."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from cluster_processes import command, wait_for

from quire.cluster.ray_local import free_ports, make_folder

FIRST, SECOND = "smollm2-135m-instruct", "smollm2-135m-bfloat16"
BIN = Path(sys.executable).parent


@dataclass
class Head:
    """The head of a cluster of its own."""

    dashboard: str
    service: str
    folder: Path
    process: psutil.Process

    def log_of(self, deployment: str) -> str:
        """What its replicas have written, for the message of a test that fails."""
        logs = self.folder.glob("session_latest/logs/**/*")
        texts = [path.read_text(errors="replace") for path in logs if path.suffix in (".err", ".log")]
        return "\n".join(
            text[-8000:] for text in texts if f"quire:{deployment}" in text or f"quire_{deployment}" in text
        )

    def replica(self, deployment: str) -> psutil.Process:
        name = f"ray::ServeReplica:quire:{deployment}"
        (found,) = [p for p in self.process.children(recursive=True) if command(p).startswith(name)]
        return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = make_folder()
    gcs, dashboard, client, agent, http = free_ports(5)
    ports = {
        "port": gcs, "dashboard-port": dashboard, "ray-client-server-port": client, "dashboard-agent-listen-port": agent
    }  # fmt: skip
    start = [
        str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=8",
        f"--temp-dir={folder}", f"--object-store-memory={128 << 20}",
        *(f"--{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    log = (folder / "log").open("w")
    process = subprocess.Popen(start, stdout=log, stderr=log)
    found = Head(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{http}", folder, psutil.Process(process.pid))
    try:
        wait_for(lambda: _answers(f"{found.dashboard}/api/version"), 60, lambda: (folder / "log").read_text())
        yield found
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def quire(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from quire.cluster.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=240
    )


def text_of(head: Head, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{head.service}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text + head.log_of("Gateway")
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def config(head: Head, repo_root: Path) -> dict:
    config = yaml.safe_load((repo_root / "configs/multi-model.yaml").read_text())
    config["http_options"]["port"] = int(head.service.rpartition(":")[2])
    config["applications"][0]["args"]["cache"] = {"num_kv_blocks": 1024}  # quickly filled
    return config


@pytest.fixture(scope="module")
def deployed(head: Head, config: dict) -> Head:
    """With configs/multi-model.yaml on it."""
    empty = quire("status", "--address", head.dashboard)
    assert (empty.returncode, "Nothing is deployed." in empty.stdout) == (1, True)
    path = head.folder / "service.yaml"
    path.write_text(yaml.safe_dump(config))
    done = quire("deploy", path, "--address", head.dashboard, "--timeout-s", 180)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"Quire serves {FIRST}, {SECOND} after " in done.stdout
    assert f"{head.service}/v1" in done.stdout
    return head


def test_both_models_answer(deployed: Head) -> None:
    listed = httpx.get(f"{deployed.service}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [FIRST, SECOND]
    for model in (FIRST, SECOND):
        assert "Paris" in text_of(deployed, model)
    unknown = httpx.post(f"{deployed.service}/v1/completions", json={"model": "gpt-9", "prompt": "x"})
    assert unknown.status_code == 404
    assert f"Served here: {FIRST}, {SECOND}." in unknown.json()["error"]["message"]


def test_status_and_top_tell_both(deployed: Head) -> None:
    status = quire("status", "--url", deployed.service, "--address", deployed.dashboard, "--json")
    assert status.returncode == 0, status.stdout
    report = json.loads(status.stdout)
    assert [model["id"] for model in report["service"]["models"]] == [FIRST, SECOND]
    (application,) = report["cluster"]["applications"]
    assert {each["name"]: each["replicas"] for each in application["deployments"]} == {
        f"Engine-{FIRST}": 1,
        f"Engine-{SECOND}": 1,
        "Gateway": 1,
    }
    top = quire("top", "--once", "--interval", 0.5, "--url", deployed.service)
    assert top.returncode == 0, top.stderr
    assert all(model in top.stdout for model in (FIRST, SECOND))


def test_a_model_whose_engine_is_lost_leaves_the_other_alone(deployed: Head) -> None:
    deployed.replica(f"Engine-{SECOND}").kill()
    wait_for(lambda: quire("status", "--url", deployed.service).returncode == 1, 30)
    assert "Paris" in text_of(deployed, FIRST)
    assert httpx.get(f"{deployed.service}/health").json()["status"] == "degraded"
    assert "Paris" in text_of(deployed, SECOND)  # waits for the engine that Serve starts
    wait_for(lambda: quire("status", "--url", deployed.service).returncode == 0, 30)


def test_a_model_that_cannot_start_is_named_and_the_other_serves(deployed: Head, config: dict) -> None:
    (application,) = config["applications"]
    application["args"]["models"][1]["model"]["max_model_len"] = 999_999
    path = deployed.folder / "broken.yaml"
    path.write_text(yaml.safe_dump(config))
    done = quire("deploy", path, "--address", deployed.dashboard, "--timeout-s", 180)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"quire: The service could not start. Engine-{SECOND}: "
        "max_model_len: 999999 is more than the model's own limit of 8192."
    )
    assert "Paris" in text_of(deployed, FIRST)
    status = quire("status", "--url", deployed.service, "--address", deployed.dashboard, "--json")
    assert status.returncode == 1
    assert [model["status"] for model in json.loads(status.stdout)["service"]["models"]] == ["ok", "unhealthy"]
