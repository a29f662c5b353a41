"""What /metrics shows, in Prometheus' text format under the prefix `quire:` (suffixes as in vLLM's dashboards).

Several gateways may stand behind one port, and a scrape reaches one of them. So every series says whose it is:

- Engines count for themselves (queues, cache, tokens, preemptions). Any gateway can tell their numbers, under the label
  `engine`, and all tell the same ones: it does not matter which one is asked.
- A gateway counts what only it sees (latencies, how answers ended) under the label `gateway`. Through the shared port a
  scrape updates the series of one gateway; sums over `gateway` stay correct as long as each is reached within
  Prometheus' lookback (5 minutes), and they lag behind by one round of scrapes. For fresh numbers from all of them,
  scrape the replicas themselves.

Counters restart from zero with their process, which `rate()` takes into account.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.outputs import FinishReason, SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error", "deadline")

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
    ("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The latest numbers of one engine."""

    engine_id: str
    model: str
    stats: SchedulerStats


class GatewayMetrics:
    """The metrics of one gateway process, in a registry of their own. Belongs to the event loop's thread."""

    def __init__(self, gateway_id: str = "gateway", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self._registry = CollectorRegistry()
        self._engines = _EngineCollector()
        self._registry.register(self._engines)
        labels = ("model_name", "gateway")

        def histogram(name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"quire:{name}", description, labels, registry=self._registry, buckets=buckets)

        self._ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to the first token of an answer.", _TTFT_BUCKETS
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer, at the gateway.", _ITL_BUCKETS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of an answer.", _E2E_BUCKETS
        )
        self._ended = Counter(
            "quire:request_success",
            "Answers that ended, by finish reason.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._waits = Counter(
            "quire:request_wait_seconds",
            "Seconds that requests waited in their engines, by cause.",
            (*labels, "cause"),
            registry=self._registry,
        )
        self._of_model: dict[str, _ModelMetrics] = {}

    def start(self, model: str, num_choices: int) -> RequestMetrics:
        """Time an HTTP request that has just arrived."""
        found = self._of_model.get(model)
        if found is None:
            labels = (model, self._gateway_id)
            found = self._of_model[model] = _ModelMetrics(
                self._ttft.labels(*labels),
                self._itl.labels(*labels),
                self._e2e.labels(*labels),
                {reason: self._ended.labels(*labels, reason) for reason in _FINISH_REASONS},
                lambda cause: self._waits.labels(*labels, cause),
            )
        return RequestMetrics(found, self._clock, num_choices)

    def render(self, engines: Sequence[EngineStats]) -> bytes:
        """All metrics, with the numbers of the engines as they are now."""
        self._engines.stats = engines
        return generate_latest(self._registry)


class _ModelMetrics(NamedTuple):
    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    ended: dict[FinishReason, Counter]
    waited: Callable[[str], Counter]  # by cause


class RequestMetrics:
    """Times of the answers to one HTTP request."""

    __slots__ = ("_clock", "_last", "_metrics", "_start")

    def __init__(self, metrics: _ModelMetrics, clock: Callable[[], float], num_choices: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = clock()
        self._last: list[float | None] = [None] * num_choices  # when an answer's latest token came

    def tokens(self, index: int, count: int) -> None:
        """`count` >= 1 tokens of answer `index` came together."""
        now, last = self._clock(), self._last[index]
        self._last[index] = now
        if last is None:
            self._metrics.ttft.observe(now - self._start)
            return
        for _ in range(count):  # nearly always one
            self._metrics.itl.observe((now - last) / count)

    def waited(self, seconds: Mapping[str, float]) -> None:
        """By cause, over the life of one answer."""
        for cause, waited_s in seconds.items():
            self._metrics.waited(cause).inc(waited_s)

    def ended(self, reason: FinishReason) -> None:
        """One answer ended."""
        self._metrics.e2e.observe(self._clock() - self._start)
        self._metrics.ended[reason].inc()


class _EngineCollector(Collector):
    """The numbers that engines sent, as metrics."""

    def __init__(self) -> None:
        self.stats: Sequence[EngineStats] = ()

    def collect(self) -> Iterable[Metric]:
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, description, value in table:
                family = kind(f"quire:{name}", description, labels=("model_name", "engine"))
                for engine in self.stats:
                    family.add_metric([engine.model, engine.engine_id], value(engine.stats))
                yield family
