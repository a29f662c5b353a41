"""What `quire serve` refuses before it starts anything, each in one clear line."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from quire.cluster import ray_local, service
from quire.cluster.ray_local import free_ports
from quire.engine.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(service, "_start", fail)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.psutil, "virtual_memory", lambda: SimpleNamespace(available=700 << 20))
    with pytest.raises(ConfigError) as caught:
        service.serve(port=free_ports(1)[0])
    assert caught.value.message == "Too little memory: 700 MiB are available, at least 2048 MiB are needed."


def test_free_ports_are_not_those_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of which would be taken again before anybody listens."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(20_000 <= port < 32_768 for port in ports)
    monkeypatch.setattr(ray_local, "_PORTS", ports[:3])
    with socket.create_server(("", ports[0])):
        assert set(free_ports(2)) == set(ports[1:3])
        with pytest.raises(OSError, match=r"3 free ports .* are not to be had"):
            free_ports(3)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            service.serve(port=port)
    assert caught.value.message.startswith(f"port: cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert "\n" not in caught.value.message


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="'no-such-model' does not exist"):
        service.serve(overrides={"model": {"model": "no-such-model"}}, port=0)
