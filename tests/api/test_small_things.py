"""What is easily accepted and then ignored, or refused without need."""

from __future__ import annotations

import httpx
import pytest

CHAT = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "hi"}]}


async def test_two_names_of_one_limit_must_agree(client: httpx.AsyncClient) -> None:
    for max_tokens, status in ((3, 200), (4, 400), (-1, 400)):
        body = {**CHAT, "max_completion_tokens": 3, "max_tokens": max_tokens}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == status
        assert status == 200 or response.json()["error"]["param"] == "max_tokens"


async def test_a_long_key_of_logit_bias_is_refused_in_our_words(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "logit_bias": {"1" * 5000: 1}})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logit_bias")
    assert error["message"].startswith("logit_bias: keys must be token ids")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_head_is_allowed_where_get_is(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200
