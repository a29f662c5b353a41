"""Every way in which a request can fail, by its exact body; the server answers the next request each time."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend

from quire.cluster.api import completions as completions_module
from quire.cluster.api.parsing import parse_request
from quire.cluster.api.protocol import ChatCompletionRequest
from quire.engine.errors import EngineError, InvalidRequestError, OverloadedError, TenantShareError

MODEL = "smollm2-135m-instruct"
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 50}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def error(message: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error") -> Any:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def still_answers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, DEFAULT_ANSWER)


# Fields, the field at fault, its code, the message.
CASES: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"temperature": "hot"}, "temperature", None, "temperature: must be a number, got 'hot'."),
    ({"temperature": 2.5}, "temperature", None, "temperature: must be a number >= 0 and <= 2, got 2.5."),
    ({"top_p": 0}, "top_p", None, "top_p: must be a number > 0 and <= 1, got 0.0."),
    ({"top_k": -2}, "top_k", None, "top_k: must be an integer from 0 to 2147483647, got -2."),
    ({"min_p": 1.5}, "min_p", None, "min_p: must be a number >= 0 and <= 1, got 1.5."),
    ({"presence_penalty": 3}, "presence_penalty", None, "presence_penalty: must be a number >= -2 and <= 2, got 3.0."),
    (
        {"repetition_penalty": 0},
        "repetition_penalty",
        None,
        "repetition_penalty: must be a number >= 0.01 and <= 100, got 0.0.",
    ),
    ({"n": 0}, "n", None, "n: must be an integer from 1 to 128, got 0."),
    ({"n": 33}, "n", None, "n: 33 answers in one request (prompts x n), at most 32 are allowed."),
    ({"seed": 2**63}, "seed", None, f"seed: must be an integer from {-(2**63)} to {2**63 - 1}, got {2**63}."),
    ({"stop": ["a"] * 17}, "stop", None, "stop: must hold at most 16 entries, got 17."),
    ({"stop": ""}, "stop", None, "stop: must be non-empty strings, got ''."),
    (
        {"stop_token_ids": [49152]},
        "stop_token_ids",
        None,
        "stop_token_ids: token ids must be from 0 to 49151, got 49152.",
    ),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", None, "stop_token_ids: must hold at most 128 entries, got 129."),
    (
        {"logit_bias": {str(i): 1 for i in range(301)}},
        "logit_bias",
        None,
        "logit_bias: must hold at most 300 entries, got 301.",
    ),
    ({"logit_bias": {"49152": 1}}, "logit_bias", None, "logit_bias: token ids must be from 0 to 49151, got 49152."),
    ({"logit_bias": {"1": 101}}, "logit_bias", None, "logit_bias: must be a number >= -100 and <= 100, got 101.0."),
    ({"model": "gpt-5"}, "model", "model_not_found", f"The model 'gpt-5' does not exist. Served here: {MODEL}."),
    ({"max_tokens": 1e300}, "max_tokens", None, "max_tokens: must be an integer of far fewer digits, got 1e+300."),
    (
        {"seed": -(10**400)},
        "seed",
        None,
        "seed: must be an integer of far fewer digits, got an even longer one.",
    ),
    ({"priority": 2**70}, "priority", None, f"priority: must be an integer from -1000000 to 1000000, got {2**70}."),
    ({"deadline_ms": 0}, "deadline_ms", None, "deadline_ms: must be an integer from 1 to 604800000, got 0."),
    ({"cache_salt": ""}, "cache_salt", None, "cache_salt: must have 1 to 256 characters, got 0."),
    ({"session_id": ""}, "session_id", None, "session_id: must have 1 to 256 characters, got 0."),
    (
        {"request_id": "a b"},
        "request_id",
        None,
        "request_id: must be 1 to 128 printable ASCII characters without spaces, got 'a b'.",
    ),
    (
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        None,
        "truncate_prompt_tokens: must be an integer from 1 to 1023, or -1 for what the context holds besides the "
        "answer; got 0.",
    ),
    ({"length_penalty": 2}, "length_penalty", None, "length_penalty: is allowed only with use_beam_search."),
    ({"use_beam_search": True, "top_k": 5}, "top_k", None, "top_k: does not work together with use_beam_search."),
    (
        {"use_beam_search": True, "temperature": 0.5},
        "temperature",
        None,
        "temperature: must be 0 with use_beam_search, which draws nothing; got 0.5.",
    ),
    ({"use_beam_search": True, "n": 11}, "n", None, "n: at most 10 are allowed with use_beam_search, got 11."),
    ({"max_token": 5}, "max_token", "unknown_field", "max_token: is not a known field. Did you mean 'max_tokens'?"),
]
COMPLETION_CASES: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"prompt": ""}, "prompt", None, "prompt: must not be empty."),
    (
        {"best_of": 33},
        "best_of",
        None,
        "best_of: 33 answers in one request (prompts x best_of), at most 32 are allowed.",
    ),
    ({"prompt": [1, 49152]}, "prompt", None, "prompt: token ids must be from 0 to 49151, got 49152."),
    (
        {"prompt": [1] * 1024},
        "prompt",
        "context_length_exceeded",
        "prompt: 1024 tokens given, at most 1023 are allowed: the model's context is 1024 tokens, and one is needed "
        "for the answer.",
    ),
    (
        {"max_tokens": 1021},
        "max_tokens",
        "context_length_exceeded",
        "max_tokens: must be an integer from 1 to 1020, what the context leaves after the prompt; got 1021.",
    ),
    (
        {"prompt": ["a"] * 33},
        "prompt",
        None,
        "prompt: 33 answers in one request (prompts x n), at most 32 are allowed.",
    ),
    ({"logprobs": 21}, "logprobs", None, "logprobs: must be an integer from 0 to 20, got 21."),
    (
        {"tools": [{"type": "function"}]},
        "tools",
        "unsupported",
        "tools: is a field of /v1/chat/completions only, got [{'type': 'function'}].",
    ),
    (
        {"suffix": "x"},
        "suffix",
        "unsupported",
        "suffix: is not supported: no model served here fills in a middle, got 'x'.",
    ),
    ({"best_of": 1, "n": 2}, "best_of", None, "best_of: must be an integer from n (2) to 128, got 1."),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "case"),
    [
        *(((path, body, case)) for path, body in ENDPOINTS for case in CASES),
        *((*ENDPOINTS[0], case) for case in COMPLETION_CASES),
    ],
)
async def test_a_request_that_cannot_work(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], case: Any, streamed: bool
) -> None:
    """The same status and body with `stream: true`, never a stream."""
    fields, param, code, message = case
    response = await client.post(path, json={**body, **fields, "stream": streamed})
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert response.headers["content-type"] == "application/json"
    assert response.json() == error(message, param, code)
    assert backend.requests == []
    await still_answers(client)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The body is not valid JSON: Input data was truncated."),
        (b'{"model": ', "The body is not valid JSON: Input data was truncated."),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "hi \\ud83d"}]}',
            "The body holds half of a UTF-16 surrogate pair, which is not a character.",
        ),
        (
            b'{"temperature": 1e400}',
            "The body holds a number that is too large: Number out of range - at `$[...]`.",
        ),
        (b'{"a":"\\\\ud83d"', "The body is not valid JSON: Input data was truncated."),
        (b'{"a":"\\ud83d\\ude00"', "The body is not valid JSON: Input data was truncated."),
        (b'{"\\ud800":1}', "The body holds half of a UTF-16 surrogate pair, which is not a character."),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", "The body holds lists and objects too deep in each other."),
        (b"hello", "The body is not valid JSON: JSON is malformed: invalid character (byte 0)."),
        (
            b'{"model": "\\udc00"}',
            "The body holds half of a UTF-16 surrogate pair, which is not a character (byte 17).",
        ),
        (b"[1, 2]", "The body must be a JSON object, got [1, 2]."),
    ],
)
async def test_bodies_that_are_not_json(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], content: bytes, message: str
) -> None:
    response = await client.post(path, content=content)
    assert response.status_code == 400
    assert response.json() == error(message, None, "invalid_body" if content.startswith(b"[") else "invalid_json")
    await still_answers(client)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1] * 60_000}, "messages"),
        ({"messages": [1] * 4096}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [1] * 60_000}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", **{f"x{i}": 1 for i in range(20_000)}}]}, None),
        ({"stop": [1] * 60_000}, "stop"),
        ({"stop_token_ids": ["a"] * 40_000}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(map(str, range(18_000)), "a")}, "logit_bias"),
        ({"tools": [[1] * 90_000]}, "tools[0]"),
        ({"tools": [1] * 60_000}, "tools"),
        ({"documents": [1] * 60_000}, "documents"),
        ({"chat_template_kwargs": dict.fromkeys(map(str, range(18_000)))}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "tool_calls": [1] * 60_000}]}, "messages[0].tool_calls"),
    ],
)
def test_a_large_body_of_mistakes_costs_as_much_as_one(fields: dict[str, Any], param: str | None) -> None:
    """By what is allocated, which is exact where seconds are not: one record per mistake would take 100 times this."""
    body = json.dumps({**CHAT, **fields}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            parse_request(ChatCompletionRequest, body)
        assert tracemalloc.get_traced_memory()[1] < 20 * len(body)
    finally:
        tracemalloc.stop()
    assert param is None or caught.value.param == param
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("size", "in_loop"), [(100, True), (20_000, False)])
async def test_what_takes_long_is_done_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, size: int, in_loop: bool
) -> None:
    """Parsing and tokenizing, by the size of the whole body: many short prompts are as long as one long one."""
    threads: dict[str, int] = {}

    def noting(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(completions_module, "parse_request", noting("parse", completions_module.parse_request))
    monkeypatch.setattr(completions_module, "tokenize", noting("tokenize", completions_module.tokenize))
    body = {**COMPLETION, "max_tokens": 1, "prompt": ["word " * (size // 40)] * 8}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert {name: ident == threading.get_ident() for name, ident in threads.items()} == {
        "parse": in_loop,
        "tokenize": in_loop,
    }


async def test_sampling_parameters_are_built_once_per_request(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {**COMPLETION, "prompt": ["a", "b c d", [1, 2]], "n": 2, "stop_token_ids": [7] * 128}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    first, *others = backend.requests
    assert len(others) == 5
    assert all(request.sampling_params is first.sampling_params for request in others)


@pytest.mark.parametrize("given", [{}, {"model": None, "messages": None}], ids=["missing", "null"])
@pytest.mark.parametrize("field", ["model", "messages"])
async def test_a_missing_field(client: httpx.AsyncClient, field: str, given: dict[str, None]) -> None:
    rest = {key: CHAT[key] for key in CHAT if key != field}
    response = await client.post("/v1/chat/completions", json={**given, **rest})
    assert (response.status_code, response.json()) == (400, error(f"{field}: is required.", field, "missing_field"))


async def test_a_chat_longer_than_the_context(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "word " * 2000}]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    detail = response.json()["error"]
    assert (response.status_code, detail["param"], detail["code"]) == (400, "messages", "context_length_exceeded")
    await still_answers(client)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large(client: httpx.AsyncClient, declared: bool) -> None:
    content = json.dumps({**COMPLETION, "prompt": "x" * 200_000}).encode()

    async def in_pieces() -> Any:
        for start in range(0, len(content), 50_000):
            yield content[start : start + 50_000]

    response = await client.post("/v1/completions", content=content if declared else in_pieces())
    assert response.status_code == 413
    assert response.json() == error("The body is too large: at most 200000 bytes are allowed.", None, "body_too_large")
    await still_answers(client)


@pytest.mark.parametrize("bound", ["_BODY_IDLE_S", "_BODY_S"])
async def test_a_body_that_does_not_come(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Whoever has sent half of it must not have a connection for as long as it likes, nor who sends byte by byte."""
    monkeypatch.setattr(f"quire.cluster.api.context.{bound}", 0.05)
    left = asyncio.Event()

    async def half() -> Any:
        yield b'{"model":'
        if bound == "_BODY_IDLE_S":
            await left.wait()
        while True:
            yield b" "
            await asyncio.sleep(0.001)

    response = await client.post("/v1/completions", content=half())
    assert response.status_code == 408
    idle_s, whole_s = (0.05, 300) if bound == "_BODY_IDLE_S" else (30, 0.05)
    message = (
        f"The body of the request is not complete: nothing more of it came for {idle_s} s, or it took more than "
        f"{whole_s} s."
    )
    assert response.json() == {
        "error": {"message": message, "type": "timeout_error", "param": None, "code": "body_incomplete"}
    }
    await still_answers(client)


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_more_prompts_than_allowed_are_not_looked_at(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """A body has room for millions."""

    def look(*_: object) -> None:
        raise AssertionError("they were")

    monkeypatch.setattr("quire.cluster.api.protocol.prompts._is_token_ids", look)
    response = await client.post(path, json={"model": MODEL, field: [[1]] * 40_000})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: ")
    assert "40000" in response.json()["error"]["message"]


@pytest.mark.parametrize("end", [b"]}", b""])
async def test_the_collector_waits_for_a_large_body(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    decode, collects = msgspec.json.decode, []
    monkeypatch.setattr("msgspec.json.decode", lambda body: collects.append(gc.isenabled()) or decode(body))
    assert (await client.post("/v1/completions", content=b'{"prompt":[' + b"[1]," * 20_000 + b"[1]" + end)).is_error
    assert gc.isenabled()
    await client.post("/v1/completions", json=COMPLETION)
    assert collects == [False, True]


async def test_unknown_paths_and_methods(client: httpx.AsyncClient) -> None:
    response = await client.get("/v2/models")
    assert (response.status_code, response.json()) == (404, error("Not Found: GET /v2/models does not exist."))
    response = await client.get("/" + "x" * 5000)
    message = f"Not Found: GET /{'x' * 199} does not exist."
    assert (response.status_code, response.json()) == (404, error(message))
    response = await client.get("/v1/completions")
    assert (response.status_code, response.json()) == (405, error("Method Not Allowed: GET /v1/completions."))
    assert response.headers["allow"] == "POST"
    response = await client.get("/v1/models/gpt-5")
    message = f"The model 'gpt-5' does not exist. Served here: {MODEL}."
    assert (response.status_code, response.json()) == (404, error(message, "model", "model_not_found"))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("refusal", "status", "expected"),
    [
        (
            OverloadedError("The queue is full.", 2.5),
            503,
            error("The queue is full.", None, "overloaded", "server_error"),
        ),
        (
            TenantShareError("The queue is full.", 2.5),
            429,
            error("The queue is full.", None, "tenant_over_share", "requests"),
        ),
        (InvalidRequestError("prompt: no.", "prompt"), 400, error("prompt: no.", "prompt")),
        (EngineError("No engine is left."), 500, error("No engine is left.", kind="server_error")),
        (
            ZeroDivisionError("secret"),
            500,
            error("The service failed while it worked on this request.", kind="server_error"),
        ),
    ],
)
async def test_a_refusal_before_the_first_token_is_an_http_error(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    body: dict[str, Any],
    refusal: Exception,
    status: int,
    expected: Any,
    streamed: bool,
) -> None:
    backend.refusal = refusal
    response = await client.post(path, json={**body, "stream": streamed})
    assert (response.status_code, response.json()) == (status, expected)
    assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    backend.refusal = None
    await still_answers(client)


class Escape(asyncio.CancelledError):
    """What an endpoint waited for was cancelled, and not the request."""


@pytest.mark.parametrize("escaped", [ZeroDivisionError("secret"), Escape("secret")])
async def test_what_escapes_an_endpoint_is_told_in_shape_counted_and_logged(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture, escaped: BaseException
) -> None:
    backend.refusal = escaped  # type: ignore[assignment]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    response = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
    assert response.json() == error("The service failed while it worked on this request.", kind="server_error")
    assert response.headers["x-request-id"] == "mine"
    (record,) = [each for each in caplog.records if "failed unexpectedly" in each.message]
    assert "POST /v1/completions (x-request-id mine)" in record.message
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    assert type(escaped).__name__ in caplog.text
    backend.refusal = None
    answered = 'quire:http_requests_total{gateway="gateway",handler="/v1/completions",method="POST",status="500"} 1.0'
    assert answered in (await client.get("/metrics")).text
    await still_answers(client)


@pytest.mark.parametrize("gate", ["no engine", "stuck engine"])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_deadline_that_no_engine_keeps(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], gate: str
) -> None:
    """Time counts from the arrival of a request, also while it waits for an engine."""
    if gate == "no engine":
        backend.answers_nothing = asyncio.Event()
    else:
        backend.gate.clear()
    fields = {**body, "deadline_ms": 50}
    response = await asyncio.wait_for(client.post(path, json=fields), 10)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    response = await asyncio.wait_for(client.post(path, json={**fields, "stream": True}), 10)
    if gate == "no engine":
        assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    else:
        last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
        assert (response.status_code, last["error"]["code"]) == (200, "deadline_exceeded")
        assert not backend.running
    metrics = (await client.get("/metrics")).text
    assert f'quire:request_success_total{{finished_reason="deadline",gateway="gateway",model_name="{MODEL}"}} 2.0' in (
        metrics
    )
    backend.answers_nothing = None
    backend.gate.set()
    await still_answers(client)


