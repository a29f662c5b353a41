"""A fleet of engines in simulated time: the real scheduler, cache, events and router; only the model is a formula.

Each replica is an `EngineCore` whose executor samples a fixed token and says how long the step would have taken:
`STEP_S + tokens * TOKEN_S`, about an 8B model on one H100. One gateway routes. It hears of cache events when the step
that caused them ends, and of loads every `REPORT_S`, both as the records that travel between real ones.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quire.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.outputs import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerOutput
from quire.engine.sampling_params import SamplingParams

from ..cache_publisher import CachePublisher
from ..directory import EngineRecord
from ..engine_chooser import EngineChooser
from ..engine_links import EngineLink
from ..engine_server import REPORT_S
from ..messages import CacheSnapshot, CacheUpdate, LoadReport, engine_message_decoder
from ..prefix_keys import PromptKeys
from ..router import RoutingPolicy

BLOCK_SIZE = 16
STEP_S = 0.008
TOKEN_S = 30e-6
ANSWER_TOKEN = 7
MAX_MODEL_LEN = 16_384


@dataclass(frozen=True, slots=True)
class Trace:
    """Conversations that begin at random times, each with one of a few long system prompts, some far more often.

    Every turn's prompt is the system prompt, all turns before, and a new message. Per replica there are
    `groups_per_replica` system prompts and `requests_per_s` turns: the work grows with the fleet.
    """

    duration_s: float = 20.0
    requests_per_s: float = 10.0
    groups_per_replica: int = 8
    prefix_tokens: int = 1024
    message_tokens: int = 96
    answer_tokens: int = 64
    turns: int = 4
    think_s: float = 3.0
    blocks_per_replica: int = 2048

    def arrivals(self, num_replicas: int, seed: int) -> list[tuple[float, EngineRequest]]:
        """Requests with the times at which they come, in order."""
        rng = random.Random(seed)
        num_groups = self.groups_per_replica * num_replicas
        prefixes = [_random_tokens(rng, self.prefix_tokens) for _ in range(num_groups)]
        weights = [1 / (rank + 1) for rank in range(num_groups)]
        found: list[tuple[float, EngineRequest]] = []
        num_sessions = round(self.duration_s * self.requests_per_s * num_replicas / self.turns)
        for session in range(num_sessions):
            when = rng.random() * self.duration_s
            prompt = list(rng.choices(prefixes, weights)[0])
            for turn in range(self.turns):
                prompt = prompt + _random_tokens(rng, self.message_tokens)
                found.append((when, self._request(f"s{session}t{turn}", prompt)))
                prompt = prompt + [ANSWER_TOKEN] * self.answer_tokens
                when += rng.expovariate(1 / self.think_s)
        found = [each for each in found if each[0] < self.duration_s]
        return sorted(found, key=lambda each: each[0])

    def _request(self, request_id: str, prompt: list[int]) -> EngineRequest:
        params = SamplingParams(max_tokens=self.answer_tokens, ignore_eos=True)
        return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, seed=0)


@dataclass(slots=True)
class Served:
    """What became of the requests of a trace. Times are simulated seconds."""

    queue_s: list[float] = field(default_factory=list)  # from arrival to the first step that computes something of it
    ttft_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    requests_by_replica: list[int] = field(default_factory=list)
    last_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class Fleet:
    """Plays a trace on `num_replicas` engines behind one gateway."""

    def __init__(self, num_replicas: int, policy: RoutingPolicy, trace: Trace) -> None:
        self.chooser = EngineChooser(policy)
        self._replicas = [_Replica(f"e{index:02}", trace.blocks_per_replica) for index in range(num_replicas)]
        self._links = [EngineLink(replica.record) for replica in self._replicas]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._served = Served(requests_by_replica=[0] * num_replicas)
        self._arrived: dict[str, float] = {}
        self._num_to_come = 0
        if policy.uses_prefixes:
            for replica, link in zip(self._replicas, self._links, strict=True):
                replica.publisher.follow(_Wire(self.chooser, link))

    def play(self, arrivals: list[tuple[float, EngineRequest]]) -> Served:
        self._num_to_come = len(arrivals)
        for when, request in arrivals:
            self._at(when, partial(self._arrive, request))
        self._at(0.0, self._report)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self._served.last_s = now
        for replica in self._replicas:
            stats = replica.core.stats()
            self._served.num_prompt_tokens += stats.prefix_cache_queries
            self._served.num_hit_tokens += stats.prefix_cache_hits
        return self._served

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, request: EngineRequest, now: float) -> None:
        self._num_to_come -= 1
        link = self.chooser.choose(request, PromptKeys(request), self._links)
        index = self._links.index(link)
        self._served.requests_by_replica[index] += 1
        self._arrived[request.request_id] = now
        replica = self._replicas[index]
        replica.inbox.append(request)
        if not replica.is_busy:
            self._step(replica, now)

    def _step(self, replica: _Replica, now: float) -> None:
        replica.is_busy = True
        replica.now = now
        for request in replica.inbox:
            replica.core.add_request(request)
        replica.inbox.clear()
        outputs = replica.core.step()
        for request_id in replica.first_seen:
            self._served.queue_s.append(now - self._arrived[request_id])
        replica.first_seen.clear()
        self._at(replica.now, lambda now: self._stepped(replica, outputs, now))

    def _stepped(self, replica: _Replica, outputs: list[EngineOutput], now: float) -> None:
        for output in outputs:
            if output.first_index == 0:
                self._served.ttft_s.append(now - self._arrived[output.request_id])
        events = replica.core.take_kv_events()
        if events:
            replica.publisher.on_events(events)
        replica.is_busy = False
        if replica.inbox or replica.core.has_work:
            self._step(replica, now)

    def _report(self, now: float) -> None:
        for replica, link in zip(self._replicas, self._links, strict=True):
            link.report(LoadReport(replica.core.stats()))
        if self._num_to_come or any(replica.is_busy for replica in self._replicas):
            self._at(now + REPORT_S, self._report)


class _Replica:
    """An engine in a time of its own: a step takes it to the step's end."""

    def __init__(self, engine_id: str, num_blocks: int) -> None:
        self.record = EngineRecord(engine_id=engine_id, model="m", host="", port=0, max_model_len=MAX_MODEL_LEN)
        self.now = 0.0
        self.is_busy = False
        self.inbox: list[EngineRequest] = []
        self.first_seen: list[str] = []
        self._seen: set[str] = set()
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks),
            scheduler=SchedulerConfig(max_queued_requests=None),
        )
        self.core = EngineCore(config, self, MAX_MODEL_LEN, clock=lambda: self.now)
        self.core.subscribe_kv_events()
        self.publisher = CachePublisher(self.core)

    # `Executor`

    def preferred_inflight_steps(self) -> int:
        return 1

    def preferred_speculative_tokens(self) -> int:
        return 0

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec(BLOCK_SIZE, 1, 1, 1)]

    def available_kv_cache_bytes(self) -> list[int]:
        return [0]  # `num_kv_blocks` is given

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        pass

    def takes_next_step(self) -> bool:
        return True

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for row in step.new_rows:
            if row.request_id not in self._seen:
                self._seen.add(row.request_id)
                self.first_seen.append(row.request_id)
        self.now += STEP_S + TOKEN_S * step.total_num_scheduled_tokens
        future: Future[ModelRunnerOutput] = Future()
        tokens = np.full((len(step.rows), 1), ANSWER_TOKEN, dtype=np.int32)
        future.set_result(ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=tokens))
        return future

    def restart(self) -> None:
        raise AssertionError("a simulated step does not fail, so nobody restarts the ranks")

    def shutdown(self) -> None:
        pass


class _Wire:
    """A connection over which everything arrives at once."""

    is_congested: bool = False

    def __init__(self, chooser: EngineChooser, link: EngineLink) -> None:
        self._chooser = chooser
        self._link = link

    def send(self, payload: bytes) -> None:
        message = engine_message_decoder.decode(payload)
        assert isinstance(message, CacheSnapshot | CacheUpdate)
        self._chooser.on_message(self._link, message)


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256, 50_000) for _ in range(count)]
