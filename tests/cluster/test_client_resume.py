"""Clients that go on with a stream, at engines that remember more than the client has seen: other attempts, older
copies, answers of other seeds. The beginning that it has and the rest that it gets are of one answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fakes import MODEL, DictStore, expected_tokens, fake_core, start_engine, until

from quire.cluster.api.app import create_app
from quire.cluster.api.health import EngineHealth, ModelHealth, ServiceHealth
from quire.cluster.api.resume import Begun, may_resume
from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.engine_server import EngineServer
from quire.cluster.gateway import EngineBackend
from quire.cluster.messages import ResumePoint
from quire.cluster.resume_journal import ResumeJournal
from quire.cluster.router import EngineSnapshot
from quire.cluster.served_models import ServedModels
from quire.engine.config import ModelConfig
from quire.engine.errors import InvalidRequestError, OverloadedError
from quire.engine.outputs import CompletionOutput, EngineOutput, EngineRequest
from quire.engine.sampling_params import SamplingParams

PROMPT = [1, 2, 3]
NAME = {"x-request-id": "X"}


def begin(
    name: str, seeds: Sequence[int], *, n: int = 1, created: int = 1000, answer_id: str = "", **params: Any
) -> Begun:
    """An HTTP request as it is when its handler asks whether it may go on: per prompt a seed that was drawn for it."""
    sampling = SamplingParams(**{"max_tokens": 60, "temperature": 1.0, "ignore_eos": True, **params})
    prompts = [
        [
            EngineRequest(
                request_id=f"{name}-p{p}-{choice}",
                prompt_token_ids=PROMPT,
                sampling_params=sampling,
                seed=seed,
                choice_index=choice,
            )
            for choice in range(n)
        ]
        for p, seed in enumerate(seeds)
    ]
    return Begun(prompts, answer_id or f"cmpl-{name}", created)


async def ask(begun: Begun, backend: Any, last: str | None = None) -> Begun:
    """What becomes of it with these headers."""
    headers = NAME if last is None else {**NAME, "last-event-id": last}
    http: Any = SimpleNamespace(headers=headers, scope={"state": {}}, url=SimpleNamespace(path="/v1/completions"))
    return await may_resume(begun, http, b"the same body", backend, MODEL)


def shown(begun: Begun, *num_tokens: int) -> str:
    """The id of an event with which the client has seen so many tokens of each answer."""
    assert begun.event_ids is not None
    for index, count in enumerate(num_tokens):
        begun.event_ids.advance(CompletionOutput(index=index, text="", token_ids=[0] * count))
    return str(begun.event_ids)


def requests_of(begun: Begun) -> list[EngineRequest]:
    return [request for choices in begun.prompts for request in choices]


class Journals:
    """A backend that only remembers: the journals of two engines."""

    def __init__(self) -> None:
        self.journals = [ResumeJournal(), ResumeJournal()]
        self.engines = [EngineHealth("e", None, 0, 0)]

    def health(self) -> ServiceHealth:
        return ServiceHealth(
            [ModelHealth(MODEL, self.engines), ModelHealth("another", [EngineHealth("f", None, 0, 0)])]
        )

    def ran(self, engine: int, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """The engine has computed this much of a request when its connection ends."""
        journal = self.journals[engine]
        journal.begin(request)
        journal.add(EngineOutput(request.request_id, len(request.resume_token_ids), list(token_ids)))
        journal.end([request.request_id])

    async def recall(self, key: bytes) -> Sequence[ResumePoint]:
        return [point for journal in self.journals for point in journal.recall(key).values()]


@pytest.mark.parametrize("engines", [(0, 1), (1, 0)])
async def test_the_attempt_that_the_client_has_seen_goes_on(engines: tuple[int, int]) -> None:
    """Not the longest answer. Also where the client itself has named the answer, so that both have the same id."""
    backend = Journals()
    first = await ask(begin("one", [111], answer_id="cmpl-mine"), backend)
    backend.ran(engines[0], requests_of(first)[0], range(100, 110))
    second = await ask(begin("two", [222], answer_id="cmpl-mine"), backend)
    backend.ran(engines[1], requests_of(second)[0], range(200, 205))
    for begun, seed, seen in ((second, 222, 200), (first, 111, 100)):
        resumed = await ask(begin("three", [333]), backend, shown(begun, 4))
        (request,) = requests_of(resumed)
        assert (request.seed, request.resume_token_ids) == (seed, list(range(seen, seen + 4)))
        assert resumed.answer_id == "cmpl-mine"
        assert str(resumed.event_ids).partition("-")[2] == str(begun.event_ids).partition("-")[2]


async def test_an_id_that_names_no_attempt_means_the_newest() -> None:
    """All answers of it, where each engine has one of each attempt."""
    backend = Journals()
    for created, first_engine, seed, num_tokens in ((1030, 0, 222, 5), (1000, 1, 111, 10)):
        begun = await ask(begin(f"r{seed}", [seed], n=2, created=created), backend)
        for choice, request in enumerate(requests_of(begun)):
            backend.ran((first_engine + choice) % 2, request, [seed + choice] * num_tokens)
    resumed = await ask(begin("last", [333], n=2), backend, "4.5")
    assert [(r.seed, r.resume_token_ids) for r in requests_of(resumed)] == [(222, [222] * 4), (222, [223] * 5)]
    assert (resumed.answer_id, resumed.created) == ("cmpl-r222", 1030)


async def test_answers_of_one_stream_are_of_one_attempt() -> None:
    """Of the choice of which nobody remembers a token, the seed is known by the other."""
    backend = Journals()
    first = await ask(begin("one", [111], n=2), backend)
    backend.ran(0, requests_of(first)[1], range(100, 110))
    second = await ask(begin("two", [222], n=2), backend)
    backend.ran(1, requests_of(second)[0], range(200, 205))
    resumed = await ask(begin("three", [333], n=2), backend, shown(second, 3, 2))
    assert [(r.seed, r.resume_token_ids) for r in requests_of(resumed)] == [(222, [200, 201, 202]), (222, [])]


async def test_an_attempt_that_nobody_remembers_is_not_made_of_another() -> None:
    backend = Journals()
    first = await ask(begin("one", [111]), backend)
    second = await ask(begin("two", [222]), backend)
    backend.ran(1, requests_of(second)[0], range(200, 205))
    with pytest.raises(InvalidRequestError, match="no engine remembers this request") as refused:
        await ask(begin("three", [333]), backend, shown(first, 3))
    assert refused.value.code == "not_resumable"


async def test_while_there_is_no_engine_a_client_is_asked_to_come_again() -> None:
    """Its answer is not lost: perhaps a gateway has it, and the next engine will. Other models do not count."""
    backend = Journals()
    first = await ask(begin("one", [111]), backend)
    backend.engines, last = [], shown(first, 3)
    with pytest.raises(OverloadedError, match="Send it again") as refused:
        await ask(begin("two", [222]), backend, last)
    assert refused.value.retry_after_s > 1
    backend.ran(0, requests_of(first)[0], range(200, 205))
    (request,) = requests_of(await ask(begin("three", [333]), backend, last))
    assert (request.seed, request.resume_token_ids) == (111, [200, 201, 202])


async def test_each_prompt_goes_on_with_its_own_seed() -> None:
    """One of which something was seen, and of which nobody knows the seed, cannot."""
    backend = Journals()
    first = await ask(begin("one", [11, 22, 33]), backend)
    for engine, request in zip((0, 1), requests_of(first), strict=False):
        backend.ran(engine, request, range(request.seed, request.seed + 5))
    resumed = await ask(begin("two", [44, 55, 66]), backend, shown(first, 2, 3))
    seeds = [(r.seed, r.resume_token_ids) for r in requests_of(resumed)]
    assert seeds == [(11, [11, 12]), (22, [22, 23, 24]), (66, [])]
    with pytest.raises(InvalidRequestError, match="no engine remembers"):
        await ask(begin("three", [44, 55, 66]), backend, shown(first, 0, 0, 1))


async def test_the_copy_counts_with_which_the_client_went_on_last() -> None:
    """The second engine sums in another order. What the first one had is longer, and is still there."""
    backend = Journals()
    first = await ask(begin("one", [111]), backend)
    backend.ran(0, requests_of(first)[0], range(100, 150))
    second = await ask(begin("two", [222]), backend, shown(first, 5))
    backend.ran(1, requests_of(second)[0], range(205, 215))
    for last in (shown(second, 12), shown(first, 7)):  # ids of one attempt
        resumed = await ask(begin("three", [333]), backend, last)
        assert requests_of(resumed)[0].resume_token_ids == [*range(100, 105), *range(205, 212)]


async def test_a_resumption_that_was_lost_can_be_repeated() -> None:
    """Its gateway died before an engine had it, or the engine that remembered it had no room."""
    backend = Journals()
    first = await ask(begin("one", [111], logprobs=1), backend)
    backend.ran(0, requests_of(first)[0], range(100, 110))
    last = shown(first, 5)
    for i in range(3):
        resumed = await ask(begin(f"r{i}", [333], logprobs=1), backend, last)
        (request,) = requests_of(resumed)
        assert (request.seed, request.resume_token_ids) == (111, [])  # tokens come with logprobs: computed again
        if i > 0:
            backend.journals[0].begin(request)
            backend.journals[0].refused(request.request_id)
    assert str(resumed.event_ids) == last.replace("5", "0", 1)


class Pinned:
    """Every request goes to the engine that the test names."""

    uses_prefixes = False

    def __init__(self) -> None:
        self.engine_id = ""

    def choose(self, request: EngineRequest, engines: Sequence[EngineSnapshot]) -> str:
        return self.engine_id


@pytest.fixture
async def two() -> AsyncIterator[tuple[EngineClient, Pinned, list[EngineServer]]]:
    """A gateway with two engines that work on four requests at most."""
    directory, policy = Directory(DictStore(), "app"), Pinned()
    client = EngineClient(directory, "gateway-1", policy)
    await client.start()
    cores = [fake_core(0.005, max_num_seqs=4, max_queued_requests=1) for _ in range(2)]
    engines = [await start_engine(directory, f"e{i}", core) for i, core in enumerate(cores)]
    await until(lambda: len(client.links()) == 2)
    yield client, policy, engines
    await client.close()
    for engine in engines:
        await engine.close()


async def run(client: EngineClient, begun: Begun, num_tokens: int) -> list[int]:
    """The only answer of a stream, until its client has so many tokens of it and leaves."""
    (request,) = requests_of(begun)
    token_ids = list(request.resume_token_ids)
    async with aclosing(client.generate(MODEL, [request])) as batches:
        while len(token_ids) < num_tokens:
            token_ids += [token for output in await anext(batches) for token in output.new_token_ids]
    return token_ids


async def test_two_engines_with_an_attempt_each(two: tuple[EngineClient, Pinned, list[EngineServer]]) -> None:
    client, policy, engines = two
    policy.engine_id = "e0"
    await run(client, await ask(begin("one", [111]), client), 10)  # and its client saw no event
    policy.engine_id = "e1"
    second = await ask(begin("two", [222]), client)
    seen = (await run(client, second, 5))[:5]
    await until(lambda: not engines[0]._owners and not engines[1]._owners)
    last = shown(second, 5)
    for engine_id in ("e0", "e1"):  # the first time its client leaves before it has seen more
        policy.engine_id = engine_id
        resumed = await ask(begin(f"on {engine_id}", [333]), client, last)
        assert requests_of(resumed)[0].resume_token_ids == seen
        whole = await run(client, resumed, 30)
        assert whole[:30] == expected_tokens(PROMPT, 30, 222)


OTHERS = [f"x{i}-p0-0" for i in range(5)]


async def fill(engine: EngineServer) -> None:
    """Occupy all rows of an engine, and its queue."""
    for i in range(len(OTHERS)):
        engine._engine.add(requests_of(begin(f"x{i}", [1], max_tokens=700))[0])
        await until(lambda i=i: engine.load().stats.num_running + engine.load().stats.num_waiting > i)


async def test_a_resumption_that_finds_no_room_is_repeated(
    two: tuple[EngineClient, Pinned, list[EngineServer]],
) -> None:
    """Through the API, at the engine that remembers the answer and at the other one. It comes with logprobs: all tokens
    are computed again, and a full engine takes nobody in who brings none."""
    client, policy, engines = two
    app = create_app(EngineBackend(client, ServedModels([ModelConfig(served_model_name=MODEL)])))
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 30,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 1,
        "temperature": 1,
        "skip_special_tokens": False,  # an event for each token, whatever is drawn
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        policy.engine_id = "e0"
        whole = (await http.post("/v1/completions", json=body, headers=NAME)).text.split("\n\n")
        last = whole[3].partition("\n")[0].removeprefix("id: ")
        for engine in engines:
            await fill(engine)
        for engine_id in ("e0", "e1"):
            policy.engine_id = engine_id
            refused = await http.post("/v1/completions", json=body, headers={**NAME, "last-event-id": last})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        for engine in engines:
            engine._engine.abort(OTHERS)
            await until(lambda engine=engine: engine.load().stats.num_running == 0)
        rest = (await http.post("/v1/completions", json=body, headers={**NAME, "last-event-id": last})).text
    assert rest.split("\n\n") == whole[4:]
