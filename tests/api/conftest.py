"""The default model's tokenizer, a fake backend behind the real API, and a real HTTP server for the official SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import httpx
import pytest
from fake_backend import FakeBackend
from live_server import LiveServer, run_server
from live_service import run_service

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.limits import ApiLimits
from quire.cluster.ray_local import free_ports
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer


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


@pytest.fixture(scope="session")
def service_ports() -> list[int]:
    """For HTTP and for gRPC."""
    return free_ports(2)


@pytest.fixture(scope="session")
def service_url(service_ports: list[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The root of a real service on the default model, started as a user does. It ends with the last test that asks
    for it: those that come after have the machine for themselves.
    """
    http, grpc = service_ports
    options = ["--port", str(http), "--grpc-port", str(grpc)]
    with _service:
        _service.enter_context(run_service(tmp_path_factory.mktemp("service") / "log", *options))
        yield f"http://127.0.0.1:{http}"


_service = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function) -> None:
    users = [each for each in item.session.items if isinstance(each, pytest.Function) and _asks(each)]
    if _asks(item) and item is users[-1]:
        _service.close()


def _asks(item: pytest.Function) -> bool:
    return "service_url" in item.fixturenames


@pytest.fixture
def grpc_target(service_url: str, service_ports: list[int]) -> str:
    """Where that service answers gRPC."""
    return f"127.0.0.1:{service_ports[1]}"


@pytest.fixture(scope="module")
def live_server(served: ServedModel) -> Iterator[LiveServer]:
    with run_server(served) as server:
        yield server
