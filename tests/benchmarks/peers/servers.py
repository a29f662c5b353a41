"""The servers that are compared, started one at a time as processes of their own, and gone when the block ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quire.cluster.ray_local import free_ports
from quire.engine.errors import QuireError

MAX_MODEL_LEN = 2048
START_TIMEOUT_S = 1200.0  # a first vLLM compiles for minutes
STOP_TIMEOUT_S = 20.0
POLL_S = 0.2
LOG_LINES = 15


class PeerError(QuireError):
    """A server did not start: the message ends with the last lines of its log."""


_SERVE = (sys.executable, "-m", "quire", "serve", "--port", "{port}")


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server. `{port}` in its command is where it is to listen."""

    name: str
    command: Sequence[str]
    ready_path: str  # answers 200 when requests can be sent
    environment: Mapping[str, str] = field(default_factory=dict)


def quire_server(precision: str) -> Server:
    """`quire serve` from this environment, on the default model, whose file has its weights packed."""
    return Server("quire", (*_SERVE, *engine_options(precision)), "/ready")


def unpacked_server(checkpoint: Path, precision: str) -> Server:
    """The same on the checkpoint that peers read, which has a float32 or bfloat16 for each weight."""
    return Server("unpacked", (*_SERVE, "--model", str(checkpoint), *engine_options(precision)), "/ready")


def engine_options(precision: str) -> tuple[str, ...]:
    """Quire's own, on every way to start it. Without drafts: the greedy answers to random prompts repeat themselves."""
    chosen = ("--quantization", "int8") if precision == "int8" else ("--dtype", precision)
    return (*chosen, "--max-model-len", str(MAX_MODEL_LEN), "--num-speculative-tokens", "0")


def vllm_server(python: Path, checkpoint: Path, precision: str) -> Server:
    """vLLM's OpenAI server for CPUs, as it was found fastest: threads bound to all cores, 2 GB of cache."""
    cores = sorted(os.sched_getaffinity(0))
    command = (
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--served-model-name", "smollm2", "--dtype", precision, "--host", "127.0.0.1", "--port", "{port}",
        "--max-model-len", str(MAX_MODEL_LEN), "--enable-prefix-caching", "--enable-prompt-tokens-details",
    )  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",  # its kernels' compiler is asked for by name
    }
    return Server("vllm", command, "/health", environment)


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server and wait until it is ready; gives its URL and its process. Raises `PeerError`.

    It and all that it has started is gone when the block ends, however it ends.
    """
    (port,) = free_ports(1)
    command = [part.format(port=port) for part in server.command]
    with log.open("wb") as output:
        # A session of its own: Ctrl-C here must not reach it before the block ends it in order.
        process = psutil.Popen(
            command,
            env={**os.environ, **server.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url + server.ready_path, server.name, log)
            yield url, process
        finally:
            end(process)


def _wait_until_ready(process: psutil.Popen, url: str, name: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise PeerError(f"{name} did not start (log: {log}):\n{last}")
        time.sleep(POLL_S)


def end(process: psutil.Popen) -> None:
    """SIGINT and some patience, then whatever is left of it and what it has started is killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
