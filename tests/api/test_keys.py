"""API keys: who gets in, as whom, how often; and the file that says so."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from test_errors import COMPLETION, ENDPOINTS, error

from quire.cluster.api.app import create_app
from quire.cluster.api.errors import RateLimitError
from quire.cluster.api.keys import KeyRing, read_key_file
from quire.cluster.api.rate_limits import Bucket
from quire.cluster.api.tenants import Tenant, Terms
from quire.cluster.chaos import add_chaos_route
from quire.engine.errors import ConfigError, OverloadedError
from quire.engine.outputs import EngineOutput, EngineRequest

ANN, BOB, LIMITED = "sk-ann-12345", "sk-bob-12345", "sk-limited-1"
FILE: Any = {
    "tenants": [
        {"name": "ann", "key": ANN, "weight": 2},
        {"name": "bob", "key_sha256": [hashlib.sha256(BOB.encode()).hexdigest()], "tokens_per_minute": 60},
        {"name": "limited", "key": [LIMITED, "sk-limited-2"], "requests_per_minute": 2},
    ]
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps(FILE))
    return path


@pytest.fixture
def keys(path: Path) -> KeyRing:
    return KeyRing(path)


@pytest.fixture
async def guarded(backend: FakeBackend, keys: KeyRing) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend, keys=keys, open_metrics=False), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


async def answers(http: httpx.AsyncClient, key: str) -> httpx.Response:
    return await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 2}, headers=bearer(key))


NO_KEY = error("No API key was given: send it as 'Authorization: Bearer KEY'.")
UNKNOWN = error("The API key is not known here.", code="invalid_api_key")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, NO_KEY),
        ({"authorization": ANN}, NO_KEY),
        ({"authorization": f"Basic {ANN}"}, NO_KEY),
        ({"authorization": "Bearer "}, NO_KEY),
        (bearer("sk-wrong"), UNKNOWN),
        (bearer(ANN[:-1]), UNKNOWN),
        (bearer("x" * 10_000), UNKNOWN),
        (bearer(hashlib.sha256(ANN.encode()).hexdigest()), UNKNOWN),
    ],
)
async def test_who_does_not_get_in(
    guarded: httpx.AsyncClient, backend: FakeBackend, headers: dict[str, str], expected: Any, streamed: bool
) -> None:
    for url, body in [*ENDPOINTS, ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]:
        response = await guarded.post(url, json={**body, "stream": streamed}, headers=headers)
        assert (response.status_code, response.json()) == (401, expected)
        assert response.headers["www-authenticate"] == "Bearer"
    for url in ("/v1/models", "/v1/models/x", "/metrics", "/nowhere"):
        assert (await guarded.get(url, headers=headers)).status_code == 401
    for url in ("/health", "/version", "/openapi.json", "/docs"):
        assert (await guarded.get(url, headers=headers)).status_code == 200
    assert backend.requests == []
    assert (await answers(guarded, ANN)).status_code == 200


async def test_metrics_can_be_open(backend: FakeBackend, keys: KeyRing) -> None:
    transport = httpx.ASGITransport(create_app(backend, keys=keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(("key", "tenant", "weight"), [(ANN, "ann", 2.0), (BOB, "bob", 1.0)])
async def test_a_key_is_a_tenant_with_a_weight(
    guarded: httpx.AsyncClient, backend: FakeBackend, key: str, tenant: str, weight: float
) -> None:
    for url, body in ENDPOINTS:
        response = await guarded.post(url, json={**body, "max_tokens": 2}, headers={"authorization": f"bearer {key}"})
        assert response.status_code == 200
    assert [(each.tenant, each.tenant_weight) for each in backend.requests] == [(tenant, weight)] * 2


async def test_only_an_admin_may_make_faults(backend: FakeBackend, keys: KeyRing, path: Path) -> None:
    def service(keys: KeyRing | None) -> httpx.AsyncClient:
        app = create_app(backend, keys=keys)
        add_chaos_route(app, list, {})
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")

    async def status(http: httpx.AsyncClient, headers: dict[str, str]) -> int:
        return (await http.post("/chaos", json={"fault": "kill-engine"}, headers=headers)).status_code

    operators = {"name": "operators", "key": "sk-operators", "admin": True}
    path.write_text(json.dumps({"tenants": [*FILE["tenants"], operators]}))
    await keys.refresh()
    async with service(keys) as http:
        assert await status(http, {}) == 401
        refused = await http.post("/chaos", json={"fault": "kill-engine"}, headers=bearer(ANN))
        message = "Faults touch every tenant: they need a key with 'admin: true' in the keys file."
        assert (refused.status_code, refused.json()) == (403, error(message, code="permission_denied"))
        assert await status(http, bearer(BOB)) == 403
        assert await status(http, bearer("sk-operators")) == 503  # there is no engine to do it to
        path.write_text(json.dumps({"tenants": [*FILE["tenants"], {**operators, "admin": False}]}))
        await keys.refresh()
        assert await status(http, bearer("sk-operators")) == 403
    async with service(None) as http:
        assert await status(http, {}) == 503


async def test_without_keys_everybody_is_one_tenant(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    response = await client.post("/v1/completions", json=COMPLETION, headers=bearer("anything"))
    assert response.json()["choices"][0]["text"] == DEFAULT_ANSWER
    assert backend.requests[0].tenant == ""


@pytest.mark.parametrize("streamed", [False, True])
async def test_requests_per_minute(guarded: httpx.AsyncClient, streamed: bool) -> None:
    """Both keys of a tenant count; a request that is refused for another reason counts; one over the limit does not."""
    assert (await answers(guarded, LIMITED)).status_code == 200
    bad = await guarded.post("/v1/completions", json={}, headers=bearer("sk-limited-2"))
    assert bad.status_code == 400
    for _ in range(3):
        body = {**COMPLETION, "stream": streamed}
        response = await guarded.post("/v1/completions", json=body, headers=bearer(LIMITED))
        assert response.status_code == 429
        detail = response.json()["error"]
        assert (detail["type"], detail["code"]) == ("requests", "rate_limit_exceeded")
        assert detail["message"].startswith(
            "Rate limit reached: 'limited' may use 2 requests per minute. Try again in "
        )
        assert 28 <= int(response.headers["retry-after"]) <= 30
    assert (await guarded.get("/v1/models", headers=bearer(LIMITED))).status_code == 200
    assert (await answers(guarded, ANN)).status_code == 200


async def test_tokens_per_minute_are_counted_as_they_are_used(
    guarded: httpx.AsyncClient, backend: FakeBackend, keys: KeyRing
) -> None:
    """60 tokens: the first request takes 4 + 2 * (14 + 1) of a prompt and two answers, the next more than is left."""
    tenant = keys.find(BOB)
    assert tenant is not None
    tenant._buckets["tokens"]._clock = clock = Clock()
    tenant._buckets["tokens"]._seen = 0.0
    body = {**COMPLETION, "n": 2, "max_tokens": 100}
    num_used = 4 + 2 * len(backend.answer_ids) + 1  # the second answer has one token less, and both an end
    first = await guarded.post("/v1/completions", json=body, headers=bearer(BOB))
    assert first.json()["usage"]["total_tokens"] == num_used
    assert (await guarded.post("/v1/completions", json=body, headers=bearer(BOB))).status_code == 200
    refused = await guarded.post("/v1/completions", json=body, headers=bearer(BOB))
    missing = 1 - (60 - 2 * num_used)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, str(missing))  # one a second
    assert refused.json()["error"]["type"] == "tokens"
    clock.now += missing
    assert (await guarded.post("/v1/completions", json=body, headers=bearer(BOB))).status_code == 200


async def test_a_stream_is_charged_as_it_goes(guarded: httpx.AsyncClient, keys: KeyRing, backend: FakeBackend) -> None:
    tenant = keys.find(BOB)
    assert tenant is not None
    bucket = tenant._buckets["tokens"]
    bucket._clock = Clock()
    bucket._seen = 0.0
    backend.failure, backend.failure_after = "It failed.", 3
    body = {**COMPLETION, "stream": True}
    await guarded.post("/v1/completions", json=body, headers=bearer(BOB))
    assert bucket._level == 60 - 4 - 3


async def test_a_tenant_finds_only_its_own_prefixes_unless_all_share(
    guarded: httpx.AsyncClient, backend: FakeBackend, keys: KeyRing, path: Path
) -> None:
    async def salts() -> list[str | None]:
        backend.requests.clear()
        for url, body in [*ENDPOINTS, ("/v1/embeddings", {"model": COMPLETION["model"], "input": "a"})]:
            for key in (ANN, "sk-named-1:ann"):
                for salt in ({}, {"cache_salt": "s"}):
                    await guarded.post(url, json={**body, **salt}, headers=bearer(key))
        return [request.cache_salt for request in backend.requests]

    changed = {"tenants": [FILE["tenants"][0], {"name": "ann:s", "key": "sk-named-1:ann"}]}
    path.write_text(json.dumps(changed))
    await keys.refresh()
    assert await salts() == ["3:ann:", "3:ann:s", "5:ann:s:", "5:ann:s:s"] * 3
    path.write_text(json.dumps({**changed, "share_prefix_cache": True}))
    await keys.refresh()
    assert await salts() == [None, "s"] * 6


@pytest.fixture
def level(keys: KeyRing) -> Callable[[], float]:
    """Of Bob's 60 tokens, those that are left; no time passes."""
    bob = keys.find(BOB)
    assert bob is not None
    bucket = bob._buckets["tokens"]
    bucket._clock = Clock()
    bucket._seen = 0.0
    return lambda: bucket._level


