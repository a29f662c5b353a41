"""A call that asks Serve for an engine: one at a time, again when it fails, and not for nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import MODEL, DictStore, start_engine, until
from ray.exceptions import RayError

from quire.cluster import sleeping, waking
from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.router import LeastLoaded
from quire.cluster.sleeping import SleepWatch
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


@pytest.mark.parametrize(
    ("status", "replicas", "asleep"),
    [
        ("HEALTHY", {}, True),
        ("HEALTHY", {"RUNNING": 0}, True),
        ("HEALTHY", {"RUNNING": 1}, False),  # Serve has not noticed yet that it is dead
        ("UPSCALING", {}, False),
        ("DOWNSCALING", {"STOPPING": 1}, False),
        ("UNHEALTHY", {}, False),
    ],
)
async def test_asleep_is_what_serve_wants_none_of(status: str, replicas: dict[str, int], asleep: bool) -> None:
    states = {"Engine": SimpleNamespace(status=status, replica_states=replicas)}
    lacking: list[str] = [MODEL]
    watch = SleepWatch({MODEL: "Engine"}, lambda: lacking, lambda: states)  # type: ignore[arg-type,return-value]
    following = asyncio.create_task(watch.run())
    await asyncio.sleep(0.05)
    assert watch.is_asleep(MODEL) is asleep
    following.cancel()


async def test_serve_is_asked_only_about_models_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a model that has one again is not asleep, whatever Serve said last; nor is one that Serve says nothing of."""
    monkeypatch.setattr(sleeping, "POLL_S", 0.01)
    lacking, num_looks, silent = [MODEL], 0, False

    def look() -> Any:
        nonlocal num_looks
        num_looks += 1
        if silent:
            raise RayError("the controller is gone")
        return {"Engine": SimpleNamespace(status="HEALTHY", replica_states={})}

    watch = SleepWatch({MODEL: "Engine"}, lambda: lacking, look)
    following = asyncio.create_task(watch.run())
    await until(lambda: watch.is_asleep(MODEL))
    silent = True
    await until(lambda: not watch.is_asleep(MODEL))
    silent, lacking = False, []
    await asyncio.sleep(0.05)
    before = num_looks
    await asyncio.sleep(0.05)
    assert (num_looks, watch.is_asleep(MODEL)) == (before, False)
    following.cancel()
