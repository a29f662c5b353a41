"""A call that asks Serve for an engine: one at a time, again when it fails, and not for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes import MODEL, DictStore, start_engine, until
from ray.exceptions import RayError

from quire.cluster import waking
from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.router import LeastLoaded
from quire.cluster.waking import EngineWaker
from quire.engine.errors import OverloadedError
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams


class Handle:
    """Of a deployment whose replica dies while it starts, the first `num_failures` times."""

    def __init__(self, num_failures: int) -> None:
        self.num_calls = 0
        self._num_failures = num_failures

    @property
    def wake(self) -> Handle:
        return self

    async def remote(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(0.01)
        if self.num_calls <= self._num_failures:
            raise RayError("the replica died while it started")


def request(request_id: str) -> EngineRequest:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=params, seed=1)


async def run(client: EngineClient, request_id: str) -> int:
    return sum([len(o.new_token_ids) async for outs in client.generate(MODEL, [request(request_id)]) for o in outs])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waking, "RETRY_S", 0.05)
    monkeypatch.setattr(waking, "MAX_RETRY_S", 0.1)


async def test_a_call_that_fails_is_made_again_until_an_engine_answers() -> None:
    handle: Any = Handle(num_failures=3)
    directory = Directory(DictStore(), "app")
    waker = EngineWaker({MODEL: handle}, lambda model: client.waits_for(model))
    client = EngineClient(directory, "gateway", LeastLoaded(), failover_timeout_s=5.0, on_waiting=waker.wake)
    await client.start()
    streams = [asyncio.create_task(run(client, f"r{i}")) for i in range(3)]
    await until(lambda: handle.num_calls == 4)
    await until(lambda: not waker._calls)
    await asyncio.sleep(0.2)
    assert handle.num_calls == 4  # it was answered
    engine = await start_engine(directory, "e")
    assert await asyncio.gather(*streams) == [3, 3, 3]
    await client.close()
    await engine.close()


async def test_nobody_asks_for_requests_that_are_given_up() -> None:
    handle: Any = Handle(num_failures=1000)
    waker = EngineWaker({MODEL: handle}, lambda model: client.waits_for(model))
    client = EngineClient(
        Directory(DictStore(), "app"), "gateway", LeastLoaded(), failover_timeout_s=0.5, on_waiting=waker.wake
    )
    await client.start()
    with pytest.raises(OverloadedError):
        await run(client, "r")
    assert 3 <= handle.num_calls <= 12
    await until(lambda: not waker._calls)
    num_calls = handle.num_calls
    await asyncio.sleep(0.3)
    assert handle.num_calls == num_calls
    await client.close()
