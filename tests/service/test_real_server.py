"""The real model through the real server: client, Serve, gateway, engine, worker, and back.

`service_url` is the root of a service on the default model that runs for the whole session.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM
from quire.cluster.api.chat_style import TEMPLATES
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SETTLE_S = 20.0  # an abort takes a step of the engine, and the numbers travel once a second


@pytest.fixture
def sdk(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
async def async_sdk(service_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{service_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def metrics(url: str) -> dict[str, float]:
    """Every metric's value, summed over its series."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("quire:")
            sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def wait_until(url: str, settled: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The metrics once they are `settled`; what they are at the deadline otherwise."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        values = metrics(url)
        if settled(values) or time.monotonic() > deadline:
            return values
        time.sleep(0.1)


def wait_until_idle(url: str) -> dict[str, float]:
    """The metrics once nothing runs, waits or holds a block."""
    names = ("num_requests_running", "num_requests_waiting", "num_used_kv_blocks")
    return wait_until(url, lambda values: not any(values[name] for name in names))


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8  # seven and the end of the turn


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_chat_stream_equals_the_whole_answer(sdk: openai.OpenAI, temperature: float) -> None:
    fields: Any = {"model": MODEL, "messages": MESSAGES, "temperature": temperature, "seed": 5, "max_tokens": 24}
    whole = sdk.chat.completions.create(**fields)
    *chunks, last = sdk.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_a_completion_stream_equals_the_whole_answer(sdk: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0.7, "seed": 1, "max_tokens": 16, "n": 3}
    whole = sdk.completions.create(**fields)
    assert len({choice.text for choice in whole.choices}) > 1
    texts = ["", "", ""]
    for chunk in sdk.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_greedy_continues_as_the_model_does(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2, logprobs=2)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (" Paris.", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [" Paris", "."]
    assert choice.logprobs.top_logprobs is not None
    assert max(choice.logprobs.top_logprobs[0], key=choice.logprobs.top_logprobs[0].__getitem__) == " Paris"


def test_a_stop_string_ends_the_answer_and_the_engines_work(sdk: openai.OpenAI, service_url: str) -> None:
    answer = sdk.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=100, stop=["7,"], extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 5, 6, ", "stop")
    assert wait_until_idle(service_url)["num_used_kv_blocks"] == 0


def test_the_second_time_a_prompt_is_found_in_the_cache(sdk: openai.OpenAI) -> None:
    prompt = " ".join(f"item {i}" for i in range(40))
    first, second = (sdk.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached % 16 == 0
    assert 0 < second.usage.prompt_tokens - cached <= 16


async def test_sixteen_streams_at_once_equal_themselves_alone(async_sdk: openai.AsyncOpenAI) -> None:
    async def text_of(i: int) -> str:
        stream = await async_sdk.completions.create(
            model=MODEL, prompt=f"Item {i} is", temperature=0.8, seed=i, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    together = await asyncio.gather(*[text_of(i) for i in range(16)])
    assert together[:3] == [await text_of(i) for i in range(3)]
    assert all(together)


async def test_fifty_streams_opened_and_closed_leave_nothing(async_sdk: openai.AsyncOpenAI, service_url: str) -> None:
    async def open_and_close(i: int) -> None:
        stream = await async_sdk.completions.create(
            model=MODEL, prompt=f"Story {i}:", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()

    for start in range(0, 50, 5):
        await asyncio.gather(*[open_and_close(i) for i in range(start, start + 5)])
    values = await asyncio.to_thread(wait_until_idle, service_url)
    assert values["num_requests_running"] == 0
    assert values["num_requests_waiting"] == 0
    assert values["num_used_kv_blocks"] == 0
    assert values["kv_cache_usage_perc"] == 0


def test_leaving_before_a_whole_answer_ends_the_engines_work(service_url: str) -> None:
    body = {"model": MODEL, "prompt": "A long story:", "max_tokens": 4000, "ignore_eos": True}
    before = metrics(service_url)
    ended = "e2e_request_latency_seconds_count"
    with httpx.Client(timeout=httpx.Timeout(60, read=1.0)) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{service_url}/v1/completions", json=body)
    assert wait_until(service_url, lambda values: values[ended] > before[ended])[ended] == before[ended] + 1
    values = wait_until_idle(service_url)
    assert values["num_used_kv_blocks"] == 0
    assert values["generation_tokens_total"] < before["generation_tokens_total"] + 4000


def test_bad_input_then_a_good_request(sdk: openai.OpenAI, service_url: str) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 9}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "word " * 9000}, "prompt"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"tools": [{}]}, "tools"),
    ]
    for fields, param in bad:
        for streamed in (False, True):
            body = {"model": MODEL, "prompt": PROMPT, "stream": streamed, **fields}
            response = httpx.post(f"{service_url}/v1/completions", json=body, timeout=60)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert httpx.post(f"{service_url}/v1/completions", content=b"{").status_code == 400
    answer = sdk.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2)
    assert answer.choices[0].text == " Paris."


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
WITH_TOOLS = {"chat_template": (TEMPLATES / "hermes.jinja").read_text()}


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("max_tokens", [40, 200])
def test_a_required_call_is_made(sdk: openai.OpenAI, temperature: float, max_tokens: int) -> None:
    """By a model that was never taught to: the grammar holds it to the format, and the call always closes."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": TOOLS,
        "tool_choice": named if temperature else "required",
        "parallel_tool_calls": False,
        "temperature": temperature,
        "seed": 11,
        "max_tokens": max_tokens,
        "extra_body": WITH_TOOLS,
    }
    [choice] = sdk.chat.completions.create(**fields).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert {name: type(value) for name, value in arguments.items()} == {"city": str, "days": int}
    with sdk.chat.completions.stream(**{**fields, "tools": _strict(TOOLS)}) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert [each.function.arguments for each in final.message.tool_calls] == [call.function.arguments]


def _strict(tools: Any) -> Any:
    """What the SDK's stream helper insists on."""
    return [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]


