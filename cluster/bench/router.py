"""`quire bench router`: what prefix-aware routing brings a fleet, in simulated time, and what a decision costs here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams

from ..directory import EngineRecord
from ..engine_chooser import EngineChooser
from ..engine_links import EngineLink
from ..messages import CacheSnapshot, CacheUpdate
from ..prefix_keys import CacheLayout, PromptKeys, pack
from ..router import POLICIES, PolicyName, PrefixAffinity
from .fleet import BLOCK_SIZE, Fleet, Trace
from .latency import Distribution

COMPARED: tuple[PolicyName, ...] = ("prefix_affinity", "power_of_two", "least_loaded", "round_robin")
_LAYOUT = CacheLayout(BLOCK_SIZE, (None,))


@dataclass(frozen=True, slots=True)
class FleetResult:
    """A policy on one trace. Times are simulated."""

    num_replicas: int
    policy: PolicyName
    num_requests: int
    hit_rate: float  # prompt tokens found in a cache, of all
    queue_ms: Distribution  # from arrival to the first step that computes something of the request
    ttft_ms: Distribution
    busiest: float  # requests of the busiest replica, over the average


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds in the gateway; the best of many."""

    num_engines: int
    num_prompt_tokens: int
    hash_us: float  # once per prompt
    choose_unknown_us: float  # no engine knows anything of the prompt
    choose_known_us: float  # every engine holds all of it
    update_us: float  # per block that an engine tells of


def run(num_replicas: Iterable[int], trace: Trace, seed: int, on_done: Callable[[], None]) -> list[FleetResult]:
    """Every policy on the same trace, for each size of the fleet."""
    results = []
    for count in num_replicas:
        arrivals = trace.arrivals(count, seed)
        for name in COMPARED:
            served = Fleet(count, POLICIES[name](), trace).play(arrivals)
            most = max(served.requests_by_replica)
            results.append(
                FleetResult(
                    count,
                    name,
                    len(arrivals),
                    served.hit_rate,
                    Distribution.of_seconds(served.queue_s),
                    Distribution.of_seconds(served.ttft_s),
                    most * count / len(arrivals),
                )
            )
            on_done()
    return results


def cost(num_engines: int = 64, num_prompt_tokens: int = 4096, repeats: int = 50) -> Cost:
    """What a choice costs the event loop of a gateway."""
    rng = random.Random(0)
    chooser = EngineChooser(PrefixAffinity())
    links = [_link(f"e{index:02}") for index in range(num_engines)]
    known, unknown = (_prompt(rng, num_prompt_tokens) for _ in range(2))
    numbers = PromptKeys(known).of(_LAYOUT)[0]
    for link in links:
        chooser.on_message(link, CacheSnapshot(0, BLOCK_SIZE, (None,), pack(numbers)))
    others = pack(rng.getrandbits(64) for _ in range(1000))
    hashing = [_timed(lambda: PromptKeys(unknown).of(_LAYOUT)) for _ in range(repeats)]
    updating = []
    for number in range(1, repeats, 2):
        updating.append(_timed(partial(chooser.on_message, links[0], CacheUpdate(number, others, b""))))
        chooser.on_message(links[0], CacheUpdate(number + 1, b"", others))
    choosing = []
    for request in (unknown, known):
        keys = PromptKeys(request)
        keys.of(_LAYOUT)
        # Without what `choose` books afterwards, which would make the prompt known.
        choosing.append(min(_timed(partial(chooser.look, request, keys, links)) for _ in range(repeats)))
    return Cost(num_engines, num_prompt_tokens, min(hashing), choosing[0], choosing[1], min(updating) / 1000)


def _link(engine_id: str) -> EngineLink:
    return EngineLink(EngineRecord(engine_id=engine_id, model="m", host="", port=0, max_model_len=8192))


def _prompt(rng: random.Random, length: int) -> EngineRequest:
    tokens = [rng.randrange(50_000) for _ in range(length)]
    return EngineRequest(request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(), seed=0)


def _timed(function: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1000
