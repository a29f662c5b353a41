"""What `quire serve` refuses before it starts anything, each in one clear line."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.cluster import ray_local, service
from quire.cluster.ray_local import free_ports, make_folder, remove_folder
from quire.engine.errors import ConfigError, EngineError


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


ABANDONS = """
import os, sys, tempfile
from quire.cluster import ray_local

ray_local.MAX_TEMP_DIR_LENGTH = 1000
tempfile.tempdir = sys.argv[1]
print(ray_local.make_folder(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_only_folders_of_the_dead_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_local, "MAX_TEMP_DIR_LENGTH", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, strange = make_folder(), tmp_path / "quire-strange"
    strange.mkdir()  # of another version, perhaps
    done = subprocess.run([sys.executable, "-c", ABANDONS, tmp_path], capture_output=True, text=True, timeout=60)
    abandoned, elsewhere, link = Path(done.stdout.strip()), tmp_path / "elsewhere", tmp_path / "quire-link"
    shutil.copytree(abandoned, elsewhere)
    link.symlink_to(elsewhere)  # by somebody who would like to see it removed
    new = make_folder()
    assert set(tmp_path.iterdir()) == {mine, strange, elsewhere, link, new}
    assert (elsewhere / "lock").exists()


def test_a_folder_that_is_removed_is_not_locked_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_local, "MAX_TEMP_DIR_LENGTH", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    folder = make_folder()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    remove_folder(folder)
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_temporary_directory_with_a_space_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy's configuration has paths without quotes."""
    spaced = Path(tempfile.mkdtemp(prefix="a ", dir="/tmp"))
    monkeypatch.setattr(ray_local, "MAX_TEMP_DIR_LENGTH", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    folder = make_folder()
    assert folder.parent == Path("/tmp")
    shutil.rmtree(folder)
    spaced.rmdir()


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            service.serve(port=port)
    assert caught.value.message.startswith(f"port: cannot listen on 127.0.0.1:{port} (Address already in use)")
    assert "\n" not in caught.value.message


def test_one_port_for_two() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ConfigError, match=f"grpc-port: {port} is the port of HTTP"):
        service.serve(port=port, grpc_port=port)


def test_a_ray_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: object) -> None:
        raise RuntimeError("Many lines.\nThe last one.")

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setattr(ray_local, "environment", lambda folder, haproxy: {})
    (folder := tmp_path / "ray").mkdir()
    with pytest.raises(EngineError) as caught:
        ray_local.LocalRay.start(folder)
    assert caught.value.message == "Ray could not start: The last one."
    assert not folder.exists()


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="'no-such-model' does not exist"):
        service.serve(overrides={"model": {"model": "no-such-model"}}, port=0)