def test_tools_that_the_template_does_not_know(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the chat template of this model does not know tools") as caught:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    assert caught.value.param == "tools"


def test_the_service_around_the_model(sdk: openai.OpenAI, service_url: str) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert httpx.get(f"{service_url}/health").json()["status"] == "ok"
    assert set(httpx.get(f"{service_url}/version").json()) == {"version"}
    before = metrics(service_url)
    sdk.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True})

    def since(values: dict[str, float], name: str) -> float:
        return values.get(name, 0.0) - before.get(name, 0.0)  # a counter is there once it has counted

    # Counters of the engine come with its next statistics (and may bring tokens of earlier tests), those of the
    # gateway are there.
    after = wait_until(service_url, lambda values: since(values, "generation_tokens_total") >= 5)
    assert since(after, "generation_tokens_total") >= 5
    assert since(after, "request_success_total") == 1
    assert since(after, "inter_token_latency_seconds_count") == 4


def test_constraints_on_tokens(sdk: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    assert " Paris" in sdk.completions.create(**asked).choices[0].text
    for extra in ({"bad_words": ["Paris"]}, {"bad_words": [" Paris"]}):
        assert "Paris" not in sdk.completions.create(**asked, extra_body=extra).choices[0].text
    # The ids of " London", " Paris" and ".", by the tokenizer of the service.
    tokenizer = load_tokenizer(load_model_info(ModelConfig()))
    allowed = [tokenizer.encode(text)[0] for text in (" London", " Paris", ".")]
    text = sdk.completions.create(**asked, extra_body={"allowed_token_ids": allowed}).choices[0].text
    assert text.startswith(" Paris")
    assert text.replace(" London", "").replace(" Paris", "").replace(".", "") == ""


def test_embeddings_are_those_of_the_engine_alone(sdk: openai.OpenAI) -> None:
    texts = ["A cat sat on the mat.", "Stock markets fell on Monday."]
    answer = sdk.embeddings.create(model=MODEL, input=texts)
    vectors = np.array([each.embedding for each in answer.data], np.float32)
    plain = sdk.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    np.testing.assert_allclose(vectors, [each.embedding for each in plain.data], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    with LLM(max_model_len=256, num_kv_blocks=20) as llm:
        expected = np.array([output.embedding for output in llm.embed(texts, use_tqdm=False)])
        num_tokens = sum(len(output.prompt_token_ids) for output in llm.embed(texts, use_tqdm=False))
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens == num_tokens
    short = np.array(sdk.embeddings.create(model=MODEL, input=texts[0], dimensions=64).data[0].embedding)
    np.testing.assert_allclose(short, vectors[0, :64] / np.linalg.norm(vectors[0, :64]), atol=1e-5)
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.embeddings.create(model=MODEL, input="a", dimensions=577)
    assert bad.value.param == "dimensions"


async def test_embeddings_next_to_streams(async_sdk: openai.AsyncOpenAI, service_url: str) -> None:
    async def embed(i: int) -> list[float]:
        return (await async_sdk.embeddings.create(model=MODEL, input=f"Item {i} of a long list")).data[0].embedding

    async def generate(i: int) -> str:
        answer = await async_sdk.completions.create(model=MODEL, prompt=f"Item {i} is", temperature=0, max_tokens=8)
        return answer.choices[0].text

    vectors, texts = await asyncio.gather(
        asyncio.gather(*[embed(i) for i in range(12)]), asyncio.gather(*[generate(i) for i in range(6)])
    )
    for i in (0, 7):
        np.testing.assert_allclose(vectors[i], await embed(i), atol=1e-4)
    assert texts[2] == await generate(2)
    values = await asyncio.to_thread(wait_until_idle, service_url)
    assert values["num_used_kv_blocks"] == 0


def test_an_echo_scores_what_was_generated_as_it_was(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=2, extra_body={"return_token_ids": True}
    )
    generated = answer.choices[0].logprobs
    assert generated is not None
    extra = answer.choices[0].model_extra
    assert extra is not None
    whole = [*extra["prompt_token_ids"], *extra["token_ids"]]
    scored = sdk.completions.create(
        model=MODEL,
        prompt=whole,
        echo=True,
        logprobs=2,
        max_tokens=0,
        extra_body={"prompt_logprobs": 2},
    )
    logprobs, told = scored.choices[0].logprobs, (scored.choices[0].model_extra or {})["prompt_logprobs"]
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert generated.token_logprobs is not None
    assert scored.choices[0].text == PROMPT + answer.choices[0].text
    assert logprobs.tokens[-8:] == generated.tokens
    np.testing.assert_allclose(logprobs.token_logprobs[-8:], generated.token_logprobs, atol=1e-4)
    assert logprobs.token_logprobs[0] is None
    assert told[0] is None
    for token_id, value, position in zip(whole[1:], logprobs.token_logprobs[1:], told[1:], strict=True):
        assert position[str(token_id)]["logprob"] == pytest.approx(value)
    last = zip(whole[-8:], told[-8:], strict=True)
    assert [position[str(token_id)]["rank"] for token_id, position in last] == [1] * 8
    assert scored.usage is not None
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, len(whole))
