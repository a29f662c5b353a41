"""Who can connect to what Serve starts for us: HAProxy, and gRPC servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from quire.cluster import grpc_listeners, haproxy_exec
from quire.cluster.haproxy_exec import bind_to, put_right
from quire.cluster.haproxy_tier import haproxy_launcher
from quire.cluster.ray_local import free_ports

CONFIG = """frontend prometheus
    bind :23001
frontend http_frontend
    bind 127.0.0.1:8000
    bind 127.0.0.1:9000 proto h2
listen stats
  bind *:23002
"""


def test_only_the_front_door_is_opened() -> None:
    expected = """frontend prometheus
    bind 127.0.0.1:23001
frontend http_frontend
    bind 0.0.0.0:8000
    bind 0.0.0.0:9000 proto h2
listen stats
  bind 127.0.0.1:23002
"""
    assert bind_to(CONFIG, "0.0.0.0", {"8000", "9000"}) == expected


def test_haproxy_is_started_with_its_configuration_put_right(tmp_path: Path) -> None:
    launcher = haproxy_launcher(tmp_path, "127.0.0.1", [8000])
    assert launcher is not None
    config = tmp_path / "haproxy.cfg"
    timeouts = "defaults\n    mode http\n    timeout connect 1s\n    timeout client 1s\n    timeout server 1s\n"
    config.write_text(timeouts + "frontend f\n    bind :23001\n")
    done = subprocess.run([launcher, "-c", "-f", config], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr
    assert "frontend f\n    bind 127.0.0.1:23001\n" in config.read_text()
    assert "timeout http-request 10s" in config.read_text()


def test_what_serve_has_no_setting_for(tmp_path: Path) -> None:
    """Bounds on who waits, an answer of ours where no gateway is, and no headers that Serve fails on."""
    config = """defaults
    mode http
    timeout client 3600s
    timeout http-request 7s
    errorfile 502 500.http
    errorfile 503 500.http
frontend prometheus
    bind 127.0.0.1:23001
frontend http_frontend
    bind 127.0.0.1:8000
    acl routes path -i /-/routes
backend quire
    http-reuse always
"""
    answer = tmp_path / "no_gateway.http"
    expected = f"""defaults
    timeout client 120s
    timeout http-request 10s
    timeout http-keep-alive 120s
    option http-ignore-probes
    option http-server-close
    errorfile 502 {answer}
    errorfile 503 {answer}
    errorfile 504 {answer}
    mode http
frontend prometheus
    bind 127.0.0.1:23001
frontend http_frontend
    bind 127.0.0.1:8000
    http-request del-header x-request-id if {{ req.hdr(x-request-id) -m reg '[^ -~]' }}
    http-request del-header x-session-id if {{ req.hdr(x-session-id) -m reg '[^ -~]' }}
    http-request del-header x-request-timeout-seconds if {{ req.hdr(x-request-timeout-seconds) -m reg '[^ -~]' }}
    http-request del-header serve_multiplexed_model_id
    http-request del-header serve-multiplexed-model-id
    http-request del-header x-request-disconnect-disabled
    acl routes path -i /-/routes
backend quire
"""
    assert put_right(config, tmp_path) == expected
    assert {"defaults", "frontend http_frontend"} <= set(HAPROXY_CONFIG_TEMPLATE.splitlines())  # what it looks for
    head, _, body = answer.read_bytes().decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n")
    assert f"\r\nContent-Length: {len(body)}\r\nRetry-After: 5\r\n" in head
    assert json.loads(body)["error"]["type"] == "server_error"


@pytest.mark.parametrize(("is_alive", "printed"), [(True, "-dS hello\n"), (False, "")])
def test_haproxy_starts_only_for_a_parent_that_lives(is_alive: bool, printed: str) -> None:
    """It would be told of no death that was before it asked to be."""
    parent = str(os.getpid() if is_alive else os.getpid() + 1)
    command = [sys.executable, "-IS", haproxy_exec.__file__, parent, "/bin/echo", "127.0.0.1", "8000", "hello"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout == printed


def test_where_nothing_may_be_run_there_is_no_haproxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a /tmp that is mounted with noexec. Serve's own proxy serves there."""
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
    assert haproxy_launcher(tmp_path, "127.0.0.1", [8000]) is None


ASKS = """
import asyncio, grpc, psutil
from quire.cluster.grpc_listeners import keep_off_the_network

keep_off_the_network()
keep_off_the_network()

async def main():
    server = grpc.aio.server()
    asked = [server.add_insecure_port("[::]:0"), server.add_insecure_port("[::]:{port}")]
    await server.start()
    found = {each.laddr.port: each.laddr.ip for each in psutil.Process().net_connections("tcp")}
    print(*(found[port].removeprefix("::ffff:") for port in asked))
    await server.stop(None)

asyncio.run(main())
"""


@pytest.mark.parametrize(("asked", "expected"), [(None, "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_grpc_servers_listen_where_they_are_wanted(
    asked: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the node's address is the loopback
    if asked is not None:
        monkeypatch.setenv(grpc_listeners.GRPC_HOST, asked)
    (port,) = free_ports(1)
    code = ASKS.replace("{port}", str(port))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["127.0.0.1", expected], done.stderr
