"""`quire deploy` against a dashboard that is made up: what it sends, what it waits for, how it fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_processes import wait_for
from fake_cluster import APPLICATIONS, LOGS, NOTHING, FakeServer, deployment, details, fake_server

from quire.cluster import cli, cli_deploy
from quire.cluster.cli_deploy import DeployError, Lines, Watch
from quire.cluster.serve_api import ServeApi, last_error

CONFIG = """\
applications:
  - name: quire
    import_path: quire.cluster.app:build
    args: {model: smollm2-135m-instruct}
    deployments:
      - name: Engine
        num_replicas: 2
"""
TRACEBACK = """The deployment failed to start 1 times in a row. Error:
\x1b[36mray::ServeReplica:quire:Engine()\x1b[39m (pid=1)
  File "replica.py", line 1867, in initialize
quire.engine.errors.ConfigError: model: '/m' does not exist.

"""


@pytest.fixture
def dashboard() -> Iterator[FakeServer]:
    with fake_server() as fake:
        fake.answers[f"PUT {APPLICATIONS}"] = (200, "")
        yield fake


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `quire deploy ARGS...` in this process: status, stdout, stderr."""

    def run_command(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(cli_deploy, "POLL_S", 0.01)
        monkeypatch.setattr(sys, "argv", ["quire", "deploy", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    return run_command


def test_a_deployment_is_watched_until_it_runs(dashboard: FakeServer, path: Path, run: Any) -> None:
    dashboard.answers[APPLICATIONS] = [
        (200, NOTHING),
        (200, details("DEPLOYING")),  # asked for its http_options
        (200, details("DEPLOYING")),
        (200, details("DEPLOYING", deployment("Gateway"), deployment("Engine", "UPDATING", target=2))),
        (200, details("DEPLOYING", deployment("Gateway"), deployment("Engine", "UPDATING", target=2))),
        (200, details("RUNNING", deployment("Gateway"), deployment("Engine", running=2, target=2))),
    ]
    status, out, err = run(path, "--address", dashboard.url)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == ["Gateway: HEALTHY 1/1", "Engine: UPDATING 1/2", "Engine: HEALTHY 2/2"]
    assert lines[3].startswith("Quire serves smollm2-135m-instruct after ")
    assert lines[3].endswith("s (replicas: Gateway 1, Engine 2).")
    assert lines[5] == "  http://127.0.0.1:8000/v1"
    (sent,) = [body for method, _, body in dashboard.received if method == "PUT"]
    assert sent == yaml.safe_load(CONFIG)


def test_what_ran_before_is_not_taken_for_the_new_one(dashboard: FakeServer, path: Path, run: Any) -> None:
    old = details("RUNNING", deployment("Engine"), at=10.0)
    new = details("RUNNING", deployment("Engine", running=2, target=2), at=11.0)
    dashboard.answers[APPLICATIONS] = [(200, old), (200, old), (200, old), (200, old), (200, new)]
    _, out, _ = run(path, "--address", dashboard.url)
    assert out.splitlines()[0] == "Engine: HEALTHY 2/2"


def test_a_failure_has_its_reason_and_the_last_log_lines(dashboard: FakeServer, path: Path, run: Any) -> None:
    failed = deployment("Engine", "DEPLOY_FAILED", running=0, message=TRACEBACK, dead=["old", "latest"])
    dashboard.answers[APPLICATIONS] = [(200, NOTHING), (200, details("DEPLOY_FAILED", deployment("Gateway"), failed))]
    dashboard.answers[LOGS] = (200, "INFO reading\nERROR no such file\n")
    status, out, err = run(path, "--address", dashboard.url)
    assert status == 1
    assert out.splitlines() == [
        "Gateway: HEALTHY 1/1",
        "Engine: DEPLOY_FAILED 0/1 model: '/m' does not exist.",
    ]
    assert err.splitlines() == [
        "--- the last lines of Engine, replica dead1:",
        "INFO reading",
        "ERROR no such file",
        "quire: The service could not start. Engine: model: '/m' does not exist.",
    ]
    asked = [path for _, path, _ in dashboard.received if path.startswith(LOGS)]
    assert asked == [f"{LOGS}?actor_id=latest&suffix=err&lines=15&filter_ansi_code=true"]


def test_an_application_that_cannot_be_built(dashboard: FakeServer, path: Path, run: Any) -> None:
    text = "Deploying app 'quire' failed with exception:\nTraceback ...\nModuleNotFoundError: No module named 'quire'"
    dashboard.answers[APPLICATIONS] = [(200, NOTHING), (200, details("DEPLOY_FAILED", message=text))]
    _, _, err = run(path, "--address", dashboard.url)
    assert err.strip() == "quire: The service could not start. No module named 'quire'"


def test_what_does_not_run_in_time(dashboard: FakeServer) -> None:
    seconds = iter(range(100))
    waiting = deployment("Engine", "UPDATING", running=0, message="Resources required: GPU 1")
    dashboard.answers[APPLICATIONS] = (200, details("DEPLOYING", deployment("Gateway"), waiting))
    with ServeApi(dashboard.url) as api:
        watch = Watch(api, "quire", 0.0, clock=lambda: float(next(seconds)), sleep=lambda _: None)
        with pytest.raises(DeployError) as caught:
            watch.until_running(5.0, lambda _: None)
        assert caught.value.message == (
            "quire does not run after 5 s, and Serve goes on trying. Engine: UPDATING, Resources required: GPU 1"
        )
        with pytest.raises(DeployError, match="did not begin to deploy other within 5 s"):
            Watch(api, "other", 0.0, clock=watch.clock, sleep=watch.sleep).until_running(5.0, lambda _: None)


def test_a_service_that_nobody_can_reach_does_not_run_yet(dashboard: FakeServer, path: Path, run: Any) -> None:
    engine = deployment("Engine", running=2, target=2)
    dashboard.answers[APPLICATIONS] = [(200, NOTHING), (200, details("RUNNING", engine, proxy="STARTING"))]
    status, _, err = run(path, "--address", dashboard.url, "--timeout-s", "1")
    assert status == 1
    assert err.strip() == (
        "quire: quire does not run after 1 s, and Serve goes on trying. "
        "No HTTP proxy is healthy (STARTING on 10.0.0.1)."
    )
    without = {**details("RUNNING", engine, at=11.0, proxy="STARTING"), "proxy_location": "Disabled"}
    dashboard.answers[APPLICATIONS] = [(200, NOTHING), (200, without)]
    assert run(path, "--address", dashboard.url)[0] == 0


def test_a_mistake_in_the_file_is_found_before_anything_is_sent(dashboard: FakeServer, path: Path, run: Any) -> None:
    path.write_text(CONFIG.replace("num_replicas", "num_replica"))
    status, out, err = run(path, "--address", dashboard.url)
    expected = f"{path}:7: there is no key 'applications.deployments.num_replica'. Did you mean 'num_replicas'?"
    assert (status, out, err) == (1, "", f"quire: {expected}\n")
    assert dashboard.received == []


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({APPLICATIONS: (404, "")}, "quire: address: {url} is not the dashboard of a Ray cluster with Serve."),
        (
            {APPLICATIONS: (200, NOTHING), f"PUT {APPLICATIONS}": (400, "ValidationError: no such field")},
            "quire: The cluster refused (400): no such field",
        ),
    ],
)
def test_a_cluster_that_refuses(
    dashboard: FakeServer, path: Path, run: Any, answers: dict[str, Any], said: str
) -> None:
    dashboard.answers.update(answers)
    status, out, err = run(path, "--address", dashboard.url)
    assert (status, out, err.strip()) == (1, "", said.format(url=dashboard.url))


def test_no_cluster_is_one_line(path: Path, run: Any) -> None:
    status, _, err = run(path, "--address", "127.0.0.1:1")
    assert status == 1
    assert err.startswith("quire: address: no Ray dashboard answers at http://127.0.0.1:1 (")
    assert err.count("\n") == 1


def test_http_options_that_serve_will_ignore_are_told(dashboard: FakeServer, path: Path, run: Any) -> None:
    dashboard.answers[APPLICATIONS] = [(200, NOTHING), (200, details("RUNNING", deployment("Engine"), port=9000))]
    status, _, err = run(path, "--address", dashboard.url)
    assert status == 0
    assert "Serve runs already, with port 9000: the file's http_options would count after `serve shutdown`." in err


def test_without_waiting(dashboard: FakeServer, path: Path, run: Any) -> None:
    dashboard.answers[APPLICATIONS] = (200, details("DEPLOYING"))
    status, out, _ = run(path, "--address", dashboard.url, "--no-wait")
    assert (status, out) == (
        0,
        f"Submitted to {dashboard.url}. Watch it with: quire status --address {dashboard.url}\n",
    )


def test_ctrl_c_ends_the_wait_without_a_trace(dashboard: FakeServer, path: Path) -> None:
    dashboard.answers[APPLICATIONS] = (200, details("DEPLOYING", at=1.0))
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from quire.cluster.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "deploy", str(path), "--address", dashboard.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(dashboard.received) > 4, 60, lambda: dashboard.received)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")


def test_lines_are_printed_when_something_changes() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    with fake_server() as fake:
        steps = [deployment("Engine", "UPDATING", running=n, target=2) for n in (0, 0, 1, 1)]
        fake.answers[APPLICATIONS] = [(200, details("DEPLOYING", step)) for step in steps]
        with ServeApi(fake.url) as api:
            for _ in steps:
                lines(api.look().applications["quire"])
    assert said == ["Engine: UPDATING 0/2", "Engine: UPDATING 1/2"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("Waiting for resources.\nMore.", "Waiting for resources."),
        (TRACEBACK, "model: '/m' does not exist."),
        ("ValueError: a\nRuntimeError: b: Error: c", "b: Error: c"),
    ],
)
def test_the_line_of_a_traceback(text: str, line: str) -> None:
    assert last_error(text) == line
