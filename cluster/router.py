"""Which engine gets a request: a pure policy over what this gateway knows of its engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.outputs import EngineRequest, SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine that can take requests, as one gateway sees it now.

    `stats` is what the engine reported last; `num_recent` counts the requests that this gateway has sent since then,
    which the report cannot contain; `num_own` those of this gateway that it has not finished.
    """

    engine_id: str
    stats: SchedulerStats
    num_recent: int = 0
    num_own: int = 0


class RoutingPolicy(Protocol):
    """Chooses among engines that serve the request's model."""

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:
        """The `engine_id` of one of `engines`, which is not empty."""
        ...


class LeastLoaded:
    """The engine with the fewest requests, waiting ones counted twice: they have not even begun.

    Ties go to the emptier cache, then to the engine with the fewest requests of this gateway, then
    to the smallest id, so that the choice is reproducible.
    """

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:  # noqa: ARG002
        return min(engines, key=_load).engine_id


def _load(engine: EngineSnapshot) -> tuple[int, float, int, str]:
    stats = engine.stats
    num_requests = stats.num_running + 2 * stats.num_waiting + engine.num_recent
    return (num_requests, round(stats.kv_cache_usage, 2), engine.num_own, engine.engine_id)