BEAMS = {**COMPLETION, "use_beam_search": True, "n": 2, "temperature": 0}


@pytest.mark.parametrize(("num_cached", "num_repeated"), [(100, 0), (0, 2 * 4 + 2 * 5), (3, 2 * 1 + 2 * 2)])
async def test_every_step_of_a_search_is_charged(
    guarded: httpx.AsyncClient,
    backend: FakeBackend,
    level: Callable[[], float],
    num_cached: int,
    num_repeated: int,
) -> None:
    """A prompt of 4, then 2 beams twice: 5 tokens are made; what was sent before is in the cache or read again."""
    backend.num_cached_tokens = num_cached
    answer = await guarded.post("/v1/completions", json={**BEAMS, "max_tokens": 3}, headers=bearer(BOB))
    assert answer.status_code == 200
    assert level() == 60 - 4 - 5 - 4 - num_repeated


async def test_a_search_that_is_given_up_is_charged_as_far_as_it_went(
    guarded: httpx.AsyncClient, backend: FakeBackend, level: Callable[[], float]
) -> None:
    backend.num_cached_tokens = 100

    generate, num_steps = backend.generate, 0

    async def third_step_waits(
        model: str, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[list[EngineOutput], None]:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            backend.answers_nothing = asyncio.Event()
        async with aclosing(generate(model, requests)) as batches:
            async for batch in batches:
                yield batch

    backend.generate = third_step_waits  # type: ignore[method-assign]
    asking = asyncio.create_task(guarded.post("/v1/completions", json={**BEAMS, "max_tokens": 5}, headers=bearer(BOB)))
    while backend.answers_nothing is None or len(backend.requests) < 5:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert level() == 60 - (4 + 1) - 2 * (1 + 1) - 2 * 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["leaves", "deadline", "fails", "refused"])
