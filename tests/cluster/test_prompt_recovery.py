"""Embeddings and scored prompts whose engine is lost: the next one gives the same, and each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes import (
    MODEL,
    DictStore,
    expected_tokens,
    fake_core,
    pooled,
    prompt_logprobs_of,
    start_engine,
    states_of,
    until,
)

from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.router import LeastLoaded
from quire.engine.outputs import EngineOutput, EngineRequest
from quire.engine.pooling import POOLING_TYPES, PoolingParams
from quire.engine.sampling_params import SamplingParams

PROMPT = [i % 50 for i in range(3, 123)]
SLOW = {"step_s": 0.02, "max_num_batched_tokens": 4}  # a prompt takes many steps


@pytest.fixture
def directory() -> Directory:
    return Directory(DictStore(), "app")


@pytest.fixture
async def client(directory: Directory) -> AsyncIterator[EngineClient]:
    client = EngineClient(directory, "gateway-1", LeastLoaded(), failover_timeout_s=5.0)
    await client.start()
    yield client
    await client.close()


async def collect(client: EngineClient, *requests: EngineRequest) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {each.request_id: [] for each in requests}
    async for batch in client.generate(MODEL, requests):
        for output in batch:
            outputs[output.request_id].append(output)
    return outputs


def embedded(kind: str) -> EngineRequest:
    pooling = PoolingParams(type=kind)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=0)
    return EngineRequest(
        request_id=f"e-{kind}", prompt_token_ids=PROMPT, sampling_params=params, seed=0, pooling=pooling
    )


def scored(request_id: str, max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0)
    return EngineRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=params, seed=3)


def check_embedding(kind: str, outputs: list[EngineOutput]) -> None:
    (end,) = outputs
    expected = pooled(PoolingParams(type=kind), dict(enumerate(states_of(PROMPT))), len(PROMPT))  # type: ignore[arg-type]
    assert (end.finish_reason, end.new_token_ids) == ("stop", [])
    assert end.embedding is not None
    assert end.embedding.tolist() == expected.tolist()


def check_scores(outputs: list[EngineOutput], max_tokens: int) -> None:
    (told,) = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    expected = prompt_logprobs_of(PROMPT, range(1, len(PROMPT)), states_of(PROMPT)[:-1])
    assert told.logprobs.tolist() == expected.logprobs.tolist()
    assert told.token_ids[:, 0].tolist() == PROMPT[1:]
    tokens = [token_id for output in outputs for token_id in output.new_token_ids]
    assert tokens == expected_tokens(PROMPT, max_tokens, 3)
    assert outputs[0].prompt_logprobs is told, "they come with the first output"


async def test_over_the_wire(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1")
    outputs = await collect(client, *map(embedded, POOLING_TYPES), scored("s", 5), scored("w", 0))
    for kind in POOLING_TYPES:
        check_embedding(kind, outputs[f"e-{kind}"])
    check_scores(outputs["s"], 5)
    check_scores(outputs["w"], 0)
    await engine.close()


@pytest.mark.parametrize("progress", [1, 45, 95])
async def test_an_engine_is_lost_amid_the_prompts(directory: Directory, client: EngineClient, progress: int) -> None:
    engine = await start_engine(directory, "e1", fake_core(**SLOW))  # type: ignore[arg-type]
    work = {kind: asyncio.create_task(collect(client, embedded(kind))) for kind in POOLING_TYPES}
    scores = asyncio.create_task(collect(client, scored("s", 3), scored("w", 0)))
    await until(lambda: engine.load().stats.num_steps >= progress)
    second = await start_engine(directory, "e2", fake_core(max_num_batched_tokens=16))
    await until(lambda: len(client.links()) == 2)
    assert not scores.done()
    await engine.close()
    for kind, task in work.items():
        check_embedding(kind, (await task)[f"e-{kind}"])
    outputs = await scores
    check_scores(outputs["s"], 3)
    check_scores(outputs["w"], 0)
    await second.close()


async def test_an_engine_is_lost_after_the_prompt(directory: Directory, client: EngineClient) -> None:
    """Its logprobs are here with the first token; the next engine tells them to nobody again."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.01))
    outputs: list[EngineOutput] = []
    second = None
    async for batch in client.generate(MODEL, [scored("s", 300)]):
        outputs += batch
        if second is None and len(outputs) >= 3:
            second = await start_engine(directory, "e2")
            await until(lambda: len(client.links()) == 2)
            await engine.close()
    assert second is not None
    assert second.load().stats.num_steps > 0
    check_scores(outputs, 300)
    await second.close()
