"""Gateways and engines over TCP, without Ray: streams, aborts, refusals, and what happens when an engine is lost."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from itertools import pairwise

import msgspec
import pytest
from fakes import MODEL, DictStore, PacedExecutor, expected_tokens, fake_core, make_core, start_engine, until

from quire.cluster import directory as directory_module
from quire.cluster import engine_links, engine_server, recalls, transport
from quire.cluster.directory import LEASE_S, Directory, EngineRecord, Lease, Registration
from quire.cluster.engine_client import EngineClient
from quire.cluster.engine_server import EngineServer
from quire.cluster.gateway import EngineBackend
from quire.cluster.messages import Abort, encoder
from quire.cluster.router import LeastLoaded, PrefixAffinity
from quire.cluster.served_models import ServedModels
from quire.cluster.stream_metrics import StreamBook
from quire.engine.config import ModelConfig, ParallelConfig
from quire.engine.errors import EngineError, InvalidRequestError, OverloadedError, TenantShareError
from quire.engine.outputs import EngineOutput, EngineRequest, ModelRunnerOutput, ResumeTag, SchedulerOutput
from quire.engine.sampling_params import SamplingParams


@pytest.fixture
def directory() -> Directory:
    return Directory(DictStore(), "app")


@pytest.fixture
async def client(directory: Directory) -> AsyncIterator[EngineClient]:
    client = EngineClient(directory, "gateway-1", LeastLoaded(), failover_timeout_s=5.0)
    await client.start()
    yield client
    await client.close()


def request(request_id: str, max_tokens: int = 20, seed: int = 3) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=[1, 2, 3], sampling_params=params, seed=seed)


def expected(max_tokens: int = 20, seed: int = 3) -> list[int]:
    return expected_tokens([1, 2, 3], max_tokens, seed)


async def collect(client: EngineClient, *requests: EngineRequest) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    async for outputs in client.generate(MODEL, requests):
        for output in outputs:
            assert output.first_index == len(tokens[output.request_id])
            tokens[output.request_id] += output.new_token_ids
    return tokens


async def fill(engine: EngineServer, num_tokens: int) -> None:
    """Occupy an engine with one row and one place in its queue."""
    engine._engine.add(request("x0", num_tokens))
    await until(lambda: engine.load().stats.num_running == 1)
    engine._engine.add(request("x1", num_tokens))
    await until(lambda: engine.load().stats.num_waiting == 1)


def is_idle(engine: EngineServer) -> bool:
    stats = engine.load().stats
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def test_streams_are_those_of_the_model(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1")
    requests = [request(f"r{i}", max_tokens=5 + i, seed=i) for i in range(10)]
    results = await asyncio.gather(*(collect(client, r) for r in requests))
    assert results == [{f"r{i}": expected(5 + i, i)} for i in range(10)]
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_a_step_is_sent_before_the_next_one_is_planned(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, log = fake_core(), []
    step = core.step

    def logged() -> list[EngineOutput]:
        log.append("planned")
        outputs = step()
        if outputs:
            log.append("computed")
        return outputs

    def sent(target: socket.socket, data: bytes) -> int:
        if threading.current_thread().name == "engine-loop":
            log.append("sent")
        return send_now(target, data)

    send_now = transport._send_now
    monkeypatch.setattr(transport, "_send_now", sent)
    core.step = logged
    engine = await start_engine(directory, "e1", core)
    assert await collect(client, request("r")) == {"r": expected()}
    await engine.close()
    after = [later for earlier, later in pairwise(log) if earlier == "computed"]
    assert after == ["sent"] * 20


async def test_a_request_waits_for_the_first_engine(directory: Directory, client: EngineClient) -> None:
    stream = asyncio.create_task(collect(client, request("r")))
    await asyncio.sleep(0)
    engine = await start_engine(directory, "e1")
    assert await stream == {"r": expected()}
    await engine.close()


async def test_an_abandoned_stream_is_aborted(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005))
    stream = client.generate(MODEL, [request("a", 500), request("b", 500)])
    await anext(stream)
    assert not is_idle(engine)
    await stream.aclose()
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_a_tenant_over_its_share_is_told_so(directory: Directory, client: EngineClient) -> None:
    """Not that the service is full: the kind of a refusal travels."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.02, max_num_seqs=1, max_queued_requests=2))
    await until(lambda: bool(client.links()))

    def asked_by(tenant: str, i: int) -> EngineRequest:
        return msgspec.structs.replace(request(f"{tenant}{i}", 300), tenant=tenant)

    streams = [client.generate(MODEL, [asked_by(tenant, i)]) for i, tenant in enumerate("aab")]
    running = [asyncio.create_task(anext(stream)) for stream in streams]
    await until(lambda: engine.load().stats.num_running + engine.load().stats.num_waiting == 3)
    with pytest.raises(TenantShareError, match="Try again in"):
        await collect(client, asked_by("a", 7))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_an_abort_that_wants_a_report_gets_it(directory: Directory, client: EngineClient) -> None:
    """The generator goes on until the engine has told where the time went, or until the engine is lost."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.002))
    last: dict[str, EngineOutput] = {}
    stream = client.generate(MODEL, [request("a", 500), request("b", 500)])
    await anext(stream)
    client.abort(["a"], report=True)
    client.abort(["b"])
    async for outputs in stream:
        last |= {output.request_id: output for output in outputs}
    assert last.keys() == {"a"}
    assert (last["a"].finish_reason, last["a"].report is not None) == ("abort", True)
    await until(lambda: is_idle(engine) and not engine._owners)

    late: list[str] = []
    client._on_late_report = lambda model, report: late.append(model)
    stream = client.generate(MODEL, [request("d", 500)])
    await anext(stream)
    client.abort(["d"], report=True)
    await stream.aclose()  # nobody waits, and the report is counted all the same
    await until(lambda: late == [MODEL] and is_idle(engine) and not engine._owners)
    assert not client._streams

    engine._engine.abort = lambda request_ids: None  # type: ignore[method-assign]
    stream = client.generate(MODEL, [request("c", 500)])
    await anext(stream)
    client.abort(["c"], report=True)
    await engine.close()
    async with asyncio.timeout(5):
        assert not [o for outputs in [each async for each in stream] for o in outputs if o.finish_reason]


async def test_abort_ends_one_of_several(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.002))
    seen: dict[str, int] = {"a": 0, "b": 0}
    async for outputs in client.generate(MODEL, [request("a", 500), request("b", 30)]):
        for output in outputs:
            seen[output.request_id] += len(output.new_token_ids)
        if seen["a"]:
            client.abort(["a", "unknown"])
    assert seen["b"] == 30
    assert seen["a"] < 500
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_a_lost_gateway_frees_its_work(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005))
    stream = client.generate(MODEL, [request("a", 500)])
    await anext(stream)
    (link,) = client.links()
    assert link.connection is not None
    assert link.connection._transport is not None
    link.connection._transport.abort()
    await until(lambda: is_idle(engine))
    assert (await anext(stream))[0].first_index > 0  # it came back and resumed
    await stream.aclose()
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_streams_survive_the_loss_of_their_engine(directory: Directory, client: EngineClient) -> None:
    first = await start_engine(directory, "e1", fake_core(step_s=0.005))
    streams = [asyncio.create_task(collect(client, request(f"r{i}", 60, seed=i))) for i in range(6)]
    await until(lambda: first.load().stats.num_generation_tokens > 60)
    second = await start_engine(directory, "e2", fake_core())
    await first.close()
    assert await asyncio.gather(*streams) == [{f"r{i}": expected(60, seed=i)} for i in range(6)]
    await until(lambda: directory.engine_ids() == ["e2"])  # whoever finds nobody at home removes the entry
    await until(lambda: is_idle(second))
    await second.close()


async def test_a_request_that_an_engine_meets_at_its_end_goes_elsewhere(
    directory: Directory, client: EngineClient
) -> None:
    """It waits for the end of a step, and the step is the one in which the core fails."""
    in_step, may_fail = threading.Event(), threading.Event()

    class Failing(PacedExecutor):
        def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
            in_step.set()
            may_fail.wait()
            raise AssertionError("a broken invariant")

    first = await start_engine(directory, "e1", make_core(Failing(), max_num_seqs=4))
    streams = [asyncio.create_task(collect(client, request("r0")))]
    await asyncio.to_thread(in_step.wait)
    streams.append(asyncio.create_task(collect(client, request("r1"))))
    await until(lambda: "r1" in first._owners)
    may_fail.set()
    assert "invariant" in str(await first.failed)
    await asyncio.sleep(0.1)  # whatever it says to its gateway now has arrived
    second = await start_engine(directory, "e2")
    await first.close()
    assert await asyncio.gather(*streams) == [{"r0": expected()}, {"r1": expected()}]
    await second.close()


@pytest.mark.parametrize("problem", [transport.TransportError("no handshake in time"), TimeoutError()])
async def test_an_engine_that_cannot_be_reached_stays_and_is_tried_again(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    monkeypatch.setattr(engine_links, "RECONNECT_S", 0.01)
    connect, num_attempts = transport.connect, 0

    async def at_the_third_attempt(*arguments: object) -> transport.Connection:
        nonlocal num_attempts
        num_attempts += 1
        assert directory.engine_ids() == ["e1"]
        if num_attempts < 3:
            raise problem
        return await connect(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "connect", at_the_third_attempt)
    engine = await start_engine(directory, "e1")
    client = EngineClient(directory, "gateway-1", LeastLoaded())
    await client.start()
    assert await collect(client, request("r")) == {"r": expected()}
    assert num_attempts == 3
    await client.close()
    await engine.close()


async def test_another_engine_at_the_address_is_not_taken_for_the_one_that_left(
    directory: Directory, client: EngineClient
) -> None:
    engine = await start_engine(directory, "e2")
    record = directory.get("e2")
    assert record is not None
    directory.register(EngineRecord(engine_id="e1", model=MODEL, host=record.host, port=record.port, max_model_len=800))
    await until(lambda: directory.engine_ids() == ["e2"] and len(client.links()) == 1)
    assert client.links()[0].record == record
    await engine.close()


async def test_an_engine_writes_its_entry_again_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "REGISTER_S", 0.02)
    directory = Directory(DictStore(), "app")
    record = EngineRecord(engine_id="e1", model=MODEL, host="h", port=1, max_model_len=800)
    registration = Registration(directory, record)
    await registration.start()
    assert directory.get("e1") == record
    directory.remove("e1")  # by a gateway that could not reach it
    await until(lambda: directory.engine_ids() == ["e1"])
    renewed = directory.get("e1")
    assert renewed == msgspec.structs.replace(record, renewal=renewed.renewal)
    await until(lambda: directory.get("e1").renewal > renewed.renewal > 0)
    await registration.end()
    await asyncio.sleep(0.1)
    assert directory.engine_ids() == []


def test_a_lease_is_counted_by_its_observer_alone() -> None:
    now = 1000.0
    lease = Lease(lambda: now)
    assert not lease.has_run_out(7)
    now += LEASE_S
    assert not lease.has_run_out(7)
    assert not lease.has_run_out(8)  # renewed, however late
    now += LEASE_S
    assert not lease.has_run_out(8)
    now += 0.1
    assert lease.has_run_out(8)
    assert not lease.has_run_out(1)  # another count is news, whichever it is


async def test_the_entry_of_an_engine_that_vanished_without_a_word_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address takes connections and says nothing, as a machine does that has stopped."""
    for module, name, seconds in (
        (transport, "HANDSHAKE_TIMEOUT_S", 0.02),
        (engine_links, "RECONNECT_S", 0.01),
        (engine_links, "MAX_RECONNECT_S", 0.05),
        (directory_module, "LEASE_S", 0.3),
    ):
        monkeypatch.setattr(module, name, seconds)
    directory = Directory(DictStore(), "app")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        record = EngineRecord(engine_id="e1", model=MODEL, host="127.0.0.1", port=port, max_model_len=800)
        directory.register(record)
        client = EngineClient(directory, "gateway-1", LeastLoaded())
        started = time.monotonic()
        await client.start()
        await until(lambda: directory.engine_ids() == [])
        assert time.monotonic() - started > 0.3
        await client.close()