async def test_a_prompt_that_is_given_up_is_charged(
    guarded: httpx.AsyncClient, backend: FakeBackend, level: Callable[[], float], how: str, streamed: bool
) -> None:
    """By who leaves and by a deadline, before any token; not one that the service fails."""
    body = {**COMPLETION, "prompt": [[1, 2, 3], [4, 5]], "n": 2, "stream": streamed}
    if how == "refused":
        backend.refusal = OverloadedError("Full.")
    elif how == "leaves":
        backend.answers_nothing = asyncio.Event()
    else:
        backend.says_at_once = EngineOutput("", 0, [], "deadline" if how == "deadline" else "error", error="It failed.")
    asking = asyncio.create_task(guarded.post("/v1/completions", json=body, headers=bearer(BOB)))
    if how == "leaves":
        await backend.started.wait()
        asking.cancel()
    [answer] = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, httpx.Response):
        assert answer.status_code == {"deadline": 408, "fails": 500, "refused": 503}[how]
    assert level() == 60 - (5 if how in ("leaves", "deadline") else 0)


async def test_inputs_that_are_given_up_are_charged(
    guarded: httpx.AsyncClient, backend: FakeBackend, level: Callable[[], float]
) -> None:
    backend.answers_nothing = asyncio.Event()
    body = {"model": COMPLETION["model"], "input": [[1, 2, 3], [4, 5]]}
    asking = asyncio.create_task(guarded.post("/v1/embeddings", json=body, headers=bearer(BOB)))
    await backend.started.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert level() == 60 - 5


