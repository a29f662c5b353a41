"""What is easily accepted and then ignored, or refused without need."""

from __future__ import annotations

import httpx
import pytest
from fake_backend import FakeBackend

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


async def test_what_clients_of_other_services_send_is_read(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A refusal is what was said; a hint for a cache that waits to be told changes nothing."""
    hinted = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for question, said in (("hi", "No."), ([hinted], [{"type": "refusal", "refusal": "No."}])):
        roles = (("user", question), ("assistant", said), ("user", "why?"))
        conversation = [{"role": role, "content": content} for role, content in roles]
        assert (await client.post("/v1/chat/completions", json={**CHAT, "messages": conversation})).status_code == 200
    refused = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "refusal": "No."}]
    body = {**CHAT, "messages": [*refused, {"role": "user", "content": "why?"}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompts = [request.prompt_token_ids for request in backend.requests]
    assert prompts[0] == prompts[1] == prompts[2]
    body["messages"] = [{"role": "user", "content": "hi", "refusal": "No."}]
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "messages[0].refusal"
    assert error["message"].endswith("is allowed only with role 'assistant', got 'user'.")