async def test_a_deadline_that_passes_in_the_queue_of_templates(client: httpx.AsyncClient) -> None:
    slow = {**CHAT, "chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}
    response = await client.post("/v1/chat/completions", json={**slow, "deadline_ms": 100})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    await still_answers(client)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_deadline_that_passes(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    """408, or the last event of a stream that had begun."""
    message = "deadline_ms: the time that the request allowed has passed before its answer was complete."
    expected = error(message, "deadline_ms", "deadline_exceeded", "timeout_error")
    fields = {**body, "deadline_ms": 500}
    backend.deadline_after = 1
    for streamed in (False, True):
        response = await client.post(path, json={**fields, "stream": streamed})
        assert (response.status_code, response.json()) == (408, expected)
    backend.deadline_after = 4
    response = await client.post(path, json={**fields, "stream": True})
    assert response.status_code == 200
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: ")) == expected
    assert [request.deadline_ms for request in backend.requests] == [500] * 3
    assert not backend.running
    metrics = (await client.get("/metrics")).text
    assert f'quire:request_success_total{{finished_reason="deadline",gateway="gateway",model_name="{MODEL}"}} 3.0' in (
        metrics
    )
    backend.deadline_after = None
    await still_answers(client)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("Its grammar failed.", "Its grammar failed."),
        (EngineError("No engine is left."), "No engine is left."),
        (ZeroDivisionError("secret"), "The service failed while it worked on this request."),
    ],
)
async def test_an_error_after_the_stream_began_is_its_last_event(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], failure: Any, message: str
) -> None:
    backend.failure = failure
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: ")) == error(message, kind="server_error")
    whole = await client.post(path, json=body)
    assert (whole.status_code, whole.json()) == (500, error(message, kind="server_error"))
    assert not backend.running
    backend.failure = None
    await still_answers(client)