async def test_the_file_is_read_again_when_it_changes(keys: KeyRing, path: Path) -> None:
    ann, limited = keys.find(ANN), keys.find(LIMITED)
    assert ann is not None
    assert limited is not None
    changed = json.loads(json.dumps(FILE))
    changed["tenants"][0]["key"] = "sk-ann-new"
    changed["tenants"][1]["weight"] = 3
    changed["tenants"][2]["key"] = LIMITED
    path.write_text(json.dumps(changed))
    await keys.refresh()
    assert (keys.find(ANN), keys.find("sk-limited-2")) == (None, None)
    assert keys.find("sk-ann-new") is ann  # with what it has used
    assert keys.find(LIMITED) is limited
    bob = keys.find(BOB)
    assert bob is not None
    assert bob.terms.weight == 3


async def test_an_edit_of_terms_forgives_nothing(keys: KeyRing, path: Path) -> None:
    """Who has used up its tokens waits as long as before, under a smaller limit and under a larger one."""
    bob, clock = keys.find(BOB), Clock()
    assert bob is not None
    bob._buckets["tokens"]._clock = clock
    bob._buckets["tokens"]._seen = 0.0
    bob.used(90)  # 30 more than there were
    for per_minute, wait_s in ((120, "16 s"), (30, "62 s")):
        changed = json.loads(json.dumps(FILE))
        changed["tenants"][1] |= {"tokens_per_minute": per_minute, "weight": per_minute}
        path.write_text(json.dumps(changed))
        await keys.refresh()
        assert keys.find(BOB) is bob
        assert bob.terms.weight == per_minute
        with pytest.raises(RateLimitError, match=rf"'bob' may use {per_minute} tokens per minute\. .* {wait_s}\."):
            bob.admit()
    del changed["tenants"][1]["tokens_per_minute"]
    path.write_text(json.dumps(changed))
    await keys.refresh()
    bob.admit()


