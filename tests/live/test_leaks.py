"""The check for leaks finds each kind of them, and forgets what has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
from cluster_processes import wait_for
from leaks import SHARED_MEMORY, Holdings, Session, holdings, left_over


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def found(session: Session) -> Callable[[], list[str]]:
    before: Holdings = holdings(session)
    return lambda: left_over(before, session)


def test_a_process_is_found_until_it_ends(found: Callable[[], list[str]]) -> None:
    assert found() == []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (leak,) = found()
        assert leak.startswith(f"process {process.pid} {sys.executable} -c import time")
        process.kill()
    assert found() == []


def test_a_process_whose_parent_has_ended_is_found(found: Callable[[], list[str]]) -> None:
    """It is a child of this process from then on (`adopt_orphans`)."""
    start = "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)"
    code = f"import subprocess; print({start}.pid)"
    orphan = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)
    (leak,) = found()
    assert leak.startswith(f"process {orphan} ")
    os.kill(orphan, signal.SIGKILL)
    wait_for(lambda: found() == [], 10, found)
    os.waitpid(orphan, 0)


def test_a_listening_socket_is_found_until_it_is_closed(found: Callable[[], list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert found() == [f"port {listener.getsockname()[1]} is listened to"]
    assert found() == []


def test_shared_memory_is_found_until_it_is_unlinked(found: Callable[[], list[str]]) -> None:
    path = SHARED_MEMORY / f"quire-test-{os.getpid()}"
    path.touch()
    assert f"shared memory {path.name}" in found()
    path.unlink()
    assert f"shared memory {path.name}" not in found()


def test_what_the_session_has_started_is_none(session: Session, found: Callable[[], list[str]]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)),
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process,
    ):
        assert len(found()) == 2
        session.adopt()
        assert found() == []
        process.kill()


def test_a_leak_on_ray_is_found_until_it_is_released(cluster: str) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    from quire.cluster.worker_actor import WorkerActor
    from quire.engine.config import EngineConfig

    session = Session()
    session.adopt()
    before = holdings(session)
    group = placement_group([{"CPU": 0.1}])
    remote_class = ray.remote(WorkerActor)
    actor = remote_class.options(num_cpus=0).remote(EngineConfig(), None, 0)
    wait_for(lambda: len(left_over(before, session)) == 3, 60, lambda: left_over(before, session))
    kinds = sorted(text.split(" ")[0] for text in left_over(before, session))
    assert kinds == ["actor", "placement", "process"]
    ray.kill(actor)
    remove_placement_group(group)
    wait_for(lambda: left_over(before, session) == [], 30, lambda: left_over(before, session))
