"""What /metrics shows, in Prometheus' text format under the prefix `quire:` (suffixes as in vLLM's dashboards).

Several gateways may stand behind one port, and a scrape reaches one of them. So every series says whose it is, and
every gateway tells all of them:

- Engines count for themselves (queues, cache, tokens, preemptions), under the label `engine`. Every gateway hears the
  numbers of every engine several times a second.
- A gateway counts what only it sees (latencies, how answers ended, where streams went), under the label `gateway`. The
  others tell them as they were some seconds ago (`metrics_exchange.py`).

One target is therefore enough, the service's own port, and it must be one: scraping every gateway would count
everything as often as there are gateways. Counters restart from zero with their process, which `rate()` takes into
account. The same numbers go to Ray's metrics, once from whoever counts them (`ray_metrics.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.engine.outputs import RequestReport, SchedulerStats

from .request_metrics import RequestBook, RequestMetrics
from .stream_metrics import StreamBook

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Numbers of engines: name, description, value.
_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("num_requests_running", "Requests that hold a row of the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Requests that wait for one.", lambda s: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV cache's blocks that requests refer to; 1 is all.",
        lambda s: s.kv_cache_usage,
    ),
    ("num_tokens_waiting", "Known tokens of requests that wait for a row.", lambda s: s.num_waiting_tokens),
    ("num_kv_blocks", "Blocks of the KV cache.", lambda s: s.num_blocks),
    ("num_used_kv_blocks", "Blocks of the KV cache that requests refer to.", lambda s: s.num_used_blocks),
)
_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed or found in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.num_generation_tokens),
    ("num_preemptions", "Times a request lost its blocks to others.", lambda s: s.num_preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    (
        "prefix_cache_ghost_hits",
        "Further prompt tokens that a cache of twice the size would have found.",
        lambda s: s.prefix_cache_ghost_hits,
    ),
    ("num_evictions", "Cached blocks that were lost to others.", lambda s: s.num_evictions),
    ("num_deadlines_missed", "Requests that ended at their deadline.", lambda s: s.num_deadlines_missed),
    ("recovery_seconds", "Seconds spent on rebuilding ranks that were lost.", lambda s: s.recovery_s),
    (
        "resumed_requests",
        "Requests that went on with the tokens they had, after ranks or another engine were lost.",
        lambda s: s.num_resumed_requests,
    ),
    (
        "recomputed_tokens",
        "Tokens computed again, after preemption or a failure.",
        lambda s: s.num_recomputed_tokens,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Tokens that were guessed, and computed to be checked.",
        lambda s: s.num_draft_tokens,
    ),
    ("spec_decode_num_accepted_tokens", "Those of them that were right.", lambda s: s.num_accepted_tokens),
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest numbers of one engine."""

    engine_id: str
    model: str
    stats: SchedulerStats


class GatewayMetrics:
    """The metrics of one gateway process, and what /metrics tells. Belongs to the event loop's thread.

    `others` are the families of the other gateways, as they were told last; `streams` is for whoever knows engines.
    """

    def __init__(self, gateway_id: str = "gateway", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = RequestBook(gateway_id, clock)
        self.streams = StreamBook(gateway_id)
        self.others: Sequence[Metric] = ()

    def start(self, model: str, num_choices: int) -> RequestMetrics:
        """Time an HTTP request that has just arrived."""
        return self._requests.start(model, num_choices)

    def answered(self, handler: str, method: str, status: int) -> None:
        """An HTTP request got its status, whatever it was."""
        self._requests.answered(handler, method, status)

    def reported(self, model: str, report: RequestReport) -> None:
        """An engine has told where the time of one answer went."""
        self._requests.reported(model, report)

    def families(self) -> list[Metric]:
        """What this gateway has counted itself."""
        return [*self._requests.families(), *self.streams.families()]

    def render(self, engines: Sequence[EngineStats]) -> bytes:
        """All metrics, with the numbers of the engines as they are now."""
        merged: dict[str, Metric] = {}
        for family in (*engine_families(engines), *self.families(), *self.others):
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples.extend(family.samples)
        return generate_latest(_Families(list(merged.values())))


class _Families:
    """What `generate_latest` asks of a registry."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def engine_families(engines: Sequence[EngineStats]) -> list[Metric]:
    """The numbers that engines sent, as metrics."""
    families: list[Metric] = []
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, description, value in table:
            family = kind(f"quire:{name}", description, labels=("model_name", "engine"))
            for engine in engines:
                family.add_metric([engine.model, engine.engine_id], value(engine.stats))
            families.append(family)
    waiting = GaugeMetricFamily(
        "quire:num_requests_waiting_by_reason",
        "Requests that wait for a row, by what they lack.",
        labels=("model_name", "engine", "reason"),
    )
    recoveries = CounterMetricFamily(
        "quire:recoveries",
        "Times the ranks of an engine were rebuilt, by what had happened to them: lost, hung or raised.",
        labels=("model_name", "engine", "cause"),
    )
    for engine in engines:
        labels = [engine.model, engine.engine_id]
        for reason, count in engine.stats.num_waiting_by_cause.items():
            waiting.add_metric([*labels, reason], count)
        for cause, count in engine.stats.num_recoveries.items():
            recoveries.add_metric([*labels, cause], count)
    return [*families, waiting, recoveries]


def metric_names() -> frozenset[str]:
    """The name of every series that /metrics can show, as a query would write it."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    families = (*engine_families(()), *GatewayMetrics().families())
    return frozenset(family.name + suffix for family in families for suffix in suffixes.get(family.type, ("",)))
