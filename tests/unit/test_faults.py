"""A thousand faults: whatever fails under random workloads, every answer is the one of an undisturbed engine.

Machines fail in every way that an executor can tell of, at random moments; some requests break each step that they are
in. An engine whose ranks cannot be rebuilt is lost: its requests go on in another one with the tokens they had, as a
gateway lets them.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from concurrent.futures import Future
from typing import Any, Literal

import msgspec
import pytest
from engine_helpers import make_core
from fake_executor import FakeExecutor
from workloads import Play, Script, SlotGate, draw

from quire.engine.errors import ExecutorError
from quire.engine.kv_cache_spec import KVCacheConfig
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput

NUM_CHUNKS = 4
WORKLOADS_PER_CHUNK = 12
FAULTS_PER_CHUNK = 400
SHARE_OF_STEPS = 0.4  # of those in which a machine may fail

# What a machine does to a step. The last three are met while the ranks are rebuilt, or by one of them later.
MACHINE_FAULTS = ("lost", "answer_lost", "raised", "hung", "dropped", "restart_fails", "kv_cache_fails")
Cause = Literal["lost", "hung", "raised"]
CAUSES: dict[str, Cause] = {"raised": "raised", "hung": "hung", "dropped": "hung"}


class Silent(Future[ModelRunnerOutput]):
    """A step that is never answered: whoever waits for it is told when its deadline has passed."""

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        raise ExecutorError("a step hangs", "hung")


class FaultyExecutor(FakeExecutor):
    """Fails by chance while `may_fail`. `faults` counts what has happened, by kind; `poison` counts as one as well."""

    def __init__(self, rng: random.Random, faults: Counter[str], **model: Any) -> None:
        super().__init__(**{**model, "fail_steps": ()})
        self._rng = rng
        self._faults = faults
        self._rebuild_fault: str | None = None
        self.may_fail = False

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if self._broken or not self.may_fail or self._rng.random() > SHARE_OF_STEPS:
            was_broken = self._broken
            future = super().execute(step)
            self._faults["poison"] += self._broken and not was_broken
            return future
        kind = self._rng.choice(MACHINE_FAULTS)
        self._faults[kind] += 1
        if kind == "answer_lost":
            super().execute(step)  # it is computed and sampled, and nobody hears of it
        self._broken = True
        if kind in ("restart_fails", "kv_cache_fails"):
            self._rebuild_fault = kind
        if kind in ("hung", "dropped"):
            return Silent()
        future = Future()
        future.set_exception(ExecutorError(f"the machine failed: {kind}", CAUSES.get(kind, "lost")))
        return future

    def restart(self) -> None:
        if self._rebuild_fault == "restart_fails":
            raise ExecutorError("there is no node for the ranks")
        super().restart()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        if self._rebuild_fault is not None:
            raise ExecutorError("the memory is in use")
        super().initialize_kv_cache(config)


class FaultyPlay(Play):
    """A workload whose machines fail, and one request as well. Time stands still: nobody meets a deadline."""

    def __init__(self, script: Script, rng: random.Random, faults: Counter[str]) -> None:
        self._rng = rng
        self._faults = faults
        self.num_engines = 0
        poison = frozenset([f"r{rng.randrange(8)}"])
        super().__init__(dataclasses.replace(script, executor={**script.executor, "poison": poison}))

    def __post_init__(self) -> None:
        self._start_engine()

    def _start_engine(self) -> None:
        self.num_engines += 1
        self.executor = FaultyExecutor(self._rng, self._faults, **self.script.executor)
        self.gate = None if self.script.gate_slots is None else SlotGate(self.script.gate_slots)
        gates = () if self.gate is None else (self.gate,)
        self.core = make_core(self.executor, gates=gates, clock=lambda: 0.0, **self.script.engine)

    def step(self) -> None:
        """A machine does not fail under a request that is about to be given up: that one could be blamed."""
        requests = self.core.scheduler.requests.values()
        self.executor.may_fail = all(request.num_failures <= 1 for request in requests)
        try:
            super().step()
        except ExecutorError:
            self._move()

    def _move(self) -> None:
        """The engine is lost: what has not ended goes on in another one."""
        self._start_engine()
        for request_id, request in self.requests.items():
            if request_id not in self.collector.ends:
                tokens = list(self.collector.tokens[request_id])
                self.core.add_request(msgspec.structs.replace(request, resume_token_ids=tokens))

    def _may_fail(self, request_id: str) -> bool:
        return request_id in self.script.executor["poison"]


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_faults_change_no_token(chunk: int) -> None:
    """Together the chunks meet more than a thousand faults, of every kind."""
    faults: Counter[str] = Counter()
    num_engines = num_poisoned = 0
    for seed in range(chunk * WORKLOADS_PER_CHUNK, (chunk + 1) * WORKLOADS_PER_CHUNK):
        play = FaultyPlay(draw(seed), random.Random(seed), faults)
        play.run()
        num_engines += play.num_engines
        num_poisoned += sum(end.finish_reason == "error" for end in play.collector.ends.values())
    assert sum(faults.values()) >= FAULTS_PER_CHUNK, faults
    assert min(faults[kind] for kind in MACHINE_FAULTS) >= 40, faults
    assert faults["poison"] >= 5, faults
    assert num_engines == WORKLOADS_PER_CHUNK + faults["restart_fails"] + faults["kv_cache_fails"]
    assert num_poisoned >= 3
