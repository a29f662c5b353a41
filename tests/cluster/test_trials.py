"""Streams under which two engines were lost, and the engines that they are tried at: one after the other, model by
model, for as long as there is one. The engines are links without a connection, which do what a test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes import MODEL, DictStore, until

from quire.cluster.directory import Directory, EngineRecord
from quire.cluster.engine_client import EngineClient
from quire.cluster.engine_links import EngineLink
from quire.cluster.messages import Add, GatewayMessage, Leaving, Refused, StepOutputs
from quire.cluster.router import LeastLoaded
from quire.engine.errors import EngineError, OverloadedError
from quire.engine.outputs import EngineOutput, EngineRequest
from quire.engine.sampling_params import SamplingParams

TIMEOUT_S = 0.6
RETRY_S, REFUSAL_S = 0.02, 0.03  # while one is refused others ask again


class FakeEngine(EngineLink):
    """An engine that runs what it gets until the test says what becomes of it, or refuses it if it is full."""

    def __init__(self, client: EngineClient, name: str, model: str = MODEL, *, is_full: bool = False) -> None:
        super().__init__(EngineRecord(engine_id=name, model=model, host="h", port=1, max_model_len=1000))
        self.client = client
        self.is_full = is_full
        self.num_refused = 0
        client._links._connected[name] = self
        client.on_connected(self)

    def send(self, message: GatewayMessage) -> None:
        if isinstance(message, Add) and self.is_full:
            self.num_refused += 1
            refused = Refused(message.request.request_id, "overloaded", "The queue is full.")
            asyncio.get_running_loop().call_later(REFUSAL_S, self.client.on_message, self, refused)

    async def drain(self) -> None: ...

    def names(self) -> list[str]:
        """Of the requests that run here."""
        return sorted(stream.request.request_id for stream in self.streams.values())

    def answer(self) -> None:
        """The only token of every answer."""
        outputs = [EngineOutput(name, 0, [7], "length") for name in self.streams]
        self.client.on_message(self, StepOutputs(outputs))

    def die(self) -> None:
        del self.client._links._connected[self.record.engine_id]
        self.client.on_lost(self, "it died")


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.setattr("quire.cluster.engine_client.RETRY_S", RETRY_S)
    client = EngineClient(Directory(DictStore(), "app"), "gateway-1", LeastLoaded(), failover_timeout_s=TIMEOUT_S)
    yield client
    assert (client._streams, client._homeless, client._trials._current) == ({}, {}, {})
    assert not any(client._trials._waiting.values())


Answers = dict[str, "asyncio.Task[list[int]]"]


async def ask(client: EngineClient, *names: str, model: str = MODEL) -> Answers:
    async def tokens(name: str) -> list[int]:
        params = SamplingParams(max_tokens=1)
        request = EngineRequest(request_id=name, prompt_token_ids=[1], sampling_params=params, seed=1)
        return [t async for outputs in client.generate(model, [request]) for o in outputs for t in o.new_token_ids]

    answers = {name: asyncio.create_task(tokens(name)) for name in names}
    await until(lambda: client._streams.keys() >= answers.keys())
    return answers


async def on_trial(client: EngineClient, *names: str, model: str = MODEL) -> Answers:
    """Streams that have lost two engines, and have none now."""
    engine = FakeEngine(client, f"{model}-first", model)
    answers = await ask(client, *names, model=model)
    engine.die()
    FakeEngine(client, f"{model}-second", model).die()
    return answers


async def endings(answers: Answers) -> list[object]:
    """Tokens, or what was raised."""
    return await asyncio.gather(*answers.values(), return_exceptions=True)


async def served(engine: FakeEngine, answers: Answers, pause_s: float = 0.0) -> list[list[str]]:
    """What ran there at a time, while it answered all."""
    seen = []
    async with asyncio.timeout(10):
        while not all(answer.done() for answer in answers.values()):
            seen.append(engine.names())
            await asyncio.sleep(pause_s)
            engine.answer()
            await asyncio.sleep(0)
    return seen


@pytest.mark.parametrize("gap_s", [0.0, TIMEOUT_S / 3])
async def test_streams_on_trial_wait_for_a_healthy_engine_as_long_as_it_takes(
    client: EngineClient, gap_s: float
) -> None:
    """Also those that had waited for it before it came."""
    answers = await on_trial(client, "a", "b", "c", "d")
    await asyncio.sleep(gap_s)
    seen = await served(FakeEngine(client, "third"), answers, TIMEOUT_S / 2)
    assert [names for names in seen if names] == [["a"], ["b"], ["c"], ["d"]]
    assert await endings(answers) == [[7]] * 4


async def test_each_model_has_trials_of_its_own(client: EngineClient) -> None:
    """Neither an engine that does not come nor one that works for long holds up those of others."""
    dead = await on_trial(client, "x", model="dead")
    slow = await on_trial(client, "y", "z", model="slow")
    answers = await on_trial(client, "a", "b")
    working = FakeEngine(client, "slow-third", "slow")
    seen = await served(FakeEngine(client, "third"), answers, TIMEOUT_S / 10)
    assert [names for names in seen if names] == [["a"], ["b"]]
    assert not dead["x"].done()
    (ending,) = await endings(dead)
    assert isinstance(ending, OverloadedError)
    assert await served(working, slow) == [["y"], ["z"]]


async def test_without_an_engine_all_are_given_up_at_the_same_time(client: EngineClient) -> None:
    """They do not wait for an engine one after the other."""
    answers = await on_trial(client, "a", "b", "c", "d")
    async with asyncio.timeout(2 * TIMEOUT_S):
        errors = await endings(answers)
    assert ["No engine was available" in str(error) for error in errors] == [True] * 4


async def test_when_the_engine_dies_under_a_trial_the_others_wait_for_the_next(client: EngineClient) -> None:
    """From then on for as long as anybody: however long they have waited for their trial."""
    asked: list[str] = []
    client._on_waiting = asked.append
    answers = await on_trial(client, "a", "b", "c")
    third = FakeEngine(client, "third")
    await asyncio.sleep(1.5 * TIMEOUT_S)
    asked.clear()
    third.die()
    await asyncio.sleep(TIMEOUT_S / 3)
    assert [answer.done() for answer in answers.values()] == [True, False, False]
    assert asked == [MODEL] * 2  # they have somebody start one
    assert client.waits_for(MODEL)
    seen = await served(FakeEngine(client, "fourth"), answers, TIMEOUT_S)
    assert [names for names in seen if names] == [["b"], ["c"]]
    killer, *others = await endings(answers)
    assert isinstance(killer, EngineError)
    assert "3 engines in a row" in str(killer)
    assert others == [[7]] * 2


async def test_when_no_other_engine_comes_they_are_given_up_together(client: EngineClient) -> None:
    answers = await on_trial(client, "a", "b", "c", "d")
    third = FakeEngine(client, "third")
    await asyncio.sleep(1.5 * TIMEOUT_S)
    third.die()
    async with asyncio.timeout(2 * TIMEOUT_S):
        _, *others = await endings(answers)
    assert ["No engine was available" in str(error) for error in others] == [True] * 3


@pytest.mark.parametrize("how", ["client leaves", "abort", "abort with a report"])
async def test_who_ends_before_the_trial_is_never_placed_and_who_ends_in_it_makes_room(
    client: EngineClient, how: str
) -> None:
    answers = await on_trial(client, "a", "b", "c", "d")
    third = FakeEngine(client, "third")

    async def leave(name: str) -> None:
        if how == "client leaves":
            answers[name].cancel()
        else:
            client.abort([name], report=how == "abort with a report")
        if how == "abort with a report" and third.names() == [name]:
            third.answer()  # its last words
        await asyncio.gather(answers[name], return_exceptions=True)

    await leave("b")
    assert third.names() == ["a"]
    await leave("a")
    assert third.names() == ["c"]
    assert await served(third, answers) == [["c"], ["d"]]
    assert third.streams == {}


async def test_a_full_engine_is_asked_for_all_of_them_and_none_waits_for_ever(client: EngineClient) -> None:
    """Whom it refuses is not on trial meanwhile: the others may have more luck, or are told why, too."""
    answers = await on_trial(client, "a", "b", "c")
    third = FakeEngine(client, "third", is_full=True)
    async with asyncio.timeout(3 * TIMEOUT_S):
        errors = await endings(answers)
    assert [str(error) for error in errors] == ["The queue is full."] * 3
    assert third.num_refused > 9


async def test_who_was_refused_is_tried_when_there_is_room(client: EngineClient) -> None:
    answers = await on_trial(client, "a", "b", "c")
    third = FakeEngine(client, "third", is_full=True)
    await until(lambda: third.num_refused > 3)
    third.is_full = False
    seen = await served(third, answers)
    assert max(map(len, seen)) == 1
    assert await endings(answers) == [[7]] * 3


async def test_an_engine_that_leaves_hands_over_the_trial_and_nobody_else(client: EngineClient) -> None:
    """And where no other is, they go on as they were when it has gone."""
    answers = await on_trial(client, "a", "b", "c")
    third = FakeEngine(client, "third")
    client.on_message(third, Leaving())
    assert third.names() == ["a"]
    fourth = FakeEngine(client, "fourth")
    assert (third.names(), fourth.names()) == ([], ["a"])
    third.die()
    client.on_message(fourth, Leaving())
    fourth.die()  # at the end of its grace
    assert not any(answer.done() for answer in answers.values())
    seen = await served(FakeEngine(client, "fifth"), answers)
    assert sorted(names for names in seen if names) == [["a"], ["b"], ["c"]]
    assert await endings(answers) == [[7]] * 3