async def test_a_look_into_the_directory_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_links, "POLL_S", 0.01)
    store = DictStore()
    directory = Directory(store, "app")
    client = EngineClient(directory, "gateway-1", LeastLoaded())
    backend = EngineBackend(client, ServedModels([ModelConfig(served_model_name=MODEL)]))
    await client.start()
    engine = await start_engine(directory, "e1")
    await until(lambda: len(client.links()) == 1)
    assert backend.health().status == "ok"

    def fails(prefix: str) -> list[str]:
        raise RuntimeError("an error that nobody expected")

    monkeypatch.setattr(store, "keys", fails)
    await until(lambda: client.problem() is not None)
    assert backend.health().status == "unhealthy"
    assert re.match(r"New engines are not noticed: .*an error that nobody expected", str(backend.health().problem))
    monkeypatch.undo()
    await until(lambda: client.problem() is None)
    second = await start_engine(directory, "e2")
    await until(lambda: len(client.links()) == 2)
    (model,) = backend.health().models
    assert [engine.id for engine in model.engines] == ["e1", "e2"]
    await client.close()
    assert "the directory of engines is not followed" in str(backend.health().problem)
    await engine.close()
    await second.close()


async def test_with_no_engine_the_error_says_so(directory: Directory) -> None:
    """As one that may try again: an engine may be starting, and the request has not begun."""
    asked: list[str] = []
    client = EngineClient(directory, "g", LeastLoaded(), failover_timeout_s=0.05, on_waiting=asked.append)
    await client.start()
    with pytest.raises(OverloadedError, match=r"No engine was available for this request within 0.05 s") as refused:
        await collect(client, request("r"))
    assert refused.value.retry_after_s == 10.0
    assert asked == [MODEL]
    await client.close()


