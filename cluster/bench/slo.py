"""Service-level objectives: what a request must keep to count as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .latency import RequestTiming

_MEASURES: dict[str, Callable[[RequestTiming], float]] = {
    "ttft": lambda timing: timing.ttft_s,
    "tpot": lambda timing: timing.tpot_s,
    "e2e": lambda timing: timing.end_s - timing.start_s,
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit in milliseconds on one measure of a request: `ttft`, `tpot` (per token after the first) or `e2e`."""

    measure: str
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Objective:
        """`ttft:500`. Raises `ValueError`."""
        measure, _, limit = text.partition(":")
        objective = cls(measure, float(limit))
        if measure not in _MEASURES or not objective.limit_ms > 0:
            raise ValueError(text)
        return objective

    def is_met(self, timing: RequestTiming) -> bool:
        return _MEASURES[self.measure](timing) * 1e3 <= self.limit_ms


def num_good(timings: Sequence[RequestTiming], objectives: Sequence[Objective]) -> int:
    """Requests that did not fail, had a token, and meet every objective."""
    answered = (timing for timing in timings if timing.error is None and timing.token_times_s)
    return sum(all(objective.is_met(timing) for objective in objectives) for timing in answered)
