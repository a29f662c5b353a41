"""A request that breaks every step it is in, through the HTTP API, a gateway's client and an engine, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fakes import MODEL, DictStore, FakeExecutor, make_core, start_engine, until

from quire.cluster.api.app import create_app
from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.engine_server import EngineServer
from quire.cluster.gateway import EngineBackend
from quire.cluster.router import LeastLoaded
from quire.cluster.served_models import ServedModels
from quire.engine.config import ModelConfig
from quire.engine.outputs import SchedulerOutput

POISON = 49  # a token of the prompt


class Poisonable(FakeExecutor):
    """Fails every step with a request that has `POISON` in its prompt, whatever the request is called."""

    def _is_poisoned(self, step: SchedulerOutput) -> bool:
        known = [*self._rows.values(), *step.new_rows]
        return any(POISON in new.token_ids[:4] for new in known if new.row in step.rows)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[httpx.AsyncClient, EngineServer]]:
    """The API, and the engine behind it."""
    directory = Directory(DictStore(), "app")
    client = EngineClient(directory, "gateway-1", LeastLoaded())
    models = ServedModels([ModelConfig(served_model_name=MODEL)])  # with the tokenizer of the default model
    await client.start()
    server = await start_engine(directory, "e1", make_core(Poisonable(num_blocks=256), max_model_len=400))
    await until(lambda: len(client.links()) == 1)
    transport = httpx.ASGITransport(create_app(EngineBackend(client, models)))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http, server
    await client.close()
    await server.close()


async def ask(http: httpx.AsyncClient, index: int, first_token: int = 1) -> httpx.Response:
    prompt = [first_token, 20 + index, 30, 40]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "seed": index}
    return await http.post("/v1/completions", json=body, timeout=30)


async def test_one_of_eight_ends_with_an_error_and_seven_are_unharmed(
    engine: tuple[httpx.AsyncClient, EngineServer],
) -> None:
    http, server = engine
    undisturbed = [(await ask(http, index)).json() for index in range(8)]
    assert len({answer["choices"][0]["text"] for answer in undisturbed}) == 8
    answers = await asyncio.gather(*(ask(http, index, POISON if index == 3 else 1) for index in range(8)))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 200, 200, 200, 200]
    for index, answer in enumerate(answers):
        if index != 3:
            assert answer.json()["choices"] == undisturbed[index]["choices"]
            assert answer.json()["usage"]["completion_tokens"] == 60
    error = answers[3].json()["error"]
    assert (error["type"], "3 times in a row" in error["message"]) == ("server_error", True)
    stats = server.load().stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert (await ask(http, 0)).json()["choices"] == undisturbed[0]["choices"]
