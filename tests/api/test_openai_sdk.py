"""The official SDK, unmodified, against the API on a real HTTP server (a fake backend behind it)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_backend import DEFAULT_ANSWER
from live_server import LiveServer

from quire.engine.errors import OverloadedError

MODEL = "smollm2-135m-instruct"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(live_server: LiveServer, served: Any) -> LiveServer:
    """The server, with its backend as new."""

    def reset() -> None:
        live_server.backend.__init__(served)  # type: ignore[misc]

    live_server.call(reset)
    return live_server


@pytest.fixture
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, temperature=0.5)
    assert answer.choices[0].message.content == DEFAULT_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    # A conversation goes on with the message as the SDK holds it.
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "and?"}]
    assert sdk.chat.completions.create(model=MODEL, messages=again).choices[0].message.content == DEFAULT_ANSWER


def test_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == DEFAULT_ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None


def test_the_sdks_own_stream_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == DEFAULT_ANSWER


def test_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=100, logprobs=1, extra_body={"top_k": 5})
    assert [choice.text for choice in answer.choices] == [DEFAULT_ANSWER] * 2
    stream = sdk.completions.create(model=MODEL, prompt="a", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == DEFAULT_ANSWER


async def test_the_async_sdk_in_every_mode(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2)
        assert len(chat.choices) == 2
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as helper:
            assert (await helper.get_final_completion()).choices[0].message.content == DEFAULT_ANSWER
        text = await client.completions.create(model=MODEL, prompt=["a", [1, 2]], max_tokens=100, best_of=2, echo=True)
        assert text.choices[0].text == f"a{DEFAULT_ANSWER}"
        stream = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == DEFAULT_ANSWER
        assert chunks[-1].usage is not None
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)


def test_what_the_sdk_sends_for_bookkeeping_is_accepted(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, user="ann", metadata={"a": "b"}, service_tier="auto", store=False
    )
    assert answer.choices[0].message.content == DEFAULT_ANSWER
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, store=True)
    assert (refused.value.param, refused.value.code) == ("store", "unsupported")


def test_vllms_extras_reach_the_user(sdk: openai.OpenAI, server: LiveServer) -> None:
    extra = {"return_token_ids": True, "request_id": "mine", "top_k": 3}
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stop="2024", extra_body=extra)
    assert answer.id == "chatcmpl-mine"
    assert answer.choices[0].stop_reason == "2024"  # type: ignore[attr-defined]
    assert answer.prompt_token_ids == server.backend.requests[0].prompt_token_ids  # type: ignore[attr-defined]
    assert answer.choices[0].token_ids == server.backend.answer_ids[:7]  # type: ignore[attr-defined]


def test_statuses_become_the_sdks_own_exceptions(sdk: openai.OpenAI, server: LiveServer) -> None:
    """503 is tried again by the SDK after the time that Retry-After says."""
    server.backend.refusal = OverloadedError("The queue is full.", 1.0)
    with pytest.raises(openai.InternalServerError) as busy:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (503, "1")
    server.backend.refusal = None
    server.backend.deadline_after = 1
    with pytest.raises(openai.APIStatusError) as late:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"deadline_ms": 5})
    assert (late.value.status_code, late.value.code) == (408, "deadline_exceeded")  # type: ignore[attr-defined]
    server.backend.deadline_after = None
    assert sdk.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content == DEFAULT_ANSWER


def test_a_deadline_that_has_passed_is_not_tried_again(server: LiveServer) -> None:
    """It would only make engines do the work three times."""
    server.backend.deadline_after = 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as client:
        for streamed in (False, True):
            with pytest.raises(openai.APIStatusError) as late:
                client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, stream=streamed, extra_body={"deadline_ms": 500}
                )
            assert (late.value.status_code, late.value.response.headers["x-should-retry"]) == (408, "false")
    assert len(server.backend.requests) == 2


async def test_async_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == DEFAULT_ANSWER
        assert [model.id async for model in client.models.list()] == [MODEL]


def test_embeddings(sdk: openai.OpenAI) -> None:
    """The SDK asks for base64 unless told otherwise, and decodes it."""
    texts = ["first", "second one"]
    answer = sdk.embeddings.create(model=MODEL, input=texts, dimensions=4)
    plain = sdk.embeddings.create(model=MODEL, input=texts, dimensions=4, encoding_format="float")
    assert [each.embedding for each in answer.data] == [each.embedding for each in plain.data]
    assert [(each.index, len(each.embedding), each.object) for each in answer.data] == [
        (0, 4, "embedding"),
        (1, 4, "embedding"),
    ]
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (MODEL, 3, 3)
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.embeddings.create(model=MODEL, input="a", dimensions=1000)
    assert bad.value.param == "dimensions"


async def test_embeddings_with_the_async_client(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*[client.embeddings.create(model=MODEL, input=[[i, 2], [i]]) for i in range(9)])
    for i, answer in enumerate(answers):
        assert [each.embedding[0] for each in answer.data] == [i + 2 + 1 / 1024, i + 1 / 1024]


def test_an_echo_with_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="a b", echo=True, logprobs=1, max_tokens=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -0.25]
    assert logprobs.tokens == ["a", " b"]
    assert answer.choices[0].text == "a b"


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "quire"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-5")


def test_errors_are_the_sdks_own(sdk: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9, stream=True)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    server.backend.failure = "It failed."
    with pytest.raises(openai.APIError, match=r"It failed\."):
        list(sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    server.backend.failure = None
    assert sdk.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content == DEFAULT_ANSWER


def test_leaving_a_stream_aborts_it(sdk: openai.OpenAI, server: LiveServer) -> None:
    server.call(server.backend.gate.clear)
    stream = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=2)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert len(server.backend.running) == 2
    stream.close()
    server.wait_for(lambda backend: backend.closed_early)
    assert not server.backend.running
    server.call(server.backend.gate.set)
    assert sdk.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content == DEFAULT_ANSWER


@pytest.mark.parametrize("streamed", [False, True])
def test_leaving_before_the_answer_aborts_it(sdk: openai.OpenAI, server: LiveServer, streamed: bool) -> None:
    """A client that closes its connection while it waits for a whole answer, or for a stream to move on."""
    server.call(server.backend.gate.clear)
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"model": "{MODEL}", "prompt": "a", "stream": {str(streamed).lower()}}}'.encode()
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        if streamed:
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 OK")
        else:
            server.wait_for(lambda backend: backend.started)
    server.wait_for(lambda backend: backend.closed_early)
    assert not server.backend.running
    server.call(server.backend.gate.set)
    assert sdk.completions.create(model=MODEL, prompt="a", max_tokens=2).choices[0].finish_reason == "length"


def test_fifty_streams_opened_and_closed_leave_nothing(sdk: openai.OpenAI, server: LiveServer) -> None:
    for _ in range(50):
        server.call(server.backend.closed_early.clear)
        server.call(server.backend.gate.clear)
        stream = sdk.completions.create(model=MODEL, prompt="a", stream=True)
        next(iter(stream))
        stream.close()
        server.wait_for(lambda backend: backend.closed_early)
        assert not server.backend.running
