"""Models, health, version, metrics and request ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from prometheus_client.parser import text_string_to_metric_families

import quire
from quire.cluster.api.app import create_app
from quire.cluster.api.health import EngineHealth, ModelHealth, ServiceHealth, health_response
from quire.cluster.metrics import EngineStats, GatewayMetrics, metric_names
from quire.cluster.metrics_exchange import MetricsExchange
from quire.engine.errors import OverloadedError
from quire.engine.outputs import RequestReport, SchedulerStats

MODEL = "smollm2-135m-instruct"
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}
CARD = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "quire", "max_model_len": 1024}


async def test_models(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [CARD]}
    assert (await client.get(f"/v1/models/{MODEL}")).json() == CARD


async def test_health_is_that_of_the_engines(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    engine = {"id": "engine-0", "status": "ok", "problem": None, "num_running": 0, "num_waiting": 2}
    model = {"id": MODEL, "status": "ok", "problem": None, "engines": [engine]}
    response = await client.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "models": [model]})
    backend.unhealthy = "no step for 12 s"
    response = await client.get("/health")
    message = "No engine makes progress. engine-0: no step for 12 s"
    engine |= {"status": "unhealthy", "problem": "no step for 12 s"}
    model |= {"status": "unhealthy", "problem": message}
    error = {"message": message, "type": "server_error", "param": None, "code": "overloaded"}
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json() == {"status": "unhealthy", "models": [model], "error": error}


@pytest.mark.parametrize(
    ("problems", "status", "problem"),
    [
        ({"a": [None], "b": [None, None]}, "ok", None),
        ({"a": [None], "b": [None, "slow"]}, "degraded", "b: An engine makes no progress. b1: slow"),
        ({"a": [None], "b": []}, "degraded", "b: No engine is connected."),
        ({"a": ["x"], "b": []}, "unhealthy", "a: No engine makes progress. a0: x b: No engine is connected."),
        ({"a": []}, "unhealthy", "No engine is connected."),
    ],
)
def test_health_of_several_models(problems: dict[str, list[str | None]], status: str, problem: str | None) -> None:
    """The service is well when all models are, and unhealthy only when none can be served."""
    models = [
        ModelHealth(name, [EngineHealth(f"{name}{i}", said) for i, said in enumerate(engines)])
        for name, engines in problems.items()
    ]
    health = ServiceHealth(models)
    assert (health.status, health.problem) == (status, problem)
    assert ServiceHealth(models, "no directory").status == "unhealthy"


def test_a_model_that_has_been_scaled_to_zero_is_asleep() -> None:
    """Nothing is wrong with it, as long as it has no engine; with others that move, the service is well."""
    asleep, well, lame = ModelHealth("a", is_asleep=True), ModelHealth("b", [EngineHealth("b0")]), ModelHealth("c")
    assert (asleep.status, asleep.problem) == ("asleep", None)
    assert [ServiceHealth(models).status for models in ([asleep], [asleep, well], [asleep, lame])] == [
        "asleep", "ok", "degraded",
    ]  # fmt: skip
    assert ServiceHealth([asleep, lame]).problem == "c: No engine is connected."
    assert ModelHealth("a", [EngineHealth("a0", "stuck")], is_asleep=True).status == "unhealthy"
    assert ModelHealth("a", fault="no tokenizer.json", is_asleep=True).status == "unhealthy"
    response = health_response(ServiceHealth([asleep]))
    told = {"id": "a", "status": "asleep", "problem": None, "engines": []}
    assert (response.status_code, json.loads(response.body)) == (200, {"status": "asleep", "models": [told]})


def test_a_model_whose_tokenizer_is_broken_is_not_healthy() -> None:
    model = ModelHealth("a", [EngineHealth("a0")], fault="no tokenizer.json")
    assert (model.status, model.problem) == ("unhealthy", "no tokenizer.json")


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": quire.__version__}


async def test_the_schema_is_served(client: httpx.AsyncClient) -> None:
    assert "/v1/chat/completions" in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nowhere"])
async def test_every_answer_carries_a_request_id(client: httpx.AsyncClient, path: str) -> None:
    given = await client.get(path, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    drawn = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
    assert len({*drawn}) == 2
    refused = await client.get(path, headers={"x-request-id": "x" * 129})
    assert len(refused.headers["x-request-id"]) == 32


async def test_a_server_that_sets_request_ids_itself_is_left_to_it(backend: FakeBackend) -> None:
    transport = httpx.ASGITransport(create_app(backend, request_ids=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        assert "x-request-id" not in (await client.get("/version")).headers


async def scrape(client: httpx.AsyncClient) -> dict[Any, Any]:
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(response.text)


def samples(text: str) -> dict[Any, Any]:
    """Value by name, or by (name, finish reason)."""
    values: dict[Any, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("quire:")
            reason = sample.labels.get("finished_reason") or sample.labels.get("reason")
            values[(name, reason) if reason else name] = sample.value
    return values


async def test_metrics(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    engine = {
        "num_requests_running": 0,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "num_kv_blocks": 8,
        "num_used_kv_blocks": 2,
        "prompt_tokens_total": 11,
        "generation_tokens_total": 12,
        "num_preemptions_total": 1,
        "prefix_cache_queries_total": 20,
        "prefix_cache_hits_total": 5,
        "prefix_cache_ghost_hits_total": 3,
        "num_evictions_total": 4,
        "num_deadlines_missed_total": 1,
        "num_tokens_waiting": 70,
        ("num_requests_waiting_by_reason", "kv_blocks"): 2,
    }
    assert (await scrape(client)).items() >= engine.items()

    await client.post("/v1/completions", json=COMPLETION)
    await client.post("/v1/completions", json={**COMPLETION, "stream": True, "n": 2, "max_tokens": 100})
    backend.failure = "It failed."
    await client.post("/v1/completions", json=COMPLETION)
    values = await scrape(client)
    num_tokens = len(backend.answer_ids) + 1
    assert values[("request_success_total", "length")] == 1
    assert values[("request_success_total", "stop")] == 2
    assert values[("request_success_total", "error")] == 1
    assert values["time_to_first_token_seconds_count"] == 4
    assert values["inter_token_latency_seconds_count"] == 3 + (num_tokens - 1) + (num_tokens - 2) + 2
    assert values["e2e_request_latency_seconds_count"] == 4
    assert (values["request_prompt_tokens_count"], values["request_prompt_tokens_sum"]) == (3, 12)
    assert (values["request_generation_tokens_count"], values["request_generation_tokens_sum"]) == (
        4,
        4 + num_tokens + (num_tokens - 1) + 3,
    )
    assert (values["request_params_n_sum"], values["request_params_max_tokens_sum"]) == (4, 4 + 100 + 4)
    assert values["request_time_per_output_token_seconds_count"] == 4


async def test_answers_are_counted_by_endpoint_and_status(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await client.post("/v1/completions", json=COMPLETION)
    await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    await client.post("/v1/completions", json={})
    backend.refusal = OverloadedError("Full.")
    await client.post("/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "a"}]})
    for path in ("/v1/models/a", "/v1/models/b", "/nowhere", "/no/where"):
        await client.get(path)
    await client.request("BREW", "/v1/completions")
    text = (await client.get("/metrics")).text
    counted = {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "quire:http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "POST", "200"): 2,
        ("/v1/completions", "POST", "400"): 1,
        ("/v1/completions", "other", "405"): 1,
        ("/v1/chat/completions", "POST", "503"): 1,
        ("/v1/models/{model}", "GET", "404"): 2,
        ("other", "GET", "404"): 2,
    }


async def test_waiting_is_summed_by_cause(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.report = RequestReport(wall_s=3.0, compute_s=0.5, wait_s={"kv_blocks": 2.0, "token_budget": 0.5})
    await client.post("/v1/completions", json={**COMPLETION, "n": 2})
    await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    text = (await client.get("/metrics")).text
    labels = f'gateway="gateway",model_name="{MODEL}"'
    assert f'quire:request_wait_seconds_total{{cause="kv_blocks",{labels}}} 6.0' in text
    assert f'quire:request_wait_seconds_total{{cause="token_budget",{labels}}} 1.5' in text
    assert f"quire:request_queue_time_seconds_sum{{{labels}}} 7.5" in text
    assert f"quire:request_inference_time_seconds_sum{{{labels}}} 1.5" in text


def test_latencies_are_exact_by_the_clock_that_is_given() -> None:
    now = 100.0
    metrics = GatewayMetrics("g1", clock=lambda: now)
    request = metrics.start("m", 2)
    now = 100.5
    request.tokens(0, 1)
    now = 101.0
    request.tokens(1, 1)
    now = 101.5
    request.tokens(0, 2)  # two tokens, half a second each
    request.ended(0, "stop")
    values = samples(metrics.render([]).decode())
    assert values["time_to_first_token_seconds_sum"] == 1.5
    assert (values["inter_token_latency_seconds_count"], values["inter_token_latency_seconds_sum"]) == (2, 1.0)
    assert values["e2e_request_latency_seconds_sum"] == 1.5


def test_series_say_whose_they_are() -> None:
    metrics = GatewayMetrics("g1")
    metrics.start("m", 1).ended(0, "stop")
    engines = [EngineStats(name, "m", SchedulerStats(num_running=i)) for i, name in enumerate(("e1", "e2"))]
    text = metrics.render(engines).decode()
    assert 'quire:num_requests_running{engine="e1",model_name="m"} 0.0' in text
    assert 'quire:num_requests_running{engine="e2",model_name="m"} 1.0' in text
    assert 'quire:request_success_total{finished_reason="stop",gateway="g1",model_name="m"} 1.0' in text


def test_every_name_is_known_in_one_place() -> None:
    """Dashboards are checked against it."""
    metrics = GatewayMetrics("g1")
    request = metrics.start("m", 1)
    request.tokens(0, 2)
    request.reported(RequestReport(wall_s=1.0, compute_s=0.5, wait_s={"kv_blocks": 0.5}))
    request.ended(0, "stop")
    metrics.answered("/v1/completions", "POST", 200)
    metrics.streams.moved("m", "lost")
    metrics.streams.routed("m", 2, 16)
    metrics.streams.resumed_by_client(remembered=True)
    stats = SchedulerStats(num_waiting=1, num_waiting_by_cause={"KV_BLOCKS": 1}, num_recoveries={"died": 1})
    shown = {
        sample.name
        for family in text_string_to_metric_families(metrics.render([EngineStats("e", "m", stats)]).decode())
        for sample in family.samples
    }
    assert shown == metric_names()
    assert {"quire:time_to_first_token_seconds_bucket", "quire:prompt_tokens_total"} <= shown


class _Store(dict[str, bytes]):
    """The part of a key-value store that the exchange uses."""

    def put(self, key: str, value: bytes, *, overwrite: bool) -> None:
        self[key] = value

    def keys(self, prefix: str) -> list[str]:  # type: ignore[override]
        return [key for key in list(self) if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        self.pop(key, None)


async def test_a_gateway_of_another_version_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = _Store({"app/metrics/g0": b"\xc1", "app/metrics/g2": b"\x92\xa1x\x90", "app/metrics/g3": b""})
    gateways = {name: GatewayMetrics(name) for name in ("g1", "g4")}
    exchanges = [
        MetricsExchange(store, "app", name, g.families, lambda f, g=g: setattr(g, "others", f), clock=lambda: 1000.0)  # type: ignore[misc]
        for name, g in gateways.items()
    ]
    gateways["g4"].start("m", 1).ended(0, "stop")
    for _ in range(3):
        for exchange in exchanges:
            await exchange.round()
    assert 'gateway="g4"' in gateways["g1"].render([]).decode()
    told = [record.getMessage() for record in caplog.records]
    assert [message.split()[3] for message in told] == [f"app/metrics/g{i}" for i in (0, 2, 3)] * 2  # once by each


async def test_any_gateway_tells_the_numbers_of_all() -> None:
    store, now = _Store(), 1000.0
    gateways = [GatewayMetrics(f"g{i}") for i in range(3)]
    exchanges = [
        MetricsExchange(store, "app", f"g{i}", g.families, lambda f, g=g: setattr(g, "others", f), clock=lambda: now)  # type: ignore[misc]
        for i, g in enumerate(gateways)
    ]
    for i, gateway in enumerate(gateways):
        for _ in range(i + 1):
            gateway.start("m", 1).ended(0, "stop")
    for exchange in (*exchanges, *exchanges):
        await exchange.round()
    engines = [EngineStats("e1", "m", SchedulerStats(num_generation_tokens=7))]
    texts = [gateway.render(engines).decode() for gateway in gateways]
    assert len({frozenset(text.splitlines()) for text in texts}) == 1
    for i in range(3):
        label = f'finished_reason="stop",gateway="g{i}",model_name="m"'
        assert f"quire:request_success_total{{{label}}} {i + 1}.0" in texts[0]
    assert texts[0].count("quire:generation_tokens_total{") == 1
    assert texts[0].count("# TYPE quire:request_success_total") == 1
    list(text_string_to_metric_families(texts[0]))

    await exchanges[2].end()
    now += 10
    await exchanges[0].round()
    assert 'gateway="g2"' not in gateways[0].render([]).decode()
    assert 'gateway="g1"' in gateways[0].render([]).decode()
    now += 15  # the second one has not been heard of for 25 s
    await exchanges[0].round()
    assert 'gateway="g1"' not in gateways[0].render([]).decode()
    assert list(store) == ["app/metrics/g0"]
