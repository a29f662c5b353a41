"""/ready: a canary token first, then the health of the engines."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_backend import FakeBackend

from quire.cluster.api import readiness
from quire.engine.errors import OverloadedError

MODEL = "smollm2-135m-instruct"
READY = (200, {"models": [MODEL], "asleep": [], "status": "ready"})


async def ready(client: httpx.AsyncClient) -> tuple[int, object]:
    response = await client.get("/ready")
    if response.status_code == 200:
        return 200, response.json()
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    return response.status_code, response.json()["error"]["message"]


async def test_one_canary_proves_a_model(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert await ready(client) == READY
    assert await ready(client) == READY
    [canary] = backend.requests
    assert (canary.sampling_params.max_tokens, canary.prompt_token_ids) == (1, [0])


async def test_a_canary_that_fails_is_tried_again(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.refusal = OverloadedError("No engine was available.")
    assert await ready(client) == (503, "No engine was available.")
    backend.refusal = ZeroDivisionError("oh")
    assert await ready(client) == (503, "The first token failed: ZeroDivisionError('oh')")
    backend.refusal = None
    backend.failure, backend.failure_after = "The kernel failed.", 1
    assert await ready(client) == (503, "The kernel failed.")
    backend.failure = None
    assert await ready(client) == READY


async def test_an_engine_that_answers_nothing_is_not_ready(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe gets its answer soon; the canary is waited for, and is only one."""
    monkeypatch.setattr(readiness, "ANSWER_WITHIN_S", 0.01)
    backend.answers_nothing = asyncio.Event()
    for _ in range(3):
        assert await ready(client) == (503, "The first token has not come yet.")
    assert len(backend.requests) == 1
    backend.answers_nothing.set()
    await asyncio.sleep(0.05)
    assert await ready(client) == READY
    assert len(backend.requests) == 1


async def test_readiness_ends_with_health(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert await ready(client) == READY
    backend.unhealthy = "No engine has made a step for 12 s."
    status, message = await ready(client)
    assert (status, backend.unhealthy in str(message)) == (503, True)
    backend.unhealthy = None
    assert await ready(client) == READY


async def test_nobody_is_woken_to_see_whether_it_is_ready(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A service that is scaled to zero takes requests, and its probes do not keep it awake."""
    backend.is_asleep = True
    assert await ready(client) == (200, {"models": [], "asleep": [MODEL], "status": "asleep"})
    assert backend.requests == []
    backend.is_asleep = False
    assert await ready(client) == READY
