"""What a gateway counts of its streams: where they were sent, and what kept them going when their engine ended."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from .request_metrics import samples_of


class StreamBook:
    """The counters of one gateway, in a registry of their own."""

    def __init__(self, gateway_id: str = "gateway") -> None:
        self._gateway_id = gateway_id
        self._registry = CollectorRegistry()
        labels = ("model_name", "gateway")
        self._moved = Counter(
            "quire:moved_streams",
            "Streams that went on in another engine: theirs was lost, or has handed them over before it ended.",
            (*labels, "cause"),
            registry=self._registry,
        )
        self._routed = Counter(
            "quire:routing_decisions",
            "Requests sent to an engine: where part of the prompt was cached (hit), where none was (miss), or to the "
            "only one there is.",
            (*labels, "outcome"),
            registry=self._registry,
        )
        self._hit_tokens = Counter(
            "quire:routing_hit_tokens",
            "Prompt tokens that the chosen engine had in its cache, as the gateway knew.",
            labels,
            registry=self._registry,
        )
        self._client_resumes = Counter(
            "quire:client_resumes",
            "Streams that a client went on with by its Last-Event-ID, by whether an engine remembered them.",
            ("gateway", "outcome"),
            registry=self._registry,
        )

    def moved(self, model: str, cause: Literal["lost", "handed_over"]) -> None:
        self._moved.labels(model, self._gateway_id, cause).inc()

    def routed(self, model: str, num_engines: int, num_hit_tokens: int) -> None:
        """A request was sent to one of so many engines, which has so many tokens of its prompt."""
        outcome = "only" if num_engines == 1 else "hit" if num_hit_tokens else "miss"
        self._routed.labels(model, self._gateway_id, outcome).inc()
        self._hit_tokens.labels(model, self._gateway_id).inc(num_hit_tokens)

    def resumed_by_client(self, *, remembered: bool) -> None:
        self._client_resumes.labels(self._gateway_id, "remembered" if remembered else "forgotten").inc()

    def families(self) -> list[Metric]:
        return samples_of(self._registry)
