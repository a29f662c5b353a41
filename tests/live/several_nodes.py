"""A Ray cluster of several nodes on this machine, each of which can be killed or made to vanish.

`ray.cluster_utils.Cluster` starts them in a process of its own, for the tests' process is connected to another Ray. All
of them share the loopback. A node is its raylet and what that has started: what ends or freezes with the machine that
it stands for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil
from cluster_processes import command

from quire.cluster.ray_local import make_folder

ROOT = Path(__file__).resolve().parents[2]
CALL_TIMEOUT_S = 120.0
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Node:
    """One node that has joined, by the process id of its raylet."""

    def __init__(self, raylet: int) -> None:
        self._raylet = psutil.Process(raylet)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Its live processes whose command begins so, the raylet first."""
        try:
            if self._raylet.status() == psutil.STATUS_ZOMBIE:
                return []
            tree = [self._raylet, *self._raylet.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [process for process in tree if command(process).startswith(name)]

    def vanish(self) -> None:
        """Everything on it stops without a word: connections stay open, and nobody answers."""
        self._signal_all(signal.SIGSTOP)

    def kill(self) -> None:
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """The raylet goes last, so that none of its processes is an orphan that nobody finds."""
        self._raylet.send_signal(signal.SIGSTOP)  # it starts no more
        for process in reversed(self.processes()):
            process.send_signal(number)


class SeveralNodes:
    """A head without engines, and nodes that join it. `stop` ends all of them."""

    def __init__(self) -> None:
        self.folder = make_folder()
        self.joined: list[Node] = []  # those that were lost as well
        # A pool of one process calls in that process's main thread, where Ray wants to start nodes.
        self._driver = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            self.call(_start_head, self.folder)
        except BaseException:
            self.stop()
            raise

    def join(self, resources: Mapping[str, float]) -> Node:
        """One more node; returns when it has joined."""
        node = Node(self.call(_join, resources))
        self.joined.append(node)
        return node

    def call(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call a function of a module in the process that is connected to this cluster."""
        return self._driver.submit(function, *args, **kwargs).result(CALL_TIMEOUT_S)

    def stop(self) -> None:
        for node in self.joined:
            if node.processes():
                node.kill()
        self.call(_stop)
        self._driver.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


_cluster: Any = None  # in the driver's process


def _start_head(folder: Path) -> None:
    settings = (ROOT / "deploy/node/ray.env").read_text()
    # A node counts as lost as soon as in the clusters of deploy/.
    os.environ.update(re.findall(r"^(RAY_health_check_\w+)=(\S+)$", settings, re.MULTILINE))
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir()  # there Ray notes the address of the latest cluster
    import ray
    from ray.cluster_utils import Cluster

    global _cluster
    head = {"include_dashboard": False, "temp_dir": str(folder), "resources": {"head": 1.0}, **_SIZE}
    _cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=_cluster.address, log_to_driver=False, logging_level="WARNING")


def _join(resources: Mapping[str, float]) -> int:
    node = _cluster.add_node(resources=dict(resources), **_SIZE)
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def _stop() -> None:
    import ray

    ray.shutdown()
    if _cluster is not None:
        _cluster.shutdown()


_SIZE = {"num_cpus": 4, "object_store_memory": 128 << 20}
