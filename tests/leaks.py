"""What tests may leave behind: processes, actors, placement groups, listening sockets, shared memory.

Compared before and after each module of tests of `cluster` and `live` (their `conftest.py`). What session fixtures
start stays, and is told apart by `Session.adopt`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cluster_processes import command, wait_for

SHARED_MEMORY = Path("/dev/shm")
_RANK, _REPLICA = "ray::WorkerActor", "ray::ServeReplica:"
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # they live as long as this process


def adopt_orphans() -> None:
    """What a child leaves behind becomes a child of this process, and is found."""
    if sys.platform == "linux":
        set_child_subreaper = 36  # see prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


@dataclass
class Session:
    """What lives as long as the session: processes that fixtures have started, and the applications on its Ray."""

    roots: set[psutil.Process] = field(default_factory=set)
    applications: set[str] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)

    def adopt(self, application: str | None = None) -> None:
        """All children of this process, and all ports that it listens to, are the session's from now on."""
        self.roots |= set(psutil.Process().children())
        self.ports |= set(_listening())
        if application is not None:
            self.applications.add(application)

    def owns(self, process: psutil.Process, name: str) -> bool:
        """The processes of Ray itself, but no rank and no replica that a test has asked for."""
        if not self.roots & {process, *process.parents()}:
            return False
        if name.startswith(_REPLICA):
            return name.removeprefix(_REPLICA).split(":", 1)[0] in self.applications
        return not name.startswith(_RANK)


@dataclass(frozen=True)
class Holdings:
    """What this process and its descendants hold. Each thing by a name for people."""

    processes: dict[psutil.Process, str]
    ports: dict[int, str]
    shared_memory: set[str]
    on_ray: dict[str, str]  # live actors and placement groups by id


def holdings(session: Session) -> Holdings:
    return Holdings(
        dict(_processes(session)),
        {port: f"port {port} is listened to" for port in _listening() if port not in session.ports},
        set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set(),
        dict(_on_ray(session)),
    )


def left_over(before: Holdings, session: Session) -> list[str]:
    """What is there now and was not before."""
    now = holdings(session)
    found = [f"process {p.pid} {name}" for p, name in now.processes.items() if p not in before.processes]
    found += [text for port, text in now.ports.items() if port not in before.ports]
    new_files = now.shared_memory - before.shared_memory
    found += [f"shared memory {name}" for name in sorted(new_files - _of_strangers(new_files))]
    found += [text for key, text in now.on_ray.items() if key not in before.on_ray]
    return found


@contextlib.contextmanager
def nothing_left_over(session: Session) -> Iterator[None]:
    """What the block has started has ended soon behind it, or this fails."""
    before = holdings(session)
    yield
    gc.collect()  # sockets of event loops that have ended: what nobody refers to is not left over
    wait_for(lambda: not left_over(before, session), 30, lambda: left_over(before, session))


def _processes(session: Session) -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE or any(own in line for own in _PYTHONS_OWN):
                continue
            if not session.owns(process, command(process)):
                yield process, line[:200]


def _listening() -> list[int]:
    connections = psutil.Process().net_connections("inet")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def _on_ray(session: Session) -> Iterator[tuple[str, str]]:
    """Of the Ray that this process is connected to, if there is one."""
    import ray

    if not ray.is_initialized():
        return
    from ray._private import state
    from ray.util.placement_group import placement_group_table

    for actor_id, actor in state.actors().items():
        name = actor["Name"] or actor["ActorClassName"]
        # Serve names a replica SERVE_REPLICA::APPLICATION#DEPLOYMENT#ID.
        is_replica = name.startswith("SERVE_REPLICA::")
        if is_replica and name.removeprefix("SERVE_REPLICA::").split("#", 1)[0] in session.applications:
            continue
        if actor["State"] != "DEAD" and (is_replica or name == "WorkerActor"):
            yield actor_id, f"actor {name} is {actor['State']}"
    for group_id, group in placement_group_table().items():
        if group["state"] != "REMOVED":
            yield group_id, f"placement group {group_id} is {group['state']}"


def _of_strangers(names: set[str]) -> set[str]:
    """Those of these files that processes map which are none of ours: there may be others on this machine."""
    if not names:
        return set()
    ours = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in ours:
            continue
        with contextlib.suppress(OSError):
            text = maps.read_text()
            found |= {name for name in names if f"{SHARED_MEMORY}/{name}" in text}
    return found
