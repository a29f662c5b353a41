"""`quire bench serve`: closed-loop load on an OpenAI-compatible server, one level of concurrency after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from ..cli_http import base_url_of
from . import Endpoint
from .client import BenchError, Target, timed_request
from .latency import RequestTiming, Summary, summarize
from .workload import random_token_prompts, random_word_prompts

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. Lengths are in tokens."""

    url: str
    model: str | None  # None: the first that the server lists
    endpoint: Endpoint
    concurrency: tuple[int, ...]
    num_requests: int | None  # per level; None: 8 per stream
    input_len: int
    output_len: int
    temperature: float
    vocab_size: int
    seed: int
    api_key: str | None
    timeout_s: float  # without a byte from the server


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured, and on what."""

    model: str
    server_version: str | None
    exact_output_len: bool  # False: the server does not take `ignore_eos`, so answers may end early
    levels: list[Summary]
    errors: list[str]  # the distinct ones, at most a few


def num_requests_of(load: Load, concurrency: int) -> int:
    return load.num_requests or max(8, 8 * concurrency)


async def run(load: Load, on_level: Callable[[int, int], None], on_request: Callable[[], None]) -> Result:
    """Load the server at each level. Raises `BenchError` when it cannot be reached or refuses a first request.

    `on_level(concurrency, num_requests)` is called before each level and `on_request()` after each request.
    """
    headers = {"Content-Type": "application/json"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=load.timeout_s)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        target, server_version = await _meet(session, load)
        levels: list[Summary] = []
        errors: dict[str, None] = {}  # the distinct ones, in order
        for index, concurrency in enumerate(load.concurrency):
            num_requests = num_requests_of(load, concurrency)
            on_level(concurrency, num_requests)
            prompts = _prompts(load, num_requests, seed=load.seed + index + 1)
            cpu_s = time.process_time()
            timings = await _closed_loop(session, target, prompts, concurrency, on_request)
            levels.append(summarize(timings, concurrency, time.process_time() - cpu_s))
            errors.update((t.error, None) for t in timings if t.error is not None)
    return Result(target.model, server_version, target.ignore_eos, levels, list(errors)[:5])


def _prompts(load: Load, num_prompts: int, seed: int) -> Sequence[Prompt]:
    if load.endpoint == "completions":
        return random_token_prompts(num_prompts, load.input_len, load.vocab_size, seed)
    return random_word_prompts(num_prompts, load.input_len, seed)


async def _closed_loop(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    concurrency: int,
    on_request: Callable[[], None],
) -> list[RequestTiming]:
    """`concurrency` streams at any time: each sends its next request when its last one has ended."""
    waiting: Iterator[Prompt] = iter(prompts)
    timings: list[RequestTiming] = []

    async def stream() -> None:
        for prompt in waiting:
            timings.append(await timed_request(session, target, prompt))
            on_request()

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return timings


async def _meet(session: aiohttp.ClientSession, load: Load) -> tuple[Target, str | None]:
    """Find the model, and send one request that warms the server up and shows whether it takes `ignore_eos`."""
    base_url = base_url_of(load.url)
    listed = await _get_json(session, f"{base_url}/models")
    names = [model["id"] for model in listed["data"]]
    model = load.model or (names[0] if names else None)
    if model is None:
        raise BenchError(f"{base_url} serves no model.")
    (prompt,) = _prompts(load, 1, load.seed)
    target = Target(base_url, model, load.endpoint, load.output_len, load.temperature, ignore_eos=True)
    first = await timed_request(session, target, prompt)
    if first.error is not None and "ignore_eos" in first.error:
        target = replace(target, ignore_eos=False)
        first = await timed_request(session, target, prompt)
    if first.error is not None:
        raise BenchError(f"The first request failed: {first.error}")
    try:
        version = (await _get_json(session, f"{base_url.removesuffix('/v1')}/version")).get("version")
    except BenchError:  # not every server tells its version
        version = None
    return target, version


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
