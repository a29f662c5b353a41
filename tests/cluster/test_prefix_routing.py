"""Gateways follow the prefix caches of engines over TCP, and send requests to where their prefix is. Without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes import MODEL, DictStore, PacedExecutor, expected_tokens, fake_core, make_core, start_engine, until

from quire.cluster import engine_server, transport
from quire.cluster.cache_index import CacheIndex
from quire.cluster.directory import Directory
from quire.cluster.engine_client import EngineClient
from quire.cluster.engine_server import EngineServer
from quire.cluster.router import LeastLoaded, PrefixAffinity
from quire.cluster.stream_metrics import StreamBook
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams


@pytest.fixture
def directory() -> Directory:
    return Directory(DictStore(), "app")


@pytest.fixture
async def client(directory: Directory) -> AsyncIterator[EngineClient]:
    client = EngineClient(directory, "gateway-1", PrefixAffinity(), failover_timeout_s=5.0)
    await client.start()
    yield client
    await client.close()


def request(request_id: str, prompt: list[int], **fields: object) -> EngineRequest:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, seed=1, **fields)  # type: ignore[arg-type]


async def tokens_of(client: EngineClient, *requests: EngineRequest) -> list[int]:
    tokens = []
    async for outputs in client.generate(MODEL, requests):
        tokens += [token for output in outputs for token in output.new_token_ids]
    return tokens


def index_of(client: EngineClient) -> CacheIndex:
    return client._chooser._index


def agrees(client: EngineClient, *engines: EngineServer) -> bool:
    """Whether the gateway knows exactly what the engines hold."""
    held = {engine._engine_id: engine._cache._held for engine in engines}
    pools = [engine._core.scheduler.kv_cache.pool.num_cached for engine in engines]
    return index_of(client)._blocks == held and [len(each) for each in held.values()] == pools


def num_prompts(engine: EngineServer) -> int:
    return engine.load().stats.num_prompt_tokens


async def test_requests_go_where_their_prefix_is(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "REPORT_S", 0.01)
    engines = [await start_engine(directory, f"e{i}") for i in range(4)]
    await until(lambda: len(index_of(client)._bits) == 4)
    stems = [[10 * stem + i % 7 for i in range(40)] for stem in range(8)]
    homes = []
    for stem in stems:
        before = [num_prompts(engine) for engine in engines]
        assert await tokens_of(client, request(f"first{stem[0]}", stem)) == expected_tokens(stem, 4, 1)
        (home,) = [i for i, engine in enumerate(engines) if num_prompts(engine) != before[i]]
        homes.append(home)
    await until(lambda: agrees(client, *engines))
    index_of(client)._expected = [{}, {}]  # what engines have told must do
    assert len(set(homes)) > 1
    for i in range(3):
        for stem, home in zip(stems, homes, strict=True):
            # What was sent since the last report counts as load, and would outweigh a prefix as short as these.
            await until(lambda: not any(link.num_recent or link.stats.num_running for link in client.links()))
            before = num_prompts(engines[home])
            prompt = [*stem, 100 + i]
            assert await tokens_of(client, request(f"{i}-{stem[0]}", prompt)) == expected_tokens(prompt, 4, 1)
            await until(lambda home=home, before=before: num_prompts(engines[home]) == before + 41)
    assert all(engines[home].load().stats.prefix_cache_hits > 0 for home in homes)
    for engine in engines:
        await engine.close()
    await until(lambda: index_of(client).num_entries == 0)


async def test_the_choices_of_a_prompt_stay_together(directory: Directory, client: EngineClient) -> None:
    engines = [await start_engine(directory, f"e{i}") for i in range(3)]
    await until(lambda: len(index_of(client)._bits) == 3)
    prompt = list(range(300))
    await tokens_of(client, *(request(f"r-{i}", prompt, choice_index=i) for i in range(3)))
    await until(lambda: sum(map(num_prompts, engines)) == 900)
    assert sorted(map(num_prompts, engines)) == [0, 0, 900]
    for engine in engines:
        await engine.close()


async def test_a_small_cache_is_followed_through_evictions_and_resets(
    directory: Directory, client: EngineClient
) -> None:
    engine = await start_engine(
        directory, "e1", make_core(PacedExecutor(num_blocks=64), max_model_len=200, max_num_seqs=4)
    )
    await until(lambda: len(index_of(client)._bits) == 1)
    for i in range(30):
        await asyncio.gather(*(tokens_of(client, request(f"{i}-{j}", [i, j] * 30)) for j in range(3)))
        await until(lambda: agrees(client, engine))
        if i % 10 == 9:
            await asyncio.wrap_future(engine._engine.call(lambda core: core.reset_prefix_cache()))
    assert engine.load().stats.num_evictions > 100
    await engine.close()


async def test_a_gap_is_noticed_and_closed_by_a_snapshot(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates to a gateway that does not read are left out: the next one that comes shows the gap."""
    engine = await start_engine(directory, "e1")
    late = EngineClient(directory, "gateway-2", PrefixAffinity())
    await late.start()
    await until(lambda: len(index_of(late)._bits) == 1)
    (link,) = late.links()

    def is_congested(connection: transport.Connection) -> bool:
        return connection.peer == "gateway-2" and is_slow

    is_slow = True
    monkeypatch.setattr(transport.Connection, "is_congested", property(is_congested))
    await tokens_of(client, request("a", [1] * 50))
    await until(lambda: agrees(client, engine))
    assert index_of(late).num_entries == 0
    is_slow = False
    number = link.cache_number
    await tokens_of(client, request("b", [2] * 50))
    await until(lambda: agrees(late, engine))
    assert link.cache_number == engine._cache._number > (number or 0) + 1
    await tokens_of(client, request("c", [3] * 50))
    await until(lambda: agrees(late, engine) and agrees(client, engine))
    await late.close()
    assert len(engine._cache._followers) <= 2
    await until(lambda: len(engine._cache._followers) == 1)
    await engine.close()


async def test_who_does_not_route_by_prefix_is_told_nothing(directory: Directory) -> None:
    client = EngineClient(directory, "g", LeastLoaded())
    await client.start()
    engine = await start_engine(directory, "e1", fake_core())
    assert await tokens_of(client, request("r", [1] * 50)) == expected_tokens([1] * 50, 4, 1)
    assert engine._cache._followers == set()
    assert index_of(client).layouts() == set()
    await client.close()
    await engine.close()


def test_what_a_choice_has_found_is_counted() -> None:
    book = StreamBook("g")
    for num_engines, num_hit_tokens in ((1, 0), (3, 0), (3, 64), (2, 32)):
        book.routed("m", num_engines, num_hit_tokens)
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in book.families()
        for sample in family.samples
    }
    assert samples == {
        ("quire:routing_decisions_total", "only"): 1,
        ("quire:routing_decisions_total", "miss"): 1,
        ("quire:routing_decisions_total", "hit"): 2,
        ("quire:routing_hit_tokens_total", None): 96,
    }
