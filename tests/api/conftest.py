"""The default model's tokenizer, a fake backend behind the real API, and a real HTTP server for the official SDK."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fake_backend import FakeBackend
from live_server import LiveServer, run_server

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.limits import ApiLimits
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

START_S = 120.0


@pytest.fixture(scope="session")
def served() -> ServedModel:
    info = load_model_info(ModelConfig(max_model_len=1024))
    return ServedModel.create(info, load_tokenizer(info), created=1_700_000_000)


@pytest.fixture
def backend(served: ServedModel) -> FakeBackend:
    return FakeBackend(served)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application directly, without a socket."""
    app = create_app(backend, limits=ApiLimits(max_body_bytes=200_000, max_choices=32))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


@pytest.fixture(scope="module")
def service_ports() -> tuple[int, int]:
    """For HTTP and for gRPC."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    http, grpc = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    return http, grpc


@pytest.fixture(scope="module")
def service_url(service_ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root of a real service on the default model, started as a user does."""
    http, grpc = service_ports
    log = tmp_path_factory.mktemp("service") / "log"
    command = [sys.executable, "-c", "from quire.cluster.cli import main; main()", "serve"]
    command += ["--port", str(http), "--grpc-port", str(grpc)]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT) as service:
        try:
            deadline = time.monotonic() + START_S
            while "Quire serves" not in log.read_text(errors="replace"):
                if service.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"The service did not start:\n{log.read_text(errors='replace')}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{http}"
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(30)


@pytest.fixture
def grpc_target(service_url: str, service_ports: tuple[int, int]) -> str:
    """Where that service answers gRPC."""
    return f"127.0.0.1:{service_ports[1]}"


@pytest.fixture(scope="module")
def live_server(served: ServedModel) -> Iterator[LiveServer]:
    with run_server(served) as server:
        yield server
