"""A real service on the default model, for all tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from live_service import run_service

from quire.cluster.ray_local import free_ports


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
    # A quarter of the free memory, which it would take, takes an engine half a minute of a core to fill.
    options = ["--port", str(http), "--grpc-port", str(grpc), "--num-kv-blocks", "1024"]
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
