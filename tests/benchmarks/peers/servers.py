"""The servers that are compared, started one at a time as processes of their own, and gone when the block ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quire.cluster.ray_local import free_ports
from quire.engine.errors import QuireError

from .answers import Ask, ask_openai

MAX_MODEL_LEN = 2048
LD_PRELOAD = "LD_PRELOAD"  # libraries that a program is started with; those of who calls are not passed on
START_TIMEOUT_S = 1200.0  # a first vLLM compiles for minutes
STOP_TIMEOUT_S = 20.0
POLL_S = 0.2
AT_REST, REST_LOOK_S, REST_TIMEOUT_S = 0.3, 2.0, 60.0  # of a core; Ray takes a tenth
LOG_LINES = 15


class PeerError(QuireError):
    """A server did not start: the message ends with the last lines of its log."""


_SERVE = (sys.executable, "-m", "quire", "serve", "--port", "{port}")


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server. `{port}` in its command is where it is to listen."""

    name: str
    command: Sequence[str]
    ready_path: str  # answers 200 when requests can be sent,
    ready_words: str = ""  # with these somewhere in what it says
    environment: Mapping[str, str] = field(default_factory=dict)
    ask: Ask = ask_openai  # how it tells the ids of its tokens

    @property
    def preloaded(self) -> list[str] | None:
        """Names of the libraries that it is started with; None where none are looked for."""
        paths = self.environment.get(LD_PRELOAD)
        return None if paths is None else [Path(path).name for path in paths.split(":") if path]


def quire_server(precision: str) -> Server:
    """`quire serve` from this environment, on the default model, whose file has its weights packed."""
    return Server("quire", (*_SERVE, *engine_options(precision)), "/ready")


def unpacked_server(checkpoint: Path, precision: str) -> Server:
    """The same on the checkpoint that peers read, which has a float32 or bfloat16 for each weight."""
    return Server("unpacked", (*_SERVE, "--model", str(checkpoint), *engine_options(precision)), "/ready")


def engine_options(precision: str) -> tuple[str, ...]:
    """Quire's own, on every way to start it. Without drafts: the greedy answers to random prompts repeat themselves."""
    chosen = ("--quantization", "int8", "--dtype", "bfloat16") if precision == "int8" else ("--dtype", precision)
    return (*chosen, "--max-model-len", str(MAX_MODEL_LEN), "--num-speculative-tokens", "0")


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server and wait until it is ready; gives its URL and its process. Raises `PeerError`.

    It and all that it has started is gone when the block ends, however it ends.
    """
    (port,) = free_ports(1)
    command = [part.format(port=port) for part in server.command]
    inherited = {name: value for name, value in os.environ.items() if name != LD_PRELOAD}
    with log.open("wb") as output:
        # A session of its own: Ctrl-C here must not reach it before the block ends it in order.
        process = psutil.Popen(
            command,
            env={**inherited, **server.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, server, log)
            yield url, process
        finally:
            end(process)


def _wait_until_ready(process: psutil.Popen, url: str, server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url + server.ready_path, timeout=10) as response:
                if server.ready_words.encode() in response.read():
                    return
        except (OSError, http.client.HTTPException):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise PeerError(f"{server.name} did not start (log: {log}):\n{last}")
        time.sleep(POLL_S)


def wait_until_at_rest(process: psutil.Process) -> None:
    """A server that is ready may have more to prepare: Quire gives its KV cache its memory (vLLM has done that by
    then). Until it and all that it has started take little of a core; not for ever."""
    deadline, before = time.monotonic() + REST_TIMEOUT_S, _cpu_seconds(process)
    while time.monotonic() < deadline:
        time.sleep(REST_LOOK_S)
        now = _cpu_seconds(process)
        if sum(seconds - before.get(pid, 0.0) for pid, seconds in now.items()) < AT_REST * REST_LOOK_S:
            return
        before = now


def _cpu_seconds(process: psutil.Process) -> dict[int, float]:
    """So far, by process."""
    found = {}
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            found[each.pid] = times.user + times.system
    return found


@contextlib.contextmanager
def paused(process: psutil.Process) -> Iterator[None]:
    """Inside, it and all that it has started stands still: what it does at rest takes nothing from others."""
    family = [process, *process.children(recursive=True)]
    try:
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        yield
    finally:
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


def end(process: psutil.Popen) -> None:
    """SIGINT and some patience, then whatever is left of it and what it has started is killed; also what belongs to
    its group, where it has ended before and left others behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
