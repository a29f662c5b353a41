"""What a gateway counts of the requests that it serves: latencies, lengths, how answers ended, what they waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from quire.engine.outputs import FinishReason, RequestReport

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 128.0)
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error", "deadline")

# Histograms by model and gateway: attribute, name, description, buckets.
_HISTOGRAMS = (
    ("ttft", "time_to_first_token_seconds", "From a request's arrival to the first token of an answer.", _TTFT_BUCKETS),
    ("itl", "inter_token_latency_seconds", "Between two tokens of an answer, at the gateway.", _ITL_BUCKETS),
    ("e2e", "e2e_request_latency_seconds", "From a request's arrival to the end of an answer.", _E2E_BUCKETS),
    (
        "tpot",
        "request_time_per_output_token_seconds",
        "Mean time between two tokens of an answer, by answer.",
        _ITL_BUCKETS,
    ),
    ("decode", "request_decode_time_seconds", "From the first token of an answer to its last.", _E2E_BUCKETS),
    ("queue", "request_queue_time_seconds", "What an answer waited in its engine, for all causes.", _TTFT_BUCKETS),
    ("inference", "request_inference_time_seconds", "What an answer was computed in its engine.", _E2E_BUCKETS),
    ("prompt", "request_prompt_tokens", "Tokens of a prompt.", _TOKEN_BUCKETS),
    ("generated", "request_generation_tokens", "Tokens of an answer.", _TOKEN_BUCKETS),
    ("max_tokens", "request_params_max_tokens", "Most tokens that an answer was allowed.", _TOKEN_BUCKETS),
    ("n", "request_params_n", "Answers that a request asked for, per prompt.", _N_BUCKETS),
)


class RequestBook:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self, gateway_id: str, clock: Callable[[], float]) -> None:
        self._gateway_id = gateway_id
        self._clock = clock
        self._registry = CollectorRegistry()
        labels = ("model_name", "gateway")
        self._histograms = {
            attribute: Histogram(f"quire:{name}", description, labels, registry=self._registry, buckets=buckets)
            for attribute, name, description, buckets in _HISTOGRAMS
        }
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
        self._responses = Counter(
            "quire:http_requests",
            "HTTP requests that were answered, by endpoint and status.",
            ("gateway", "handler", "method", "status"),
            registry=self._registry,
        )
        self._of_model: dict[str, _ModelMetrics] = {}

    def start(self, model: str, num_choices: int) -> RequestMetrics:
        """Time an HTTP request that has just arrived."""
        return RequestMetrics(self._metrics_of(model), self._clock, num_choices)

    def answered(self, handler: str, method: str, status: int) -> None:
        """An HTTP request got its status."""
        self._responses.labels(self._gateway_id, handler, method, str(status)).inc()

    def reported(self, model: str, report: RequestReport) -> None:
        _note(self._metrics_of(model), report)

    def families(self) -> list[Metric]:
        return samples_of(self._registry)

    def _metrics_of(self, model: str) -> _ModelMetrics:
        found = self._of_model.get(model)
        if found is None:
            labels = (model, self._gateway_id)
            found = self._of_model[model] = _ModelMetrics(
                **{attribute: histogram.labels(*labels) for attribute, histogram in self._histograms.items()},
                ended={reason: self._ended.labels(*labels, reason) for reason in _FINISH_REASONS},
                waited=lambda cause: self._waits.labels(*labels, cause),
            )
        return found


def samples_of(registry: CollectorRegistry) -> list[Metric]:
    """Everything so far. (When a series began is left out: nobody asks, and it is a series for each.)"""
    families = list(registry.collect())
    for family in families:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return families


class _ModelMetrics(NamedTuple):
    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    tpot: Histogram
    decode: Histogram
    queue: Histogram
    inference: Histogram
    prompt: Histogram
    generated: Histogram
    max_tokens: Histogram
    n: Histogram
    ended: dict[FinishReason, Counter]
    waited: Callable[[str], Counter]  # by cause


def _note(metrics: _ModelMetrics, report: RequestReport) -> None:
    for cause, waited_s in report.wait_s.items():
        metrics.waited(cause).inc(waited_s)
    metrics.queue.observe(sum(report.wait_s.values()))
    metrics.inference.observe(report.compute_s)


class RequestMetrics:
    """Times of the answers to one HTTP request."""

    __slots__ = ("_clock", "_first", "_last", "_metrics", "_num_tokens", "_start")

    def __init__(self, metrics: _ModelMetrics, clock: Callable[[], float], num_choices: int) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start = clock()
        self._first: list[float] = [0.0] * num_choices  # when an answer's first token came
        self._last: list[float] = [0.0] * num_choices  # and its latest
        self._num_tokens = [0] * num_choices

    def asked(self, n: int, max_tokens: int | None) -> None:
        """What the request asks for each prompt."""
        self._metrics.n.observe(n)
        if max_tokens is not None:
            self._metrics.max_tokens.observe(max_tokens)

    def prompt(self, num_tokens: int) -> None:
        """A prompt of so many tokens has been computed."""
        self._metrics.prompt.observe(num_tokens)

    def tokens(self, index: int, count: int) -> None:
        """`count` >= 1 tokens of answer `index` came together."""
        now, last = self._clock(), self._last[index]
        known, self._num_tokens[index] = self._num_tokens[index], self._num_tokens[index] + count
        self._last[index] = now
        if not known:
            self._first[index] = now
            self._metrics.ttft.observe(now - self._start)
            return
        for _ in range(count):  # nearly always one
            self._metrics.itl.observe((now - last) / count)

    def reported(self, report: RequestReport) -> None:
        """Where the time of one answer went."""
        _note(self._metrics, report)

    def ended(self, index: int, reason: FinishReason) -> None:
        """One answer ended."""
        metrics, num_tokens = self._metrics, self._num_tokens[index]
        metrics.e2e.observe(self._clock() - self._start)
        metrics.ended[reason].inc()
        metrics.generated.observe(num_tokens)
        if num_tokens:
            decode_s = self._last[index] - self._first[index]
            metrics.decode.observe(decode_s)
            if num_tokens > 1:
                metrics.tpot.observe(decode_s / (num_tokens - 1))
