"""`quire bench serve`: load on an OpenAI-compatible server, one level after the other.

A level is a number of streams, each of which sends its next request when its last one has ended, or a rate at which
requests arrive, however many are open by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np
import uvloop

from ..cli_http import base_url_of
from . import Endpoint
from .client import BenchError, Target, connection_traces, timed_request
from .latency import RequestTiming, Summary, summarize
from .slo import Objective, num_good
from .workload import Lengths, Question, questions

MIN_REQUESTS = 8  # of a level whose number is not given
SECONDS_OF_ARRIVALS = 30


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. Lengths are in tokens."""

    url: str
    model: str | None  # None: the first that the server lists
    endpoint: Endpoint
    concurrency: tuple[int, ...]  # one level for each, unless there are rates
    rates: tuple[float, ...]  # requests per second, arriving as a Poisson process: one level for each
    num_requests: int | None  # per level; None: 8 per stream, or 30 s of arrivals
    prefix_len: int  # tokens that all prompts of a level begin with, before their own
    input_len: Lengths
    output_len: Lengths
    temperature: float
    vocab_size: int
    seed: int
    api_key: str | None
    timeout_s: float  # without a byte from the server
    top_p: float = 1.0
    objectives: tuple[Objective, ...] = ()

    @property
    def levels(self) -> list[Level]:
        if self.rates:
            return [Level(None, rate, self.num_requests or self._arrivals(rate)) for rate in self.rates]
        return [
            Level(streams, None, self.num_requests or max(MIN_REQUESTS, 8 * streams)) for streams in self.concurrency
        ]

    @staticmethod
    def _arrivals(rate: float) -> int:
        return max(MIN_REQUESTS, round(SECONDS_OF_ARRIVALS * rate))


@dataclass(frozen=True, slots=True)
class Level:
    """Either `concurrency` streams at any time, or `rate` arrivals per second."""

    concurrency: int | None
    rate: float | None
    num_requests: int

    @property
    def title(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.concurrency} streams"


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured, and on what."""

    model: str
    server_version: str | None
    exact_output_len: bool  # False: the server does not take `ignore_eos`, so answers may end early
    levels: list[Summary]
    errors: list[str]  # the distinct ones, at most a few


def measure(load: Load, on_level: Callable[[Level], None], on_request: Callable[[], None]) -> Result:
    """`run` on an event loop of its own, one that leaves more of a machine to the server that it may be shared with."""
    return uvloop.run(run(load, on_level, on_request))


async def run(load: Load, on_level: Callable[[Level], None], on_request: Callable[[], None]) -> Result:
    """Load the server at each level. Raises `BenchError` when it cannot be reached or refuses a first request.

    `on_level` is called before each level and `on_request` after each request.
    """
    headers = {"Content-Type": "application/json"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=load.timeout_s)
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=timeout,
        connector=aiohttp.TCPConnector(limit=0),
        trace_configs=connection_traces(),
    ) as session:
        target, server_version = await _meet(session, load)
        levels: list[Summary] = []
        errors: dict[str, None] = {}  # the distinct ones, in order
        for index, level in enumerate(load.levels):
            on_level(level)
            seed = load.seed + index + 1
            asked = _questions(load, level.num_requests, seed)
            cpu_s = time.process_time()
            if level.rate is not None:
                timings = await _open_loop(session, target, asked, level.rate, seed, on_request)
            else:
                timings = await _closed_loop(session, target, asked, level.concurrency or 1, on_request)
            cpu_s = time.process_time() - cpu_s
            good = num_good(timings, load.objectives) if load.objectives else None
            levels.append(summarize(timings, level.concurrency, cpu_s, rate=level.rate, num_good=good))
            errors.update((t.error, None) for t in timings if t.error is not None)
    return Result(target.model, server_version, target.ignore_eos, levels, list(errors)[:5])


def _questions(load: Load, count: int, seed: int) -> list[Question]:
    return questions(load.endpoint, count, load.prefix_len, load.input_len, load.output_len, load.vocab_size, seed)


async def _closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    asked: Sequence[Question],
    concurrency: int,
    on_request: Callable[[], None],
) -> list[RequestTiming]:
    """`concurrency` streams at any time: each sends its next request when its last one has ended."""
    waiting: Iterator[Question] = iter(asked)
    timings: list[RequestTiming] = []

    async def stream() -> None:
        for question in waiting:
            timings.append(await timed_request(session, target, question))
            on_request()

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return timings


async def _open_loop(
    session: aiohttp.ClientSession,
    target: Target,
    asked: Sequence[Question],
    rate: float,
    seed: int,
    on_request: Callable[[], None],
) -> list[RequestTiming]:
    """Requests arrive independently of each other (a Poisson process), and of how fast they are answered."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, size=len(asked))
    clock = asyncio.get_running_loop()
    start_s = clock.time()

    async def arrive(question: Question, after_s: float) -> RequestTiming:
        await asyncio.sleep(start_s + after_s - clock.time())
        timing = await timed_request(session, target, question)
        on_request()
        return timing

    arrivals = zip(asked, np.cumsum(gaps_s), strict=True)
    return list(await asyncio.gather(*(arrive(question, float(after_s)) for question, after_s in arrivals)))


async def _meet(session: aiohttp.ClientSession, load: Load) -> tuple[Target, str | None]:
    """Find the model, and send one request that warms the server up and shows whether it takes `ignore_eos`."""
    base_url = base_url_of(load.url)
    listed = await _get_json(session, f"{base_url}/models")
    try:
        names = [str(model["id"]) for model in listed["data"]]
    except (LookupError, TypeError) as error:
        raise BenchError(f"{base_url}/models does not answer as an OpenAI-compatible server's does.") from error
    model = load.model or (names[0] if names else None)
    if model is None:
        raise BenchError(f"{base_url} serves no model.")
    (question,) = _questions(load, 1, load.seed)
    target = Target(base_url, model, load.endpoint, load.temperature, load.top_p, ignore_eos=True)
    first = await timed_request(session, target, question)
    if first.error is not None and "ignore_eos" in first.error:
        target = replace(target, ignore_eos=False)
        first = await timed_request(session, target, question)
    if first.error is not None:
        raise BenchError(f"The first request failed: {first.error}")
    try:
        told = await _get_json(session, f"{base_url.removesuffix('/v1')}/version")
    except BenchError:  # not every server tells its version
        told = None
    version = told.get("version") if isinstance(told, dict) else None
    return target, version if isinstance(version, str) else None


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise BenchError(f"{url} answered HTTP {response.status}.")
            return await response.json(content_type=None)
    except aiohttp.ClientConnectorError as error:
        raise BenchError(f"No server answers at {error.host}:{error.port}.") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BenchError(f"{url} cannot be reached: {error}") from error