async def test_only_so_many_requests_wait_for_a_first_engine(directory: Directory) -> None:
    client = EngineClient(directory, "g", LeastLoaded(), max_waiting_requests=2)
    await client.start()
    waiting = [asyncio.create_task(collect(client, request(f"r{i}"))) for i in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="2 requests wait for an engine already"):
        await collect(client, request("one-too-many"))
    engine = await start_engine(directory, "e1")
    assert await asyncio.gather(*waiting) == [{f"r{i}": expected()} for i in range(2)]
    await client.close()
    await engine.close()


async def test_an_engine_of_another_model_is_not_asked(directory: Directory) -> None:
    client = EngineClient(directory, "g", LeastLoaded(), failover_timeout_s=0.4)
    other = await start_engine(directory, "e1", model="other")
    await client.start()
    await until(lambda: len(client.links()) == 1)
    with pytest.raises(OverloadedError, match="No engine was available"):
        await collect(client, request("r"))
    await client.close()
    await other.close()


async def test_health_tells_models_apart(directory: Directory, client: EngineClient) -> None:
    configs = [ModelConfig(served_model_name=name) for name in ("a", "b")]
    backend = EngineBackend(client, ServedModels(configs))
    engine = await start_engine(directory, "e1", model="b")
    await until(lambda: len(client.links()) == 1)
    health = backend.health()
    assert [(model.id, model.status) for model in health.models] == [("a", "unhealthy"), ("b", "ok")]
    assert (health.status, health.problem) == ("degraded", "a: No engine is connected.")
    await engine.close()


