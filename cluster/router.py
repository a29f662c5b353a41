"""Which engine gets a request: pure policies over what this gateway knows of its engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol
from zlib import crc32

from quire.engine.outputs import EngineRequest, SchedulerStats

PolicyName = Literal["prefix_affinity", "least_loaded", "power_of_two", "round_robin"]

# In tokens that an engine computes, the unit in which `PrefixAffinity` compares.
HIT_WEIGHT = 2  # what is not computed twice saves this request time, and everybody else as well
TOKENS_PER_REQUEST = 32  # a request that runs makes every step of the others longer
TIE_TOKENS = 64  # what is no reason to leave the engine of a session
FULL_CACHE = 0.95  # from this KV usage on, requests wait for blocks or lose them
FULL_CACHE_TOKENS = 4096


class EngineSnapshot(NamedTuple):
    """An engine that can take requests, as one gateway sees it now. A tuple: one is made per engine and request.

    `stats` is what the engine reported last; `num_recent` counts the requests that this gateway has sent since then,
    which the report cannot contain, and `num_recent_tokens` their prompt tokens; `num_own` those of this gateway that
    it has not finished. `num_hit_tokens` of the request's prompt are in its prefix cache.
    """

    engine_id: str
    stats: SchedulerStats
    num_recent: int = 0
    num_own: int = 0
    num_recent_tokens: int = 0
    num_hit_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return self.stats.num_running + self.stats.num_waiting + self.num_recent

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that it has to compute before those of a request that comes now."""
        return self.stats.num_waiting_tokens + self.stats.num_uncomputed_tokens + self.num_recent_tokens


class RoutingPolicy(Protocol):
    """Chooses among engines that serve the request's model. Called on one event loop."""

    uses_prefixes: bool  # whether anybody has to find out `num_hit_tokens`

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:
        """The `engine_id` of one of `engines`, which is not empty and ordered by id."""
        ...


class PrefixAffinity:
    """The engine with the least to compute: what it has queued, less what it need not compute of the prompt.

    A prefix hit thus counts for what it saves (twice, see `HIT_WEIGHT`), and no longer when the engine has that much
    more to do than another. Queues are not everything, for an engine whose prompts are all in its cache has none: a hit
    at an engine that has `max_imbalance` times the requests of the average (and `slack` more), or a full cache, does
    not count at all. So a prefix that everybody uses spreads over as many engines as its load takes. The defaults are
    those that did best in `quire bench router`, near saturation and beyond it.

    Engines that are as good as the best within `TIE_TOKENS` are equal to a request with a `session_id`: they are
    chosen by rendezvous hashing, by which a session finds the same engine again from any gateway. Without one,
    requests spread over equals evenly.
    """

    uses_prefixes = True

    def __init__(self, max_imbalance: float = 1.5, slack: int = 4) -> None:
        self._max_imbalance = max_imbalance
        self._slack = slack

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:
        if len(engines) == 1:
            return engines[0].engine_id
        most = self._max_imbalance * sum(engine.num_requests for engine in engines) / len(engines) + self._slack
        costs = [_tokens_until_computed(engine, most) for engine in engines]
        best = min(costs)
        tolerance = 0 if request.session_id is None else TIE_TOKENS
        ties = [engine for engine, cost in zip(engines, costs, strict=True) if cost <= best + tolerance]
        if len(ties) == 1:
            return ties[0].engine_id
        name = request.session_id or request.request_id
        return max(ties, key=lambda engine: _rendezvous(name, engine.engine_id)).engine_id


def _tokens_until_computed(engine: EngineSnapshot, most_requests: float) -> int:
    """Compared with other engines only: the prompt's length is the same for all, and left out."""
    num_requests, stats = engine.num_requests, engine.stats
    tokens = engine.num_queued_tokens + TOKENS_PER_REQUEST * num_requests
    if stats.kv_cache_usage > FULL_CACHE:
        return tokens + FULL_CACHE_TOKENS
    return tokens if num_requests > most_requests else tokens - HIT_WEIGHT * engine.num_hit_tokens


def _rendezvous(name: str, engine_id: str) -> int:
    """A number that is the same in every process, and in no order over engines or names.

    The product does what a CRC lacks: the CRCs of one engine id under two names differ by the same bits for all ids.
    """
    return crc32(engine_id.encode(), crc32(name.encode())) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


class LeastLoaded:
    """The engine with the fewest requests, waiting ones counted twice: they have not even begun.

    Ties go to the emptier cache, then to the engine with the fewest requests of this gateway, then
    to the smallest id, so that the choice is reproducible.
    """

    uses_prefixes = False

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:  # noqa: ARG002
        return min(engines, key=_load).engine_id


def _load(engine: EngineSnapshot) -> tuple[int, float, int, str]:
    stats = engine.stats
    return (
        engine.num_requests + stats.num_waiting,
        round(stats.kv_cache_usage, 2),
        engine.num_own,
        engine.engine_id,
    )


class PowerOfTwo:
    """The less loaded of two engines that the request's id picks: no herd, even where reports are old."""

    uses_prefixes = False

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:
        picked = sorted(engines, key=lambda engine: _rendezvous(request.request_id, engine.engine_id))[:2]
        return min(picked, key=_load).engine_id


class RoundRobin:
    """One after the other, whatever they have to do."""

    uses_prefixes = False

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:  # noqa: ARG002
        self._num_chosen += 1
        return engines[self._num_chosen % len(engines)].engine_id


POLICIES: dict[PolicyName, Callable[[], RoutingPolicy]] = {
    "prefix_affinity": PrefixAffinity,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
