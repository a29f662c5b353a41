"""/v1/embeddings on a fake backend: exact bodies, every form of input, and errors that name the field."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from fake_backend import FakeBackend

from quire.cluster.api.backend import ServedModel
from quire.engine.errors import EngineError, OverloadedError
from quire.engine.outputs import EngineOutput, EngineRequest, RequestReport
from quire.engine.pooling import PoolingParams

MODEL = "smollm2-135m-instruct"
BODY = {"model": MODEL, "input": "Once upon a time"}


def ids_of(served: ServedModel, text: str) -> list[int]:
    return served.input_processor.tokenize(text)


async def embed(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/embeddings", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_openais_shape(client: httpx.AsyncClient, served: ServedModel) -> None:
    total = sum(ids_of(served, "Once upon a time")) + 1 / 1024
    assert await embed(client, dimensions=3, user="me") == {
        "object": "list",
        "model": MODEL,
        "data": [{"object": "embedding", "index": 0, "embedding": [total] * 3}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


async def test_every_form_of_input(client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel) -> None:
    a, b = ids_of(served, "a"), ids_of(served, "b c")
    for given, expected in (
        ("a", [a]),
        (["a", "b c"], [a, b]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], "a", [7]], [[5, 6], a, [7]]),
    ):
        backend.requests.clear()
        answer = await embed(client, input=given, dimensions=1)
        assert [request.prompt_token_ids for request in backend.requests] == expected
        assert [(each["index"], each["embedding"]) for each in answer["data"]] == [
            (i, [sum(ids) + 1 / 1024]) for i, ids in enumerate(expected)
        ]
        num_tokens = sum(map(len, expected))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_many_inputs_do_not_fill_the_engines_queue(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    most, generate = 0, backend.generate

    def counted(model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        nonlocal most
        most = max(most, len(requests))
        return generate(model, requests)

    backend.generate = counted  # type: ignore[method-assign]
    answer = await embed(client, input=[[1 + i] for i in range(300)], dimensions=1)
    assert [each["embedding"] for each in answer["data"]] == [[1 + i + 1 / 1024] for i in range(300)]
    assert len(backend.requests) == 300
    assert most <= 256


async def test_what_a_full_queue_refuses_amid_many_inputs_is_asked_for_again(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    calls: list[int] = []

    async def sometimes_full(model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        calls.append(len(requests))
        outputs = generate(model, requests)
        if len(calls) == 2:
            yield (await anext(outputs))[:10]  # of 44, and no room for the others
            await outputs.aclose()
            raise OverloadedError("The queue is full.", 0.01)
        async for each in outputs:
            yield each

    generate, backend.generate = backend.generate, sometimes_full  # type: ignore[method-assign]
    answer = await embed(client, input=[[1 + i] for i in range(300)], dimensions=1)
    assert [each["embedding"] for each in answer["data"]] == [[1 + i + 1 / 1024] for i in range(300)]
    assert calls == [256, 44, 34]


async def test_base64_is_of_the_same_numbers(client: httpx.AsyncClient) -> None:
    plain = (await embed(client))["data"][0]["embedding"]
    encoded = (await embed(client, encoding_format="base64"))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == plain
    assert len(plain) == 576


async def test_what_the_engine_is_told(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await embed(client)
    backend.served = dataclasses.replace(backend.served, has_priorities=True)
    await embed(client, dimensions=8, normalize=False, priority=3, deadline_ms=500, cache_salt="s", session_id="x")
    first, second = backend.requests
    assert first.pooling == PoolingParams(type="last", normalize=True)
    assert second.pooling == PoolingParams(type="last", normalize=False, dimensions=8)
    assert (second.priority, second.deadline_ms, second.cache_salt, second.session_id) == (3, 500, "s", "x")
    assert second.sampling_params.max_tokens == 0


async def test_long_inputs_keep_their_first_tokens(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel
) -> None:
    whole = ids_of(served, "Once upon a time")
    await embed(client, truncate_prompt_tokens=2)
    await embed(client, input=whole, truncate_prompt_tokens=3)
    await embed(client, input="word " * 3000, truncate_prompt_tokens=-1)
    await embed(client, truncate_prompt_tokens=1024)
    lengths = [len(request.prompt_token_ids) for request in backend.requests]
    assert lengths == [2, 3, 1024, 4]
    assert [backend.requests[0].prompt_token_ids, backend.requests[1].prompt_token_ids] == [whole[:2], whole[:3]]


async def test_special_tokens_at_the_end_stay(served: ServedModel) -> None:
    """Some embedding models read the EOS that their tokenizer appends."""
    from tokenizers import Tokenizer, processors

    from quire.cluster.api.embeddings import _token_ids
    from quire.cluster.api.protocol import EmbeddingRequest

    tokenizer = Tokenizer.from_str(served.tokenizer.backend_tokenizer.to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )

    class Ends:
        tokenizer = type("T", (), {"backend_tokenizer": None})
        input_processor = served.input_processor

    Ends.tokenizer.backend_tokenizer = tokenizer  # type: ignore[attr-defined]

    def ids(longest: int | None, **fields: Any) -> list[int]:
        request = EmbeddingRequest(model=MODEL, input="", truncate_prompt_tokens=longest, **fields)
        return _token_ids(Ends, request, "Once upon a time")  # type: ignore[arg-type]

    text = ids_of(served, "Once upon a time")
    assert ids(None) == [1, *text, 2]
    assert ids(6) == [1, *text, 2]
    assert ids(4) == [1, *text[:2], 2]
    assert ids(1) == [2]
    assert ids(3, add_special_tokens=False) == text[:3]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "input: must not be empty."),
        ({"input": []}, "input", "input: must not be empty."),
        ({"input": ["a", ""]}, "input", "input: must not be empty."),
        (
            {"input": [[1], []]},
            "input",
            "input: must be a string, a list of token ids, or a list of either, and none of them empty.",
        ),
        (
            {"input": {"text": "a"}},
            "input",
            "input: must be a string, a list of token ids, or a list of either, and none of them empty.",
        ),
        ({"input": [1, 10**6]}, "input", "input: token ids must be from 0 to 49151, got 1000000."),
        ({"input": ["a"] * 2049}, "input", "input: must hold at most 2048 entries, got 2049."),
        (
            {"input": [1] * 1025},
            "input",
            "input: 1025 tokens given, at most 1024 are allowed: the model's context is 1024 tokens.",
        ),
        ({"dimensions": 0}, "dimensions", "dimensions: must be an integer >= 1, got 0."),
        (
            {"dimensions": 577},
            "dimensions",
            "dimensions: must be an integer from 1 to 576, the model's own size, got 577.",
        ),
        (
            {"encoding_format": "int8"},
            "encoding_format",
            "encoding_format: must be 'float' or 'base64', got 'int8'.",
        ),
        (
            {"truncate_prompt_tokens": 1025},
            "truncate_prompt_tokens",
            "truncate_prompt_tokens: must be an integer from 1 to 1024, or -1 for what the context holds; got 1025.",
        ),
        (
            {"input": [10**25]},
            "input",
            "input: token ids must be from 0 to 49151, got 10000000000000000000000000.",
        ),
        (
            {"input": [[1], [2**63]]},
            "input",
            "input: token ids must be from 0 to 49151, got 9223372036854775808.",
        ),
        ({"normalize": "yes"}, "normalize", "normalize: must be true or false, got 'yes'."),
        ({"stream": True}, "stream", "stream: is not a known field. Did you mean 'store'?"),
        ({"model": "gpt-5"}, "model", "The model 'gpt-5' does not exist. Served here: smollm2-135m-instruct."),
        (
            {"priority": 10**7},
            "priority",
            "priority: must be an integer from -1000000 to 1000000, got 10000000.",
        ),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await client.post("/v1/embeddings", json={**BODY, **fields})
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (param, message)
    assert backend.requests == []
    assert len((await embed(client))["data"]) == 1


async def test_failures_are_told(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    async def status(expected: int, message: str) -> None:
        response = await client.post("/v1/embeddings", json={**BODY, "input": ["a", "b"]})
        assert (response.status_code, response.json()["error"]["message"]) == (expected, message)
        assert backend.running == {}

    backend.refusal = OverloadedError("The queue is full.", 3.0)
    await status(503, "The queue is full.")
    backend.refusal = None
    backend.failure, backend.failure_after = "It failed.", 0
    await status(500, "It failed.")
    backend.failure = EngineError("All are gone.")
    await status(500, "All are gone.")
    backend.failure = None
    backend.deadline_after = 0
    response = await client.post("/v1/embeddings", json=BODY)
    assert response.status_code == 408
    backend.deadline_after = None
    assert len((await embed(client))["data"]) == 1


async def test_metrics_count_inputs_as_answers_without_tokens(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.report = RequestReport(wall_s=1.0, compute_s=0.75, wait_s={"KV_BLOCKS": 0.25})
    await embed(client, input=["a", "b c", "d"])
    text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def total(name: str, **labels: str) -> float:
        return sum(
            float(value)
            for key, value in values.items()
            if key.split("{")[0] == f"quire:{name}" and all(f'{k}="{v}"' in key for k, v in labels.items())
        )

    assert total("request_success_total", finished_reason="stop") == 3
    assert total("request_success_total") == 3
    assert total("e2e_request_latency_seconds_count") == 3
    assert total("time_to_first_token_seconds_count") == 0
    assert total("request_prompt_tokens_sum") == 4
    assert total("request_prompt_tokens_count") == 3
    assert total("request_inference_time_seconds_sum") == 2.25
