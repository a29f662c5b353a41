"""Answers in channels, as gpt-oss gives them, through the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fake_backend import FakeBackend
from test_chat_tools import TOOL, answer
from test_reasoning import both, num_tokens

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|>{% endif %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}{% if tools %}{{ tools | tojson }}"
    "{% endif %}<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 4."
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    info = load_model_info(ModelConfig(max_model_len=1024))
    tokenizer = load_tokenizer(info)
    tokenizer.backend_tokenizer.add_special_tokens(MARKS)
    info = replace(info, vocab_size=info.vocab_size + len(MARKS))
    return FakeBackend(ServedModel.create(info, tokenizer, config=ModelConfig(chat_template=str(path))))


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


async def test_a_thought_and_an_answer(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Whole and streamed alike; marks are special tokens that nobody sees."""
    answer(backend, THOUGHT + FINAL)
    message, finish_reason, usage = await both(client)
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "It is 4.")
    assert finish_reason == "stop"
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_tokens(backend, THOUGHT)}
    message, _, _ = await both(client, include_reasoning=False)
    assert "reasoning_content" not in message


async def test_a_call(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT + CALL)
    message, finish_reason, _ = await both(client, tools=[TOOL])
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (message["content"], message["reasoning_content"], finish_reason) == (None, "Two and two.", "tool_calls")


async def test_no_call_without_tools(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT + CALL)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        message, finish_reason, _ = await both(client, **fields)
        assert "tool_calls" not in message
        assert (message["content"], finish_reason) == ('{"city": "Paris"}', "stop")


async def test_what_is_told_of_earlier_thoughts(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """By the name that these templates have for it."""
    answer(backend, FINAL)
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "user", "content": "Sure?"},
    ]
    _, _, with_thought = await both(client, messages=turns)
    _, _, without = await both(client, messages=[{**turn, "reasoning_content": None} for turn in turns])
    more = with_thought["prompt_tokens"] - without["prompt_tokens"]
    assert more == num_tokens(backend, THOUGHT)
