"""Faults on purpose: who may ask for which, and what is done to whom. The real thing is in test_kill.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from quire.cluster import chaos
from quire.cluster.api.errors import install_error_handlers
from quire.cluster.chaos import add_chaos_route, do_fault
from quire.cluster.directory import EngineRecord
from quire.cluster.messages import Inject


class Link:
    """An engine that is connected."""

    def __init__(self, engine_id: str, model: str) -> None:
        self.record = EngineRecord(engine_id=engine_id, model=model, host="127.0.0.1", port=1, max_model_len=64)
        self.sent: list[Inject] = []

    def send(self, message: Inject) -> None:
        self.sent.append(message)


class RecordingRanks:
    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []

    def signal_rank(self, rank: int, number: int) -> None:
        self.done.append(("signal", rank, number))

    def drop_step(self, rank: int) -> None:
        self.done.append(("drop", rank, 0))


def client_of(links: list[Link]) -> httpx.AsyncClient:
    app = FastAPI()
    install_error_handlers(app)
    add_chaos_route(app, lambda: links, {"small": 1, "large": 2})  # type: ignore[arg-type,return-value]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_fault_reaches_the_engine_that_is_named() -> None:
    small, large = Link("a", "small"), Link("b", "large")
    async with client_of([small, large]) as client:
        answer = await client.post("/chaos", json={"fault": "kill-worker", "rank": 1, "engine": "b"})
        assert (answer.status_code, answer.json()) == (202, {"engine": "b", "fault": "kill-worker", "rank": 1})
        assert (await client.post("/chaos", json={"fault": "kill-engine"})).json()["engine"] == "a"
    assert large.sent == [Inject("kill-worker", 1)]
    assert small.sent == [Inject("kill-engine", 0)]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"fault": "earthquake"}, "fault", "fault"),
        ({"fault": "kill-worker", "rank": 2, "engine": "b"}, "rank", "from 0 to 1, got 2"),
        ({"fault": "drop-step", "engine": "a"}, "fault", "has one rank, in its own process"),
        ({"fault": "kill-engine", "engine": "c"}, "engine", "there is no 'c'; there are a, b"),
        ({"fault": "kill-engine", "when": "now"}, "when", "when"),
    ],
)
async def test_what_cannot_be_is_refused(body: dict[str, Any], param: str, message: str) -> None:
    links = [Link("a", "small"), Link("b", "large")]
    async with client_of(links) as client:
        answer = await client.post("/chaos", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert links[0].sent == links[1].sent == []


async def test_without_an_engine() -> None:
    async with client_of([]) as client:
        assert (await client.post("/chaos", json={"fault": "kill-engine"})).status_code == 503


def test_faults_are_done_to_ranks_and_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, signals = RecordingRanks(), []
    monkeypatch.setattr(chaos.os, "kill", lambda *arguments: signals.append(arguments))
    for fault in ("kill-worker", "stop-worker", "drop-step", "kill-engine", "stop-engine"):
        do_fault(Inject(fault, 1), ranks)  # type: ignore[arg-type]
    assert ranks.done == [("signal", 1, signal.SIGKILL), ("signal", 1, signal.SIGSTOP), ("drop", 1, 0)]
    assert signals == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP)]
    do_fault(Inject("drop-step"), None)  # said in the log, and nothing else
