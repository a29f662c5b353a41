"""Thoughts apart from answers, through the API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from test_chat_tools import CALL, TOOL, answer, chunks_of, reassembled, without_ids

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
# As Qwen 3's: it thinks unless told not to.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif force %}<think>\n{% endif %}{% endif %}{% if reasoning_effort %}{% endif %}"
)
THOUGHT = "<think>\nTwo and two.\n</think>\n\nIt is 4."


def backend_of(path: Path, *, special: bool = False, **config: Any) -> FakeBackend:
    path.write_text(TEMPLATE)
    info = load_model_info(ModelConfig(max_model_len=1024))
    tokenizer = load_tokenizer(info)
    if special:
        tokenizer.backend_tokenizer.add_special_tokens(["<think>", "</think>"])
        info = replace(info, vocab_size=info.vocab_size + 2)
    return FakeBackend(ServedModel.create(info, tokenizer, config=ModelConfig(chat_template=str(path), **config)))


@pytest.fixture(params=[True, False], ids=["special tokens", "text"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> FakeBackend:
    return backend_of(tmp_path / "template.jinja", special=request.param)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


async def both(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The message, the finish reason and the usage; the same in a stream."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "2+2?"}], "tools": None, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    whole = response.json()
    [choice] = whole["choices"]
    chunks = await chunks_of(client, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    message, finish_reason = reassembled(chunks)
    assert message == without_ids(choice["message"])
    assert finish_reason == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    return message, choice["finish_reason"], whole["usage"]


def num_tokens(backend: FakeBackend, text: str) -> int:
    return len(backend.served.input_processor.tokenize(text, add_special_tokens=False))


async def test_a_thought_and_an_answer(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT)
    message, finish_reason, usage = await both(client)
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "It is 4.")
    assert finish_reason == "stop"
    details = usage["completion_tokens_details"]
    assert details == {"reasoning_tokens": num_tokens(backend, "<think>\nTwo and two.\n</think>")}
    assert details["reasoning_tokens"] < usage["completion_tokens"]
    message, _, usage = await both(client, include_reasoning=False)
    assert "reasoning_content" not in message
    assert (message["content"], usage["completion_tokens_details"]) == ("It is 4.", details)


async def test_no_thought(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, "It is 4.")
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message, _, usage = await both(client, **fields)
        assert message["content"] == "It is 4."
        assert "reasoning_content" not in message
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_prompt_may_end_inside_a_thought(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, "Two and two.\n</think>\n\nIt is 4.")
    message, _, _ = await both(client, chat_template_kwargs={"force": True})
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "It is 4.")
    # What a user says of marks is not a thought.
    mean = [{"role": "user", "content": "What is <think>"}]
    message, _, _ = await both(client, messages=mean, add_generation_prompt=False)
    assert message["content"].endswith("It is 4.")
    half = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>Two"}]
    message, _, _ = await both(client, messages=half, continue_final_message=True)
    assert message["reasoning_content"] == "Two and two."


async def test_a_thought_that_never_ends(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT)
    message, finish_reason, usage = await both(client, max_tokens=5)
    assert (message["content"], finish_reason) == (None, "length")
    assert "Two and two.".startswith(message["reasoning_content"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
    # The conversation goes on with the message as it came, without what is null in it, or as other servers name it.
    told = {name: value for name, value in message.items() if value is not None}
    renamed = {"role": "assistant", "reasoning": message["reasoning_content"]}
    for again in (message, told, renamed):
        messages = [{"role": "user", "content": "2+2?"}, again, {"role": "user", "content": "Go on"}]
        await both(client, messages=messages)
        prompt = backend.served.token_decoder.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)
        assert f"assistant\n<think>{message['reasoning_content']}</think>" in prompt


async def test_a_thought_and_a_call(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, f"<think>I call.</think>\n\n{CALL}")
    message, finish_reason, _ = await both(client, tools=[TOOL])
    assert (message["reasoning_content"], message["content"], finish_reason) == ("I call.", None, "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


async def test_grammars_begin_after_the_thought(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT)
    await both(client, tools=[TOOL], tool_choice="required")
    grammar = backend.requests[-1].grammar
    assert grammar is not None
    assert "</think>" in grammar.source.split("start: ")[0]
    await both(client)
    assert backend.requests[-1].grammar is None


async def test_thoughts_come_back(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer(backend, THOUGHT)
    message, _, _ = await both(client)
    await both(client, messages=[{"role": "user", "content": "2+2?"}, message, {"role": "user", "content": "Sure?"}])
    prompt = backend.served.token_decoder.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "assistant\n<think>Two and two.</think>It is 4.<|im_end|>" in prompt


async def test_marks_by_configuration(tmp_path: Path) -> None:
    backend = backend_of(tmp_path / "t.jinja", reasoning_marks=("<<", ">>"))
    transport = httpx.ASGITransport(create_app(backend), raise_app_exceptions=False)
    answer(backend, "<<Hm.>> Yes.")
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        message, _, _ = await both(client)
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_models_that_do_not_think_say_nothing_of_it(served: ServedModel) -> None:
    transport = httpx.ASGITransport(create_app(FakeBackend(served)), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        response = await client.post("/v1/chat/completions", json=body)
    assert "reasoning" not in json.dumps(response.json())
