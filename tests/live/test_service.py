"""`quire serve` from start to end, as a person at a terminal meets it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from cluster_processes import command, wait_for

from quire.cluster.ray_local import free_ports, make_folder

QUIRE = str(Path(sys.executable).parent / "quire")


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A temporary directory of its own, so that what is left there is what the service has left."""
    folder = Path("/tmp") / f"t{os.getpid():x}"  # short: Ray puts sockets below it
    folder.mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return variables | {"TMPDIR": str(folder), "HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(autouse=True)
def leaves_nothing(environment: dict[str, str]) -> Iterator[None]:
    shared_memory = set(os.listdir("/dev/shm"))
    yield
    folder = Path(environment["TMPDIR"])
    assert list(folder.iterdir()) == []
    folder.rmdir()
    assert list(Path(environment["HOME"]).iterdir()) == []
    assert processes_of(str(folder)) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory


def reap_orphans() -> None:
    """What a killed service leaves is adopted here (`leaks.py`). Ray takes a raylet for alive until it is reaped."""
    for child in psutil.Process().children():
        with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def processes_of(folder: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if _belongs_to(each, folder)]


def _belongs_to(process: psutil.Process, folder: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == folder
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@contextmanager
def started(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Killed behind the block, if it has not ended."""
    process = subprocess.Popen(
        [QUIRE, "serve", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], number: int, within_s: float) -> None:
    started = time.monotonic()
    process.send_signal(number)
    process.wait(60)
    assert time.monotonic() - started < within_s


def test_serve_answers_and_ends_without_a_trace(environment: dict[str, str]) -> None:
    (port,) = free_ports(1)
    with started(environment, "--port", str(port), "--max-num-seqs", "8") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:  # nothing is printed there before the service answers
            lines.append(line)
            if "Ctrl-C" in line:
                break
        assert any(f"http://127.0.0.1:{port}/v1" in line for line in lines), (lines, process.stderr)
        assert any(line.strip().startswith("curl ") for line in lines)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json={
                "model": "smollm2-135m-instruct",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            },
            timeout=60,
        )
        assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        with httpx.stream(
            "POST",
            f"http://127.0.0.1:{port}/v1/completions",
            json={
                "model": "smollm2-135m-instruct",
                "prompt": "a",
                "max_tokens": 4000,
                "ignore_eos": True,
                "stream": True,
            },
            timeout=60,
        ) as stream:
            next(stream.iter_lines())
            end(process, signal.SIGINT, within_s=15)  # gateways may take long for their streams, but not here
        assert process.returncode in (0, 130)


@pytest.mark.parametrize(
    ("number", "when_there_is"),
    [
        (signal.SIGINT, "raylet"),
        (signal.SIGINT, "ray::DashboardAgent"),  # the driver connects about then
        (signal.SIGTERM, "ray::ServeController"),
        (signal.SIGINT, "ray::ProxyActor"),  # and deployments begin to start
    ],
)
def test_a_start_that_is_interrupted_leaves_nothing(
    environment: dict[str, str], number: int, when_there_is: str
) -> None:
    (port,) = free_ports(1)
    with started(environment, "--port", str(port)) as process:
        parent = psutil.Process(process.pid)
        wait_for(lambda: any(when_there_is in command(child) for child in parent.children(recursive=True)), 60)
        end(process, number, within_s=15)
    assert process.returncode in (0, 130)


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any("Ctrl-C" in line for line in process.stdout), process.stderr


def nobody_else_reaches(folder: Path) -> None:
    """What runs programs in `folder`, and sockets through which others are told what to do."""
    (private,) = folder.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {"haproxy", "admin.sock", "metrics.sock", "raylet"} <= {each.name for each in private.rglob("*")}


def test_only_the_front_door_is_open_to_the_network(environment: dict[str, str]) -> None:
    """Behind it, what is sent is unpickled."""
    (port,) = free_ports(1)
    with started(environment, "--port", str(port), "--host", "0.0.0.0") as process:
        wait_until_ready(process)
        tree = psutil.Process(process.pid).children(recursive=True)
        listening = [each for p in tree for each in p.net_connections("tcp") if each.status == "LISTEN"]
        wide = [each.laddr for each in listening if each.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]
        assert wide == [("0.0.0.0", port)]
        nobody_else_reaches(Path(environment["TMPDIR"]))
        end(process, signal.SIGHUP, within_s=15)  # as when the terminal is closed
    assert process.returncode in (0, 130)


def test_a_service_that_is_killed_gives_its_port_free(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next to start removes what it could not remove itself."""
    (port,) = free_ports(1)
    folder = environment["TMPDIR"]
    before = set(psutil.Process().children())
    body = {"model": "smollm2-135m-instruct", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with started(environment, "--port", str(port)) as process:
        wait_until_ready(process)
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            process.kill()
            process.wait(30)
            wait_for(lambda: reap_orphans() or not any("haproxy" in command(each) for each in processes_of(folder)), 20)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    for agent in set(psutil.Process().children()) - before:  # of Ray, which notice in a minute that they are alone
        agent.kill()
    (left,) = Path(folder).iterdir()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    made = make_folder()
    assert list(Path(folder).iterdir()) == [made] != [left]
    shutil.rmtree(made)


def one_line_of_refusal(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([QUIRE, "serve", *arguments], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_port_in_use_is_one_line(environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line_of_refusal(environment, "--port", str(port))
    assert (
        line == f"quire: port: cannot listen on 127.0.0.1:{port} (Address already in use); choose another with --port."
    )


def test_a_missing_model_is_one_line(environment: dict[str, str]) -> None:
    line = one_line_of_refusal(environment, "--model", "/no/such/model")
    assert line.startswith("quire: model: '/no/such/model' does not exist")


def test_a_broken_file_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("applications:\n  - import_path: quire.cluster.app:build\n    args:\n      modle: {}\n")
    assert one_line_of_refusal(environment, str(path)) == (
        f"quire: {path}:4: there is no key 'args.modle'. Did you mean 'model'?"
    )