async def test_a_request_that_keeps_losing_its_engine_is_given_up(directory: Directory, client: EngineClient) -> None:
    stream = asyncio.create_task(collect(client, request("r")))
    for i in range(3):
        engine = await start_engine(directory, f"e{i}", fake_core(step_s=0.5))
        await until(lambda engine=engine: engine._owners != {})
        for gateway in list(engine._gateways):
            assert gateway._transport is not None
            gateway._transport.abort()
        directory.remove(f"e{i}")
        engine._server.close()
        await engine.close()
    with pytest.raises(EngineError, match="3 engines in a row were lost"):
        await stream


async def test_bystanders_of_a_request_that_kills_engines_go_on(directory: Directory, client: EngineClient) -> None:
    """Whoever has "poison" in its hands is lost. The others had no token between two losses, and still survive."""

    def at_its_core(engine: EngineServer) -> bool:
        return any(request_id.startswith("poison") for request_id in engine._owners)

    client._failover_timeout_s = 30.0
    innocent = [asyncio.create_task(collect(client, request(f"r{i}", 8, seed=i))) for i in range(5)]
    poison = asyncio.create_task(collect(client, request("poison")))
    await asyncio.sleep(0)
    for i in range(20):
        engine = await start_engine(directory, f"e{i}", fake_core(step_s=0.1))
        await until(lambda engine=engine: at_its_core(engine) or all(task.done() for task in innocent))
        for gateway in list(engine._gateways):
            assert gateway._transport is not None
            gateway._transport.abort()
        directory.remove(f"e{i}")
        await engine.close()
        if poison.done():
            break
    with pytest.raises(EngineError, match="3 engines in a row were lost"):
        await poison
    last = await start_engine(directory, "last")
    assert await asyncio.gather(*innocent) == [{f"r{i}": expected(8, seed=i)} for i in range(5)]
    await last.close()


async def test_a_large_request_neither_fills_the_buffer_nor_harms_others(
    directory: Directory, client: EngineClient
) -> None:
    """12 choices of 1.5 MB each: sent as the engine reads them, on the one connection that it started with."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005, max_queued_requests=None))
    await until(lambda: len(client.links()) == 1)
    (link,) = client.links()
    others = [asyncio.create_task(collect(client, request(f"r{i}", 100, seed=i))) for i in range(3)]
    large = [msgspec.structs.replace(request(f"x{i}", 2), tenant="t" * 1_500_000) for i in range(12)]
    sending = asyncio.create_task(collect(client, *large))
    most = 0
    while not sending.done():
        assert link.connection is not None
        assert link.connection._transport is not None
        most = max(most, link.connection._transport.get_write_buffer_size())
        await asyncio.sleep(0.001)
    assert most < 4 << 20
    assert await sending == {f"x{i}": expected(2) for i in range(12)}
    assert await asyncio.gather(*others) == [{f"r{i}": expected(100, seed=i)} for i in range(3)]
    assert client.links() == [link]
    await engine.close()


async def test_outputs_that_no_frame_holds_end_their_own_request_only(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many outputs of a step travel in several frames; one that is too large alone is an error."""
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 5000)
    engine = await start_engine(directory, "e1", fake_core(step_s=0.01))
    await until(lambda: client.links() != [])
    bystanders = [asyncio.create_task(collect(client, request(f"r{i}", 40))) for i in range(3)]
    await until(lambda: engine.load().stats.num_generation_tokens > 3)

    def scored(request_id: str, num_tokens: int, prompt_logprobs: int = 1) -> EngineRequest:
        params = SamplingParams(max_tokens=30, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        return EngineRequest(request_id=request_id, prompt_token_ids=[1] * num_tokens, sampling_params=params, seed=3)

    whole = [asyncio.create_task(collect(client, scored(f"s{i}", 200))) for i in range(4)]
    with pytest.raises(EngineError, match="more than the 5000 that can be sent") as refused:
        await collect_or_raise(client, scored("large", 790))
    assert "prompt_logprobs" in refused.value.message
    assert [tokens for stream in await asyncio.gather(*bystanders) for tokens in stream.values()] == [expected(40)] * 3
    assert [len(tokens) for stream in await asyncio.gather(*whole) for tokens in stream.values()] == [30] * 4
    assert engine._owners == {}
    await until(lambda: is_idle(engine))
    await engine.close()


async def collect_or_raise(client: EngineClient, one: EngineRequest) -> None:
    async for outputs in client.generate(MODEL, [one]):
        for output in outputs:
            if output.finish_reason == "error":
                assert output.refusal is not None
                assert output.refusal.param == "prompt_logprobs"
                raise EngineError(output.error or "")


async def test_refusals_keep_their_type(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.02, max_num_seqs=1, max_queued_requests=1))
    too_long = EngineRequest(
        request_id="long", prompt_token_ids=[1] * 900, sampling_params=SamplingParams(max_tokens=5), seed=0
    )
    with pytest.raises(InvalidRequestError):
        await collect(client, too_long)
    streams = [client.generate(MODEL, [request(f"r{i}", 500)]) for i in range(1)]
    await anext(streams[0])
    waiting = asyncio.create_task(collect(client, request("w", 5)))
    await until(lambda: engine.load().stats.num_waiting == 1)
    with pytest.raises(OverloadedError) as refused:
        await collect(client, request("x", 5))
    assert refused.value.retry_after_s > 0
    await streams[0].aclose()
    assert await waiting == {"w": expected(5)}
    await engine.close()


