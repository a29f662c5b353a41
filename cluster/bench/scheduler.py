"""`quire bench scheduler`: what the scheduler and the KV cache manager cost, without a model.

Times are CPU seconds of the one thread that schedules. A step is `schedule` and `update`, including the outputs that go
to the gateways. Every running request decodes one token a step, contexts of about 500 tokens, block size 16, prefix
caching on.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from quire.engine.config import SchedulerConfig
from quire.engine.kv_cache_manager import KVCacheManager
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec, group_layers
from quire.engine.outputs import EngineRequest, ModelRunnerOutput
from quire.engine.sampling_params import SamplingParams
from quire.engine.scheduler import Scheduler
from quire.engine.step_plan import ScheduledStep

BLOCK_SIZE = 16
CONTEXT = 500
LONG_PROMPT = 8192
_VOCABULARY = 50_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Steady:
    """Medians over the steps of a decode in which nobody comes or goes."""

    num_running: int
    schedule_us: float
    update_us: float

    @property
    def per_request_us(self) -> float:
        return (self.schedule_us + self.update_us) / self.num_running


@dataclass(frozen=True, slots=True)
class Admission:
    """From a tokenized request to a planned step."""

    num_prompt_tokens: int
    cold_us: float
    cached_us: float


@dataclass(frozen=True, slots=True)
class Queued:
    """A step of 64 decodes, and an arrival, while others wait."""

    num_queued: int
    step_us: float
    add_us: float


@dataclass(frozen=True, slots=True)
class SchedulerResult:
    steady: list[Steady]
    admission: Admission
    queued: list[Queued]


def run(num_running: Iterable[int], num_queued: Iterable[int], num_steps: int, seed: int) -> SchedulerResult:
    """Measure all three. The garbage collector is off while a step is timed, as in a tuned server."""
    return SchedulerResult(
        steady=[_Bench(count, seed).steady(num_steps) for count in num_running],
        admission=_admission(seed),
        queued=[_queued(count, num_steps, seed) for count in num_queued],
    )


class _Bench:
    """A scheduler with `num_running` requests in decode."""

    def __init__(self, num_running: int, seed: int, spare_blocks: int = 1000) -> None:
        self._rng = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        blocks_each = -(-(CONTEXT + 16 + 512) // BLOCK_SIZE)
        layout = KVCacheConfig(
            num_running * blocks_each + spare_blocks, BLOCK_SIZE, group_layers([KVCacheSpec(BLOCK_SIZE, 8, 128, 2)])
        )
        config = SchedulerConfig(max_num_batched_tokens=1 << 24, max_num_seqs=num_running, max_queued_requests=None)
        self.scheduler = Scheduler(config, KVCacheManager(layout, num_running, True), 16_384)
        self._num_requests = 0
        for index in range(num_running):
            self.scheduler.add(self.request(CONTEXT + index % BLOCK_SIZE), time.monotonic())
        for _ in range(2):
            self.step()

    def request(self, num_prompt_tokens: int, prompt: list[int] | None = None) -> EngineRequest:
        self._num_requests += 1
        return EngineRequest(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=prompt or [self._rng.randrange(3, _VOCABULARY) for _ in range(num_prompt_tokens)],
            sampling_params=SamplingParams(max_tokens=512),
            seed=0,
            eos_token_ids=(2,),
        )

    def step(self) -> tuple[float, float]:
        """One step: CPU microseconds of schedule and of update."""
        planned, schedule_us = _timed(lambda: self.scheduler.schedule(time.monotonic()))
        assert planned is not None
        result = self._sample(planned)
        _, update_us = _timed(lambda: self.scheduler.update(planned, result, time.monotonic()))
        return schedule_us, update_us

    def steady(self, num_steps: int) -> Steady:
        times = np.array([self.step() for _ in range(num_steps)])
        schedule_us, update_us = np.median(times, axis=0).tolist()
        return Steady(self.scheduler.stats().num_running, schedule_us, update_us)

    def _sample(self, step: ScheduledStep) -> ModelRunnerOutput:
        tokens = self._tokens.integers(3, _VOCABULARY, (len(step.output.rows), 1), dtype=np.int32)
        return ModelRunnerOutput(step_id=step.output.step_id, sampled_token_ids=tokens)


def _admission(seed: int, repeats: int = 9) -> Admission:
    cold: list[float] = []
    cached: list[float] = []
    for repeat in range(repeats):
        bench = _Bench(2, seed + repeat)
        scheduler = bench.scheduler
        for request_id in list(scheduler.requests):
            scheduler.abort(request_id, time.monotonic())
        first = bench.request(LONG_PROMPT)
        for request, times in ((first, cold), (bench.request(0, first.prompt_token_ids), cached)):
            _, add_us = _timed(partial(scheduler.add, request, time.monotonic()))
            times.append(add_us + bench.step()[0])
            scheduler.abort(request.request_id, time.monotonic())
    return Admission(LONG_PROMPT, float(np.median(cold)), float(np.median(cached)))


def _queued(num_queued: int, num_steps: int, seed: int) -> Queued:
    bench = _Bench(64, seed)
    prompt = [5] * CONTEXT
    adds = [
        _timed(lambda: bench.scheduler.add(bench.request(0, prompt), time.monotonic()))[1] for _ in range(num_queued)
    ]
    steady = bench.steady(num_steps)
    return Queued(num_queued, steady.schedule_us + steady.update_us, float(np.median(adds[-1000:])))


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    gc.disable()
    start = time.thread_time_ns()
    result = function()
    elapsed = time.thread_time_ns() - start
    gc.enable()
    return result, elapsed / 1000
