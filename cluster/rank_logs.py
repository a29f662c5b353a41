"""The last words of a worker actor: what its process has written to stderr before it died."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import ray
from ray._private import state, worker
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NUM_LINES = 8
MAX_BYTES = 64 << 10  # read from the end of a log
TIMEOUT_S = 5.0


def last_words(actor_id: str | None) -> str:
    """One line, to be put behind the cause of an actor's death; empty where there is nothing to be had.

    The log lies on the actor's node, which may be gone as well.
    """
    known: dict[str, Any] = state.actors(actor_id) if actor_id else {}
    pid, node_id = known.get("Pid"), known.get("Address", {}).get("NodeID")
    if not pid or not node_id:
        return ""
    lines: list[str] = []
    if node_id == ray.get_runtime_context().get_node_id():
        lines = read_tail(pid)
    else:
        read: Any = ray.remote(read_tail)
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        with contextlib.suppress(RayError, GetTimeoutError):
            lines = ray.get(read.options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=TIMEOUT_S)
    return f"It wrote last: {' | '.join(lines)}" if lines else ""


def read_tail(pid: int) -> list[str]:
    """The last lines that a worker process of this node has written to stderr."""
    assert worker._global_node is not None
    folder = Path(worker._global_node.get_session_dir_path()) / "logs"
    for path in folder.glob(f"worker-*-{pid}.err"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_BYTES))
            text = file.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        # Ray marks whose lines follow.
        return [line for line in lines if line and not line.startswith(":")][-NUM_LINES:]
    return []