async def test_a_call_of_more_streams_than_the_queue_holds(directory: Directory, client: EngineClient) -> None:
    """It could never be taken at once. Its first stream decides whether it is refused, and the others wait."""
    client._failover_timeout_s = 0.3
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005, max_num_seqs=1, max_queued_requests=1))
    many = [request(f"r{i}", 40) for i in range(8)]
    assert await collect(client, *many) == {each.request_id: expected(40) for each in many}
    await fill(engine, 100)
    with pytest.raises(OverloadedError):
        await collect(client, *many)
    await until(lambda: is_idle(engine))
    await engine.close()


async def test_a_stream_that_lost_its_engine_waits_for_room_at_a_full_one(
    directory: Directory, client: EngineClient
) -> None:
    """Whether it had a token or not: its client has been told that the request is accepted."""
    first = await start_engine(directory, "e1", fake_core(step_s=0.02, max_num_seqs=1))
    begun = asyncio.create_task(collect(client, request("begun", 30)))
    waiting = asyncio.create_task(collect(client, request("waiting", 30)))
    await until(lambda: first.load().stats.num_generation_tokens > 3)
    full = await start_engine(directory, "e2", fake_core(step_s=0.01, max_num_seqs=1, max_queued_requests=1))
    await until(lambda: len(client.links()) == 2)
    await fill(full, 100)
    await first.close()
    assert await asyncio.gather(begun, waiting) == [{"begun": expected(30)}, {"waiting": expected(30)}]
    await until(lambda: is_idle(full))
    await full.close()


async def test_a_stream_that_finds_no_room_in_time_says_why(directory: Directory, client: EngineClient) -> None:
    client._failover_timeout_s = 0.6
    first = await start_engine(directory, "e1", fake_core(step_s=0.02, max_num_seqs=1))
    begun = asyncio.create_task(collect(client, request("begun", 100)))
    waiting = asyncio.create_task(collect(client, request("waiting")))
    await until(lambda: first.load().stats.num_generation_tokens > 3)
    full = await start_engine(directory, "e2", fake_core(step_s=0.05, max_num_seqs=1, max_queued_requests=1))
    await until(lambda: len(client.links()) == 2)
    await fill(full, 500)
    await first.close()
    with pytest.raises(OverloadedError):
        await waiting
    begun.cancel()
    await full.close()


async def test_a_request_goes_to_engines_that_can_hold_it(directory: Directory) -> None:
    """Also when it has lost its engine and a smaller one has no other work."""
    seen: list[list[int]] = []
    client = EngineClient(
        directory, "g", LeastLoaded(), on_engines=lambda records: seen.append([r.max_model_len for r in records])
    )
    await client.start()
    large = await start_engine(directory, "e1", fake_core(step_s=0.005, max_model_len=400))
    small = await start_engine(directory, "e2", fake_core(max_model_len=100))
    await until(lambda: len(client.links()) == 2)
    stream = asyncio.create_task(collect(client, request("r", 200)))
    await until(lambda: large.load().stats.num_generation_tokens > 3)
    await large.close()
    await until(lambda: len(client.links()) == 1)
    assert await collect(client, request("short", 97)) == {"short": expected(97)}
    assert not stream.done()
    another = await start_engine(directory, "e3", fake_core(max_model_len=400))
    assert await stream == {"r": expected(200)}
    assert seen[-3:] == [[400, 100], [100], [100, 400]]
    await client.close()
    await small.close()
    await another.close()


async def test_a_deadline_goes_on_when_the_engine_is_lost(directory: Directory, client: EngineClient) -> None:
    stream = client.generate(MODEL, [msgspec.structs.replace(request("r", 700), deadline_ms=1500)])
    first = await start_engine(directory, "e1", fake_core(step_s=0.02))
    started = time.monotonic()
    await anext(stream)
    await asyncio.sleep(0.75)
    second = await start_engine(directory, "e2", fake_core(step_s=0.02))
    await first.close()
    last = [output async for outputs in stream for output in outputs][-1]
    assert last.finish_reason == "deadline"
    assert time.monotonic() - started < 2.25  # what it would be from there on
    await until(lambda: is_idle(second))
    await second.close()


async def test_fifty_open_and_close_cycles_leave_nothing(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.001))
    for i in range(50):
        stream = client.generate(MODEL, [request(f"r{i}", 500)])
        await anext(stream)
        await stream.aclose()
    await until(lambda: is_idle(engine))
    assert engine._owners == {}
    assert client.links()[0].streams == {}
    await engine.close()


async def test_repeats_are_dropped_and_a_gap_is_an_error(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=1.0))
    await until(lambda: len(client.links()) == 1)
    stream = client.generate(MODEL, [request("r")])
    pending = asyncio.create_task(anext(stream))
    await until(lambda: client.links()[0].streams != {})
    link = client.links()[0]
    client._on_output(link, EngineOutput("r", 0, [7, 8]))
    client._on_output(link, EngineOutput("r", 1, [8, 9]))
    client._on_output(link, EngineOutput("r", 0, [7]))
    assert await pending == [EngineOutput("r", 0, [7, 8]), EngineOutput("r", 2, [9])]
    client._on_output(link, EngineOutput("r", 5, [1]))
    with pytest.raises(EngineError, match="Tokens 3 to 4 of request r never arrived"):
        await anext(stream)
    await engine.close()


