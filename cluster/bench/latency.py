"""What was measured, and its summary. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One streamed request. Times are seconds of one monotonic clock."""

    start_s: float
    end_s: float
    token_times_s: tuple[float, ...] = ()  # arrival of each event that carried a token, in order
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # as the server counts them; the number of events where it does not say
    num_cached_tokens: int = 0  # of the prompt, as far as the server tells
    error: str | None = None
    num_repeats: int = 0  # how often it was sent again, as it had met a closed connection

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.start_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: between consecutive events. Events that arrive together are 0 apart."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first: unlike in `itl_s`, tokens that share an event, and those whose text
        waits for another's, count one by one. 0 where nothing came after the first event."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds; all 0 when nothing was measured."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    count: int = field(default=0, compare=False)  # of the values; 0 when nothing was measured

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls()
        ms = np.asarray(values) * 1e3
        p50, p90, p99 = np.percentile(ms, (50, 90, 99))
        return cls(float(ms.mean()), float(p50), float(p90), float(p99), len(values))


@dataclass(frozen=True, slots=True)
class Summary:
    """One load level. Rates are over the wall time from the first request's start to the last one's end."""

    concurrency: int | None  # streams at any time; None where requests arrive at a rate
    rate: float | None  # arrivals per second asked for; None where the number of streams is fixed
    num_requests: int
    num_failed: int
    num_sent_again: int  # had met a closed connection
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    good_requests_per_s: float | None  # those that meet all objectives; None where there are none
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    ttft_ms: Distribution
    itl_ms: Distribution  # of all gaps between events
    tpot_ms: Distribution  # of requests that something came for after the first event
    e2e_ms: Distribution
    client_cpu_share: float  # of one core, so that a client that was the bottleneck shows

    @property
    def level(self) -> str:
        """What this level is called: the number of streams, or arrivals per second."""
        return f"{self.rate:g}/s" if self.rate is not None else str(self.concurrency)


def summarize(
    timings: Sequence[RequestTiming],
    concurrency: int | None,
    client_cpu_s: float = 0.0,
    *,
    rate: float | None = None,
    num_good: int | None = None,
) -> Summary:
    """Failed requests count as failed and enter no other number. Raises `ValueError` without any timing."""
    duration_s = max(t.end_s for t in timings) - min(t.start_s for t in timings)
    good = [t for t in timings if t.error is None]
    num_prompt_tokens = sum(t.num_prompt_tokens for t in good)
    num_output_tokens = sum(t.num_output_tokens for t in good)
    return Summary(
        concurrency=concurrency,
        rate=rate,
        num_requests=len(timings),
        num_failed=len(timings) - len(good),
        num_sent_again=sum(t.num_repeats > 0 for t in timings),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(t.num_cached_tokens for t in good),
        num_output_tokens=num_output_tokens,
        requests_per_s=len(good) / duration_s,
        good_requests_per_s=None if num_good is None else num_good / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        ttft_ms=Distribution.of_seconds([t.ttft_s for t in good if t.token_times_s]),
        itl_ms=Distribution.of_seconds([gap for t in good for gap in t.itl_s]),
        tpot_ms=Distribution.of_seconds([t.tpot_s for t in good if len(t.token_times_s) > 1]),
        e2e_ms=Distribution.of_seconds([t.end_s - t.start_s for t in good]),
        client_cpu_share=client_cpu_s / duration_s,
    )
