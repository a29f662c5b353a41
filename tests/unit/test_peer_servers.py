"""The servers that are compared: when they are ready and at rest, and that they end with their block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.benchmarks.peers import servers
from tests.benchmarks.peers.servers import PeerError, Server, paused, running, wait_until_at_rest

SERVER = """
import subprocess, sys, http.server
stubborn = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


TELLS_ITS_LIBRARIES = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(repr(os.environ.get("LD_PRELOAD")).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(("environment", "told"), [({}, b"None"), ({"LD_PRELOAD": ""}, b"''")])
def test_libraries_of_the_caller_are_not_those_of_a_server(
    environment: dict[str, str], told: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", " ")
    server = Server("fake", (sys.executable, "-c", TELLS_ITS_LIBRARIES, "{port}"), "/", environment=environment)
    with running(server, tmp_path / "log") as (url, _), urllib.request.urlopen(url) as answer:
        assert answer.read() == told


def test_a_server_is_gone_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.peers.servers.STOP_TIMEOUT_S", 0.5)
    server = Server("fake", (sys.executable, "-c", SERVER, "{port}"), "/")
    started: list[psutil.Process] = []

    def interrupted() -> None:
        with running(server, tmp_path / "log") as (_, process):
            started.extend([process, *process.children()])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)


SLOW_SERVER = """
import http.server, sys
answers = iter([b"[]", b"[]"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(next(answers, b"[model]"))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ready_when_it_says_so(tmp_path: Path) -> None:
    """Dynamo's frontend answers before it knows an engine."""
    server = Server("fake", (sys.executable, "-c", SLOW_SERVER, "{port}"), "/", "model")
    with running(server, tmp_path / "log") as (url, _), urllib.request.urlopen(url) as response:
        assert response.read() == b"[model]"


LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
sys.exit("child " + str(child.pid))
"""


def test_what_a_server_leaves_behind_when_it_ends_is_gone(tmp_path: Path) -> None:
    server = Server("fake", (sys.executable, "-c", LEAVES_A_CHILD), "/")
    with pytest.raises(PeerError, match="child") as caught, running(server, tmp_path / "log"):
        pass
    child = int(caught.value.message.rpartition(" ")[2])
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for([psutil.Process(child)], lambda status: status == psutil.STATUS_ZOMBIE)


FAKE_PART = """
import os, pathlib, sys, time
place = pathlib.Path(os.environ["PLACE"])
(place / PART).write_text(f"{os.getpid()} {os.environ['DYN_FILE_KV']}")
if os.environ.get("ENDS") == PART:
    while not (place / "frontend").exists():
        time.sleep(0.01)
    sys.exit(3)
time.sleep(60)
"""


def dynamo(folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Dynamo's starter, on parts that are none, which write down who they are in a folder."""
    for part in ("frontend", "vllm"):
        package = folder / "dynamo" / part
        package.mkdir(parents=True)
        (package / "__main__.py").write_text(f"PART = {part!r}{FAKE_PART}")
    script = Path(servers.__file__).with_name("dynamo_vllm.py")
    return subprocess.Popen(
        (sys.executable, str(script), "model", "checkpoint", "bfloat16", "2048", "8000"),
        env={**os.environ, "PYTHONPATH": str(folder), "PLACE": str(folder), "DYN_FILE_KV": "mine", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def parts_of(folder: Path) -> dict[str, tuple[int, Path]]:
    """The process and the folder of each part, once both have begun."""
    files = [folder / "frontend", folder / "vllm"]
    deadline = time.monotonic() + 20.0
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
    found = {file.name: file.read_text().split() for file in files}
    return {name: (int(pid), Path(place)) for name, (pid, place) in found.items()}


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_dynamo_ends_with_its_starter(signal_: signal.Signals, tmp_path: Path) -> None:
    process = dynamo(tmp_path)
    found = parts_of(tmp_path)
    (meeting,) = {place for _, place in found.values()}
    assert meeting.is_dir()
    process.send_signal(signal_)
    assert process.wait(20.0) == 0
    assert not meeting.exists()
    assert not any(psutil.pid_exists(pid) for pid, _ in found.values())


def test_a_part_of_dynamo_that_ends_ends_the_other_and_is_told(tmp_path: Path) -> None:
    process = dynamo(tmp_path, ENDS="vllm")
    _, told = process.communicate(timeout=20.0)
    assert process.returncode == 1
    assert told.splitlines()[-1] == "Dynamo's engine ended with status 3."
    assert not psutil.pid_exists(parts_of(tmp_path)["frontend"][0])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = Server("fake", (sys.executable, "-c", "raise SystemExit('no such model')"), "/")
    with pytest.raises(PeerError, match="no such model"), running(server, tmp_path / "log"):
        pass


def test_a_paused_server_stands_still_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.peers.servers.STOP_TIMEOUT_S", 0.5)
    server = Server("fake", (sys.executable, "-c", SERVER, "{port}"), "/")
    with running(server, tmp_path / "log") as (_, process):
        family = [process, *process.children()]
        assert len(family) == 2
        with paused(process):
            wait_for(family, lambda status: status == psutil.STATUS_STOPPED)
        wait_for(family, lambda status: status != psutil.STATUS_STOPPED)


def wait_for(processes: list[psutil.Process], is_wanted: Callable[[str], bool]) -> None:
    """Until all are in such a state: a signal has been sent when it may not have arrived yet."""
    deadline = time.monotonic() + 10.0
    while not all(is_wanted(process.status()) for process in processes):
        assert time.monotonic() < deadline


def test_a_server_is_at_rest_when_nobody_of_it_takes_much_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of each process, look by look, two seconds apart. One ends and one begins, which is at work."""
    looks = iter([{1: 5.0, 2: 3.0}, {1: 6.0, 2: 3.0}, {1: 6.1, 3: 0.9}, {1: 6.2, 3: 1.3}, {1: 6.9, 3: 1.3}])
    waited: list[float] = []
    monkeypatch.setattr(servers, "_cpu_seconds", lambda _process: next(looks))
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    wait_until_at_rest(psutil.Process())
    assert waited == [servers.REST_LOOK_S] * 3
    assert next(looks) == {1: 6.9, 3: 1.3}