async def test_nobody_overtakes_beyond_its_terms(backend: FakeBackend, path: Path) -> None:
    """A tenant may go back as far as it likes, ahead only as far as the file says; without a file, everywhere."""
    backend.served = dataclasses.replace(backend.served, has_priorities=True)
    changed = json.loads(json.dumps(FILE))
    changed["tenants"][0]["min_priority"] = -10
    changed["tenants"][1]["min_priority"] = 5
    path.write_text(json.dumps(changed))

    async def asks(keys: KeyRing | None, key: str, fields: dict[str, int]) -> tuple[int, Any]:
        transport = httpx.ASGITransport(create_app(backend, keys=keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            for url, body in ENDPOINTS:
                body = {**body, "max_tokens": 1, **fields}
                response = await http.post(url, json=body, headers=bearer(key))
        if response.status_code == 200:
            return 200, backend.requests[-1].priority
        return response.status_code, response.json()["error"]

    keys = KeyRing(path)
    message = "priority: must be at least {} with this API key (smaller numbers go first), got {}."
    for ring, key, priority, expected in (
        (keys, ANN, -10, (200, -10)),
        (keys, ANN, -11, (400, error(message.format(-10, -11), "priority")["error"])),
        (keys, BOB, None, (200, 5)),
        (keys, BOB, 0, (400, error(message.format(5, 0), "priority")["error"])),
        (keys, LIMITED, -1, (400, error(message.format(0, -1), "priority")["error"])),
        (None, "", -1_000_000, (200, -1_000_000)),
    ):
        assert await asks(ring, key, {} if priority is None else {"priority": priority}) == expected


@pytest.mark.parametrize("broken", ["tenants: [", "tenants: []", None])
async def test_a_file_that_breaks_changes_nothing(keys: KeyRing, path: Path, broken: str | None) -> None:
    ann = keys.find(ANN)
    if broken is None:
        os.unlink(path)
    else:
        path.write_text(broken)
    await keys.refresh()
    assert keys.find(ANN) is ann
    path.write_text(json.dumps({"tenants": [{"name": "eve", "key": "sk-eve-12345"}]}))
    await keys.refresh()
    assert (keys.find(ANN), keys.find("sk-eve-12345") is not None) == (None, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tenants: [", ":1: not YAML."),
        ("{}", ": tenants: Field required."),
        ("[]", ": Input should be a valid dictionary or instance of KeyFile."),
        ("tenants: [{name: a}]", ": tenants.0: needs a key or a key_sha256."),
        ("tenants: [{name: a, key: short}]", ": tenants.0.key.0: String should have at least 8 characters."),
        (
            "tenants: [{name: a, key: sk-secret-1}, {name: a, key: sk-secret-2}]",
            ": two tenants are called 'a': give one of them both keys.",
        ),
        (
            "tenants: [{name: a, key: sk-secret-1}, {name: b, key: sk-secret-1}]",
            ": tenant 'b': one of its keys is there already.",
        ),
        (
            "tenants: [{name: a, key: sk-secret-1, weight: 0}]",
            ": tenants.0.weight: Input should be greater than 0.",
        ),
        *(
            (
                json.dumps({"tenants": [{"name": "a", "key": ["sk-secret-0", key]}]}),
                ": tenants.0.key.1: must be printable ASCII without spaces, as no other key can be sent.",
            )
            for key in ("sk-secret-é", "sk-secret-1 ", " sk-secret-1", "sk secret-1", "sk-secret-1\n", "sk-secret\t1")
        ),
        ("tenants: [{name: a, keys: sk-secret-1}]", ": tenants.0.keys: Extra inputs are not permitted."),
    ],
)
def test_files_that_cannot_work(path: Path, content: str, message: str) -> None:
    """The message says where, and never what a key is."""
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_key_file(path)
    assert caught.value.message == f"{path}{message}"
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api\.keys_file: .* cannot be read \(No such file or directory\)\."):
        KeyRing(tmp_path / "none")


def test_a_bucket() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.wait_s(1) == 1.0
    clock.now = 10
    assert (bucket.wait_s(10), bucket.wait_s(12)) == (0.0, 2.0)
    bucket.take(30)
    assert bucket.wait_s(1) == 21.0
    clock.now = 1000
    bucket.take(0)
    assert bucket.wait_s(60) == 0.0  # it never holds more than it can
    assert bucket.wait_s(1000) == 0.0  # and nobody waits for more than it can hold
    bucket.resize(30)
    bucket.take(30)
    assert bucket.wait_s(1) == 2.0


def test_limits_are_divided_among_the_gateways() -> None:
    num_gateways, clock = 1, Clock()
    tenant = Tenant("a", Terms(requests_per_minute=4), num_gateways=lambda: num_gateways, clock=clock)
    tenant.admit()
    num_gateways = 2
    tenant.admit()
    tenant.admit()
    with pytest.raises(Exception, match=r"'a' may use 4 requests per minute\. Try again in 30 s\."):
        tenant.admit()
    clock.now = 31
    tenant.admit()


async def test_a_page_of_an_allowed_origin_may_use_the_service(keys: KeyRing, backend: FakeBackend) -> None:
    """Its browser asks first, without a key, and shows it errors, too."""
    page = {"origin": "https://chat.example"}
    asks = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answers = {}
    for allowed in ([], ["https://chat.example"], ["*"]):
        transport = httpx.ASGITransport(create_app(backend, keys=keys, allowed_origins=allowed))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            path, body = "/v1/completions", COMPLETION
            asked = await http.options(path, headers=asks)
            answered = await http.post(path, json=body, headers={**page, **bearer(ANN)})
            refused = await http.post(path, json=body, headers=page)
            of_another = await http.post(path, json=body, headers={"origin": "https://other.example", **bearer(ANN)})
        assert (answered.status_code, refused.status_code) == (200, 401)
        allow = [each.headers.get("access-control-allow-origin") for each in (asked, answered, refused, of_another)]
        answers[tuple(allowed)] = (asked.status_code, *allow)
    own = "https://chat.example"
    assert answers == {
        (): (401, None, None, None, None),
        (own,): (200, own, own, own, None),
        ("*",): (200, "*", "*", "*", "*"),
    }
