"""What a whole service owes its users besides answers: gRPC, exact usage under load, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

import grpc
import httpx
import openai
import psutil
import pytest
from test_real_server import MESSAGES, MODEL, PROMPT, async_sdk, metrics, sdk, wait_until, wait_until_idle

from quire.cluster.grpc import quire_inference_pb2 as pb
from quire.cluster.grpc.quire_inference_pb2_grpc import InferenceStub

__all__ = ["async_sdk", "sdk"]


def settled(url: str) -> dict[str, float]:
    """The metrics once nothing runs and the engine has told its last word about the requests before."""
    last, values = -1.0, wait_until_idle(url)
    while values["engine_steps_total"] != last:
        last = values["engine_steps_total"]
        time.sleep(0.5)  # an engine tells its numbers several times a second, and only when they change
        values = metrics(url)
    return values


async def test_grpc_answers_as_http_does(grpc_target: str, service_url: str, sdk: openai.OpenAI) -> None:
    expected = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24)
    conversation = pb.Conversation(messages=[pb.Message(**message) for message in MESSAGES])
    request = pb.GenerateRequest(model=MODEL, conversation=conversation, temperature=0, max_tokens=24)
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        stub = InferenceStub(channel)
        responses = [response async for response in stub.Generate(request)]
        assert len(responses) > 5
        text = "".join(choice.text for response in responses for choice in response.choices)
        assert text == expected.choices[0].message.content
        assert expected.usage is not None
        assert responses[-1].usage.total_tokens == expected.usage.total_tokens
        tokens = await stub.Tokenize(pb.TokenizeRequest(prompt=PROMPT))
        told = httpx.post(f"{service_url}/tokenize", json={"prompt": PROMPT}).json()
        assert (list(tokens.tokens), tokens.max_model_len) == (told["tokens"], told["max_model_len"])
        assert (await stub.Health(pb.HealthRequest())).status == "ok"

        for bad, code, message in (
            ({"model": MODEL, "prompt": "a", "temperature": 9}, "INVALID_ARGUMENT", "temperature: must be a number"),
            ({"model": "gpt-5", "prompt": "a"}, "NOT_FOUND", "The model 'gpt-5' does not exist"),
        ):
            for streamed in (True, False):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(aiter(stub.Generate(pb.GenerateRequest(**bad, stream=streamed))))
                assert caught.value.code().name == code
                assert (caught.value.details() or "").startswith(message)

        call = stub.Generate(pb.GenerateRequest(model=MODEL, prompt=PROMPT, max_tokens=4000, ignore_eos=True))
        await anext(aiter(call))
        call.cancel()
        assert (await asyncio.to_thread(wait_until_idle, service_url))["num_used_kv_blocks"] == 0


def test_headers_that_serve_fails_on_are_dropped(service_url: str) -> None:
    """An id of bytes that are no UTF-8 is replaced; others come back as they are."""
    for name in (b"x-request-id", b"x-session-id", b"serve_multiplexed_model_id", b"serve-multiplexed-model-id"):
        answer = httpx.get(f"{service_url}/v1/models", headers=[(name, b"\xff\xfe")])
        assert answer.status_code == 200, name
        assert re.fullmatch("[0-9a-f-]{36}", answer.headers["x-request-id"])
    assert httpx.get(f"{service_url}/v1/models", headers={"x-request-id": "my id"}).headers["x-request-id"] == "my id"


def test_ready_tokenize_and_openapi(service_url: str) -> None:
    assert httpx.get(f"{service_url}/ready").json() == {"models": [MODEL], "asleep": [], "status": "ready"}
    tokens = httpx.post(f"{service_url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    text = httpx.post(f"{service_url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n")
    assert "/v1/chat/completions" in httpx.get(f"{service_url}/openapi.json").json()["paths"]
    assert httpx.get(f"{service_url}/nowhere").json()["error"]["message"] == "Not Found: GET /nowhere does not exist."


def test_beams_are_the_likeliest_answers(sdk: openai.OpenAI) -> None:
    beams: Any = {"use_beam_search": True, "return_token_ids": True}
    answer = sdk.completions.create(model=MODEL, prompt=PROMPT, n=4, max_tokens=3, temperature=0, extra_body=beams)
    greedy = sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=0)

    def score(ids: list[int]) -> float:
        """By the model itself: what it says of these tokens, one by one."""
        total, prompt = 0.0, httpx.post(f"{sdk.base_url}".replace("/v1/", "/tokenize"), json={"prompt": PROMPT}).json()
        known = list(prompt["tokens"])
        for token_id in ids:
            fields: Any = {"return_tokens_as_token_ids": True}
            step = sdk.completions.create(
                model=MODEL, prompt=known, max_tokens=1, temperature=0, logprobs=20, extra_body=fields
            )
            assert step.choices[0].logprobs is not None
            assert step.choices[0].logprobs.top_logprobs is not None
            total += step.choices[0].logprobs.top_logprobs[0][f"token_id:{token_id}"]
            known.append(token_id)
        return total

    scores = [score(choice.token_ids) for choice in answer.choices]  # type: ignore[attr-defined]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in answer.choices}) == 4
    assert greedy.choices[0].logprobs is not None
    assert scores[0] >= sum(greedy.choices[0].logprobs.token_logprobs or []) - 1e-3


def test_a_stream_that_a_stop_string_ends_has_its_report(sdk: openai.OpenAI, service_url: str) -> None:
    before = settled(service_url)  # a beam that another test gave up is counted when its engine has told of its end
    fields: Any = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40, "stop": ["7,"]}
    *_, last = sdk.completions.create(**fields, stream=True, extra_body={"include_report": True})
    report = last.choices[0].report  # type: ignore[attr-defined]
    assert report["wall_s"] == pytest.approx(report["compute_s"] + sum(report["wait_s"].values()))
    sdk.completions.create(**fields)  # without it the report is not waited for, and counted all the same
    name = "request_queue_time_seconds_count"
    assert wait_until(service_url, lambda now: now[name] >= before[name] + 2)[name] == before[name] + 2


async def test_sixty_four_mixed_requests_have_exact_usage(async_sdk: openai.AsyncOpenAI, service_url: str) -> None:
    """Streams and whole answers, chats and completions, all lengths, at once: usage is what was made, to the token."""
    draw = random.Random(7)
    before = await asyncio.to_thread(settled, service_url)

    async def one(i: int) -> tuple[int, int]:
        max_tokens, n = draw.randint(1, 8), draw.choice([1, 1, 2])
        fields: Any = {"model": MODEL, "max_tokens": max_tokens, "n": n, "seed": i, "extra_body": {"ignore_eos": True}}
        text = "word " * draw.randint(1, 60)
        if i % 2:
            create: Any = async_sdk.completions.create
            fields["prompt"], body = text, {"prompt": text}
        else:
            create = async_sdk.chat.completions.create
            fields["messages"] = [{"role": "user", "content": text}]
            body = {"messages": fields["messages"]}
        if i % 3:
            async for chunk in await create(**fields, stream=True, stream_options={"include_usage": True}):
                usage = chunk.usage
        else:
            usage = (await create(**fields)).usage
        async with httpx.AsyncClient(timeout=60) as client:
            num_prompt = (await client.post(f"{service_url}/tokenize", json=body)).json()["count"]
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, n * max_tokens)
        assert usage.total_tokens == num_prompt + n * max_tokens
        return num_prompt, n * max_tokens

    made = await asyncio.gather(*[one(i) for i in range(64)])
    values = await asyncio.to_thread(settled, service_url)
    assert values["num_used_kv_blocks"] == 0
    num_generated = sum(tokens for _, tokens in made)
    assert values["generation_tokens_total"] - before["generation_tokens_total"] == num_generated
    name = "request_generation_tokens_sum"
    assert values[name] - before[name] == num_generated
    name = "request_prompt_tokens_sum"
    assert values[name] - before[name] == sum(tokens for tokens, _ in made)


async def test_two_hundred_streams_opened_and_closed_leave_nothing(
    async_sdk: openai.AsyncOpenAI, service_url: str
) -> None:
    async def open_and_close(i: int) -> None:
        fields: Any = {"model": MODEL, "max_tokens": 500, "stream": True, "extra_body": {"ignore_eos": True}}
        if i % 2:
            stream: Any = await async_sdk.completions.create(prompt=f"Story {i}:", **fields)
        else:
            stream = await async_sdk.chat.completions.create(messages=[{"role": "user", "content": f"{i}"}], **fields)
        await anext(aiter(stream))
        await stream.close()

    for start in range(0, 200, 10):
        await asyncio.gather(*[open_and_close(i) for i in range(start, start + 10)])
    values = await asyncio.to_thread(wait_until_idle, service_url)
    names = ("num_requests_running", "num_requests_waiting", "num_used_kv_blocks", "kv_cache_usage_perc")
    assert [values[name] for name in names] == [0, 0, 0, 0]


def test_nothing_of_a_service_listens_to_the_network(service_url: str) -> None:
    """Neither HTTP nor gRPC, unless asked to, nor what its processes have among themselves."""
    tree = psutil.Process().children(recursive=True)
    found = {each.laddr for process in tree for each in process.net_connections("tcp") if each.status == "LISTEN"}
    assert len(found) > 10
    assert {address for address in found if address.ip.removeprefix("::ffff:") != "127.0.0.1"} == set()