async def test_a_stalled_step_is_a_problem(directory: Directory) -> None:
    server = EngineServer(fake_core(step_s=0.3), "e", directory.secret(), ParallelConfig(step_timeout_s=0.05))
    await server.start("127.0.0.1")
    assert server.problem() is None
    server._engine.add(request("r", 2))
    await until(lambda: server.problem() is not None)
    assert "more than 0.05 s" in (server.problem() or "")
    await until(lambda: server.problem() is None)
    await server.close()
    assert server.problem() == "the engine's step loop has ended"


async def test_an_engine_that_makes_no_progress_gets_a_request_only_where_no_other_is(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little else it has to do. It may also get one that has lost its engine."""
    monkeypatch.setattr(engine_server, "REPORT_S", 0.01)
    stuck, busy = [await start_engine(directory, f"e{i}", fake_core(step_s=0.005)) for i in range(2)]
    await until(lambda: len(client.links()) == 2)
    monkeypatch.setattr(stuck, "problem", lambda: "the step under way has taken 9 s, more than 5 s")
    await until(lambda: client.links()[0].problem is not None)
    streams = [asyncio.create_task(collect(client, request(f"r{i}", 200, seed=i))) for i in range(4)]
    await until(lambda: len(busy._owners) == 4)
    assert stuck._owners == {}
    directory.remove("e1")
    await busy.close()
    assert await asyncio.gather(*streams) == [{f"r{i}": expected(200, seed=i)} for i in range(4)]
    assert stuck.load().stats.num_generation_tokens > 0
    await stuck.close()


@pytest.mark.parametrize(("startup_timeout_s", "healthy"), [(60.0, True), (0.05, False)])
async def test_rebuilding_the_ranks_may_take_as_long_as_starting_them(
    directory: Directory, startup_timeout_s: float, healthy: bool
) -> None:
    restarting, go_on = threading.Event(), threading.Event()

    class SlowRestart(PacedExecutor):
        def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
            self._fail_steps = {0}
            return super().execute(step)

        def restart(self) -> None:
            restarting.set()
            assert go_on.wait(10)
            super().restart()

    limits = ParallelConfig(step_timeout_s=0.05, startup_timeout_s=startup_timeout_s)
    server = EngineServer(make_core(SlowRestart()), "e", directory.secret(), limits)
    await server.start("127.0.0.1")
    server._engine.add(request("r", 2))
    await asyncio.to_thread(restarting.wait, 10)
    await asyncio.sleep(0.15)
    assert (server.problem() is None) == healthy
    go_on.set()
    await until(lambda: server.problem() is None)
    await server.close()


def test_the_directory_keeps_records_and_one_secret() -> None:
    store = DictStore()
    directory, other = Directory(store, "a"), Directory(store, "b")
    assert directory.secret() == directory.secret() != other.secret()
    record = EngineRecord(engine_id="e2", model="m", host="h", port=1, max_model_len=2)
    directory.register(record)
    directory.register(EngineRecord(engine_id="e1", model="m", host="h", port=2, max_model_len=2))
    assert directory.engine_ids() == ["e1", "e2"]
    assert other.engine_ids() == []
    assert directory.get("e2") == record
    directory.remove("e2")
    directory.remove("e2")
    assert directory.engine_ids() == ["e1"]
    assert directory.get("e2") is None


async def leave(directory: Directory, engine: EngineServer, grace_s: float = 5.0) -> float:
    """As `Engine.__del__` does. Returns the seconds that it took."""
    started = time.monotonic()
    await engine.leave(grace_s)
    directory.remove(engine._engine_id)
    await engine.close()
    return time.monotonic() - started


async def test_an_engine_that_leaves_hands_its_streams_over(directory: Directory, client: EngineClient) -> None:
    """Running and waiting ones, at once, and no token is computed twice for a client."""
    first = await start_engine(directory, "e1", fake_core(step_s=0.01, max_num_seqs=4))
    streams = [asyncio.create_task(collect(client, request(f"r{i}", 200, seed=i))) for i in range(6)]
    await until(lambda: first.load().stats.num_generation_tokens > 40)
    second = await start_engine(directory, "e2", fake_core())
    await until(lambda: len(client.links()) == 2)
    assert await leave(directory, first) < 1.0
    assert first.load().stats.num_generation_tokens < 6 * 200 / 2
    assert await asyncio.gather(*streams) == [{f"r{i}": expected(200, seed=i)} for i in range(6)]
    await until(lambda: is_idle(second))
    await second.close()


async def test_what_becomes_of_streams_is_counted(directory: Directory) -> None:
    """Where they are sent, that they are handed over or resumed elsewhere, and what clients come back to."""
    book = StreamBook("g")
    client = EngineClient(directory, "g", PrefixAffinity(), book=book)
    await client.start()

    def counted(name: str) -> dict[str | None, float]:
        samples = [sample for family in book.families() for sample in family.samples if sample.name == f"quire:{name}"]
        return {sample.labels.get("cause", sample.labels.get("outcome")): sample.value for sample in samples}

    first = await start_engine(directory, "e1", fake_core(step_s=0.01))
    stream = asyncio.create_task(collect(client, request("r", 100)))
    await until(lambda: first.load().stats.num_generation_tokens > 5)
    second = await start_engine(directory, "e2", fake_core(step_s=0.01))
    await until(lambda: len(client.links()) == 2)
    await leave(directory, first)
    third = await start_engine(directory, "e3")
    await until(lambda: len(client.links()) == 2)
    directory.remove("e2")
    await second.close()
    assert await stream == {"r": expected(100)}
    assert counted("moved_streams_total") == {"handed_over": 1, "lost": 1}
    assert counted("routing_decisions_total") == {"only": 3}
    await collect(client, tagged("t", 1))
    assert [len(await client.recall(key)) for key in (b"k", b"unknown")] == [1, 0]
    assert counted("client_resumes_total") == {"remembered": 1, "forgotten": 1}
    await client.close()
    await third.close()


async def test_an_engine_that_leaves_waits_for_its_successor(directory: Directory, client: EngineClient) -> None:
    """Until then it works on, and takes new requests: nobody else does."""
    first = await start_engine(directory, "e1", fake_core(step_s=0.01))
    stream = asyncio.create_task(collect(client, request("r", 300)))
    await until(lambda: first.load().stats.num_generation_tokens > 5)
    leaving = asyncio.create_task(leave(directory, first))
    await until(lambda: client.links()[0].is_leaving)
    before = first.load().stats.num_generation_tokens
    assert await collect(client, request("new", 10)) == {"new": expected(10)}
    assert first.load().stats.num_generation_tokens > before + 10
    second = await start_engine(directory, "e2", fake_core())
    await leaving
    assert await stream == {"r": expected(300)}
    assert second.load().stats.num_generation_tokens > 100
    await second.close()


async def test_what_a_leaving_engine_drops_at_its_grace_is_no_fault_of_the_streams(
    directory: Directory, client: EngineClient
) -> None:
    """However many engines leave under a stream: it is neither given up nor put on trial."""
    stream = asyncio.create_task(collect(client, request("r", 120)))
    for i in range(5):
        engine = await start_engine(directory, f"e{i}", fake_core(step_s=0.5))
        await until(lambda engine=engine: engine._owners != {})
        assert await leave(directory, engine, grace_s=0.05) < 2.0
    assert client._streams["r"].num_losses == 0
    last = await start_engine(directory, "last")
    assert await stream == {"r": expected(120)}
    await last.close()


async def test_a_gateway_that_comes_late_hears_that_the_engine_leaves(directory: Directory) -> None:
    first = await start_engine(directory, "e1", fake_core(step_s=0.01))
    first._engine.add(request("x", 300))
    first._owners["x"] = None  # type: ignore[assignment]  # somebody's work keeps it there
    leaving = asyncio.create_task(first.leave(5.0))
    await asyncio.sleep(0)
    client = EngineClient(directory, "late", LeastLoaded())
    await client.start()
    await until(lambda: client.links() and client.links()[0].is_leaving)
    second = await start_engine(directory, "e2")
    await until(lambda: len(client.links()) == 2)
    assert await collect(client, request("r")) == {"r": expected()}
    assert second.load().stats.num_generation_tokens == 20
    first._owners.clear()
    await leaving
    await client.close()
    await first.close()
    await second.close()


async def test_handing_over_crosses_choices_and_full_engines(directory: Directory, client: EngineClient) -> None:
    """The successor has one row and no queue: streams that it refuses ask again, and the choices of one call stay one
    call."""
    first = await start_engine(directory, "e1", fake_core(step_s=0.005))
    choices = [msgspec.structs.replace(request(f"r-{i}", 60), choice_index=i) for i in range(4)]
    stream = asyncio.create_task(collect(client, *choices))
    await until(lambda: first.load().stats.num_generation_tokens > 20)
    late = asyncio.create_task(collect(client, request("late", 30)))
    second = await start_engine(directory, "e2", fake_core(max_num_seqs=1, max_queued_requests=1))
    await until(lambda: len(client.links()) == 2)
    assert await leave(directory, first) < 2.0
    assert await stream == {f"r-{i}": expected_tokens([1, 2, 3], 60, 3, i) for i in range(4)}
    assert await late == {"late": expected(30)}
    await until(lambda: is_idle(second))
    await second.close()


def tagged(request_id: str, max_tokens: int, key: bytes = b"k") -> EngineRequest:
    return msgspec.structs.replace(request(request_id, max_tokens), resume_tag=ResumeTag(key, 0, request_id, 1))


async def test_engines_remember_the_streams_of_a_gateway_that_died(directory: Directory, client: EngineClient) -> None:
    """Their work is freed at once, and another gateway goes on with their tokens; also after they had ended."""
    engines = [await start_engine(directory, f"e{i}", fake_core(step_s=0.005)) for i in range(3)]
    dying = EngineClient(directory, "dying", LeastLoaded())
    await dying.start()
    await until(lambda: len(dying.links()) == len(client.links()) == 3)
    stream = dying.generate(MODEL, [tagged("r", 300, b"1")])
    seen = [token for _ in range(5) for output in await anext(stream) for token in output.new_token_ids]
    assert await collect(dying, tagged("ended", 10, b"2")) == {"ended": expected(10)}
    await dying.close()
    await until(lambda: all(is_idle(engine) for engine in engines))
    (point,) = await client.recall(b"1")
    assert (point.tag.answer_id, point.seed) == ("r", 3)
    assert seen == point.token_ids[: len(seen)] == expected(300)[: len(seen)]
    rest = msgspec.structs.replace(tagged("r2", 300, b"1"), resume_token_ids=seen)
    assert seen + [t async for outputs in client.generate(MODEL, [rest]) for o in outputs for t in o.new_token_ids] == (
        expected(300)
    )
    for _ in range(2):  # whoever asks may die before anybody else has them
        assert [point.token_ids for point in await client.recall(b"2")] == [expected(10)]
    assert await client.recall(b"never") == []
    for engine in engines:
        await engine.close()


async def test_engines_forget_requests_that_they_refuse(directory: Directory, client: EngineClient) -> None:
    engine = await start_engine(directory, "e1")
    await until(lambda: client.links() != [])
    refused = msgspec.structs.replace(tagged("r", 20), prompt_token_ids=[1] * 5000)
    with pytest.raises(InvalidRequestError):
        await collect(client, refused)
    assert engine._journal._entries == {}
    await engine.close()


async def test_a_stream_that_still_runs_is_taken_from_its_gateway(directory: Directory, client: EngineClient) -> None:
    """Its client has lost the connection, which the gateway does not know yet."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005))
    other = EngineClient(directory, "other", LeastLoaded())
    await other.start()
    await until(lambda: other.links() != [] and client.links() != [])
    stream = other.generate(MODEL, [tagged("r", 500)])
    await anext(stream)
    (point,) = await client.recall(b"k")
    assert len(point.token_ids) > 0
    last = [output async for outputs in stream for output in outputs][-1]
    assert last.finish_reason == "abort"
    await until(lambda: is_idle(engine))
    await other.close()
    await engine.close()


async def test_a_stream_that_waits_for_an_engine_is_taken_back(directory: Directory, client: EngineClient) -> None:
    """Nobody else remembers it: its engine was lost, and another is not there yet."""
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005))
    await until(lambda: client.links() != [])
    stream = client.generate(MODEL, [tagged("r", 500)])
    seen = [token for output in await anext(stream) for token in output.new_token_ids]
    directory.remove("e1")
    await engine.close()
    await until(lambda: client.waits_for(MODEL))
    assert await client.recall(b"another") == []
    for _ in range(2):  # who asks may be lost before anybody else has it
        (point,) = await client.recall(b"k")
        assert (point.tag.answer_id, point.seed) == ("r", 3)
        assert point.token_ids == expected(500)[: len(point.token_ids)]
        assert len(point.token_ids) >= len(seen)
    outputs = [output async for outputs in stream for output in outputs]
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["abort"]
    assert not client.waits_for(MODEL)
    assert client._streams == {}


