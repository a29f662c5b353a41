"""Other clients of OpenAI's API, as their users call them, on a real HTTP server. Skipped where not installed."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import DEFAULT_ANSWER
from live_server import LiveServer
from test_openai_sdk import MESSAGES, MODEL, server

__all__ = ["server"]


def test_langchain(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = chat.invoke("hi")
    assert answer.content == DEFAULT_ANSWER
    assert (
        answer.usage_metadata["total_tokens"]
        == answer.usage_metadata["input_tokens"] + len(server.backend.answer_ids) + 1
    )
    assert "".join(chunk.content for chunk in chat.stream("hi")) == DEFAULT_ANSWER
    assert [each.content for each in chat.batch(["a", "b"])] == [DEFAULT_ANSWER] * 2
    text = langchain.OpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_retries=0, max_tokens=100)
    assert text.invoke("Once") == DEFAULT_ANSWER


async def test_langchain_async(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert (await chat.ainvoke("hi")).content == DEFAULT_ANSWER
    assert "".join([chunk.content async for chunk in chat.astream("hi")]) == DEFAULT_ANSWER


def test_litellm(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch its table of prices
    litellm = pytest.importorskip("litellm")
    fields: Any = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(messages=MESSAGES, **fields)
    assert answer.choices[0].message.content == DEFAULT_ANSWER
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **fields))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == DEFAULT_ANSWER
    text = litellm.text_completion(
        prompt="Once", max_tokens=100, **{**fields, "model": f"text-completion-openai/{MODEL}"}
    )
    assert text.choices[0].text == DEFAULT_ANSWER
    fields["model"] = f"openai/{MODEL}"
    with pytest.raises(litellm.BadRequestError, match="temperature: must be a number"):
        litellm.completion(messages=MESSAGES, temperature=9, **fields)


async def test_litellm_async(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    fields: Any = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "num_retries": 0}
    assert (await litellm.acompletion(messages=MESSAGES, **fields)).choices[0].message.content == DEFAULT_ANSWER