async def test_a_client_that_leaves_while_there_is_no_engine_can_come_back(
    directory: Directory, client: EngineClient
) -> None:
    engine = await start_engine(directory, "e1", fake_core(step_s=0.005))
    await until(lambda: client.links() != [])
    stream = client.generate(MODEL, [tagged("r", 500)])
    await anext(stream)
    directory.remove("e1")
    await engine.close()
    await until(lambda: client.waits_for(MODEL))
    await stream.aclose()
    (point,) = await client.recall(b"k")
    rest = msgspec.structs.replace(tagged("r2", 500), resume_token_ids=point.token_ids)
    second = await start_engine(directory, "e2")
    tokens = [t async for outputs in client.generate(MODEL, [rest]) for o in outputs for t in o.new_token_ids]
    assert point.token_ids + tokens == expected(500)
    await second.close()


async def test_an_engine_that_does_not_answer_is_not_waited_for(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recalls, "RECALL_S", 0.1)
    engine, silent = [await start_engine(directory, f"e{i}") for i in range(2)]
    await until(lambda: len(client.links()) == 2)
    assert await collect(client, tagged("r", 10)) == {"r": expected(10)}
    monkeypatch.setattr(silent, "_recall", lambda gateway, key: None)
    monkeypatch.setattr(engine, "_recall", lambda gateway, key: None)
    assert await client.recall(b"k") == []
    monkeypatch.undo()
    asked = asyncio.create_task(client.recall(b"k"))
    assert [point.token_ids for point in await asked] == [expected(10)]
    assert client._recalls._open == {}
    assert await EngineClient(directory, "alone", LeastLoaded()).recall(b"k") == []
    await engine.close()
    await silent.close()


async def test_what_a_gateway_asks_for_waits_until_outputs_are_sent(
    directory: Directory, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads know who owns a request: neither may see what the other has begun."""
    amid, go_on, log = threading.Event(), threading.Event(), []
    send_now = transport._send_now

    def slow(target: socket.socket, data: bytes) -> int:
        if threading.current_thread().name == "engine-loop" and not amid.is_set():
            amid.set()
            go_on.wait(10)
            log.append("sent")
        return send_now(target, data)

    monkeypatch.setattr(transport, "_send_now", slow)
    engine = await start_engine(directory, "e1")
    stream = client.generate(MODEL, [request("r", 500)])
    first = asyncio.create_task(anext(stream))
    await until(amid.is_set)
    (gateway,) = engine._gateways
    timer = threading.Timer(0.2, go_on.set)  # by then the loop waits, or has not waited
    timer.start()
    engine._on_frame(gateway, encoder.encode(Abort(list(engine._owners))))
    log.append("aborted")
    timer.join()
    assert log == ["sent", "aborted"]
    await first
    await stream.aclose()
    await until(lambda: is_idle(engine))
    await engine.close()
