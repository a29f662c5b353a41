"""The gRPC service on a fake backend, through a real gRPC server: calls mean what HTTP's requests mean."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from test_completions import REPORT

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.keys import KeyRing
from quire.cluster.api.protocol import ChatCompletionRequest, CompletionRequest
from quire.cluster.api.protocol.tokenization import TokenizePromptRequest
from quire.cluster.grpc import quire_inference_pb2 as pb
from quire.cluster.grpc.quire_inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from quire.cluster.grpc.service import GrpcError, InferenceService
from quire.engine.errors import EngineError, OverloadedError

MODEL = "smollm2-135m-instruct"
KEY = "sk-grpc-12345"


class Servicer:
    """The service as gRPC calls it; in a gateway Ray Serve does."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in self._service.generate(request, context):
                yield response
        except GrpcError:
            pass  # the status is set

    async def Tokenize(self, request: Any, context: Any) -> Any:
        try:
            return await self._service.tokenize(request, context)
        except GrpcError:
            return pb.TokenizeResponse()

    async def Health(self, request: Any, context: Any) -> Any:
        try:
            return await self._service.health(request, context)
        except GrpcError:
            return pb.HealthResponse()


async def stub_of(app: Any) -> AsyncIterator[InferenceStub]:
    server = grpc.aio.server()
    add_InferenceServicer_to_server(Servicer(InferenceService(app)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield InferenceStub(channel)
    await server.stop(0)


@pytest.fixture
async def stub(backend: FakeBackend) -> AsyncIterator[InferenceStub]:
    async for found in stub_of(create_app(backend)):
        yield found


def conversation(text: str = "hi") -> pb.Conversation:
    return pb.Conversation(messages=[pb.Message(role="user", content=text)])


async def everything(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def refused(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (everything(call) if hasattr(call, "__aiter__") else call)
    error = caught.value
    told = {key: str(value) for key, value in error.trailing_metadata() or ()}
    return error.code(), error.details() or "", told


INPUTS = [
    {"prompt": "Once upon a time"},
    {"prompt_token_ids": pb.TokenIds(ids=[1, 2])},
    {"conversation": conversation()},
]


@pytest.mark.parametrize("given", INPUTS, ids=["text", "ids", "conversation"])
async def test_a_stream_and_a_whole_answer(stub: InferenceStub, backend: FakeBackend, given: Any) -> None:
    request = pb.GenerateRequest(model=MODEL, max_tokens=100, return_token_ids=True, n=2, **given)
    responses = await everything(stub.Generate(request))
    texts, ids = ["", ""], [[], []]  # type: list[str], list[list[int]]
    for response in responses:
        for choice in response.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
    assert texts[0] == DEFAULT_ANSWER
    assert ids == [[*backend.answer_ids[i:], 2] for i in range(2)]
    request.stream = False
    [whole] = await everything(stub.Generate(request))
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.usage == responses[-1].usage
    assert whole.usage.completion_tokens == 2 * len(backend.answer_ids) + 1
    prompt = backend.requests[0].prompt_token_ids
    assert list(responses[0].prompt_token_ids)[: len(prompt)] == prompt
    assert not any(response.HasField("usage") for response in responses[:-1])


async def test_every_field_arrives(stub: InferenceStub, backend: FakeBackend) -> None:
    backend.report = REPORT
    backend.served = dataclasses.replace(backend.served, has_priorities=True)
    request = pb.GenerateRequest(
        model=MODEL,
        prompt="a",
        max_tokens=3,
        min_tokens=1,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        seed=9,
        stop=["@x", "@y"],
        stop_token_ids=[5],
        logit_bias={7: -1.5},
        ignore_eos=False,
        logprobs=2,
        include_report=True,
        request_id="mine",
        session_id="s",
        priority=-1,
        stream=False,
    )
    [answer] = await everything(stub.Generate(request))
    [told] = backend.requests
    params = told.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.0, 0.5, 7, 9)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("@x", "@y"), (5,), {7: -1.5})
    assert (told.session_id, told.priority, answer.id) == ("s", -1, "cmpl-mine")
    assert [len(entry.top) for entry in answer.choices[0].logprobs] == [2, 2, 2]
    assert '"kv_blocks": 0.5' in answer.choices[0].report_json
    request.ClearField("prompt")
    request.conversation.CopyFrom(conversation())
    [chat] = await everything(stub.Generate(request))
    assert [entry.token for entry in chat.choices[0].logprobs] == [e.token for e in answer.choices[0].logprobs]


async def test_tokenize_and_health(stub: InferenceStub, backend: FakeBackend, served: ServedModel) -> None:
    tokens = served.input_processor.tokenize("hello there", add_special_tokens=False)
    answer = await stub.Tokenize(pb.TokenizeRequest(prompt="hello there", return_token_strs=True))
    assert (list(answer.tokens), answer.count, answer.max_model_len) == (tokens, len(tokens), 1024)
    assert len(answer.token_strs) == len(tokens)
    chat = await stub.Tokenize(pb.TokenizeRequest(model=MODEL, conversation=conversation()))
    await everything(stub.Generate(pb.GenerateRequest(model=MODEL, conversation=conversation(), max_tokens=1)))
    assert list(chat.tokens) == backend.requests[0].prompt_token_ids
    assert (await stub.Health(pb.HealthRequest())).status == "ok"
    backend.unhealthy = "No step for 12 s."
    code, message, told = await refused(stub.Health(pb.HealthRequest()))
    assert (code, "No step for 12 s." in message) == (grpc.StatusCode.UNAVAILABLE, True)
    assert told["retry-after"] == "1"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "gpt-5", "prompt": "a"}, grpc.StatusCode.NOT_FOUND),
        ({"model": MODEL}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "prompt": "a", "temperature": 3}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "prompt": "a", "stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "conversation": conversation(), "logprobs": 21}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "conversation": pb.Conversation()}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": MODEL, "conversation": conversation(), "best_of": 2}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_errors_are_those_of_http(
    stub: InferenceStub, client: httpx.AsyncClient, fields: dict[str, Any], code: grpc.StatusCode, streamed: bool
) -> None:
    from quire.cluster.grpc.translation import generate_body

    request = pb.GenerateRequest(**fields, stream=streamed)
    path, body = generate_body(request)
    expected = (await client.post(path, json=body)).json()["error"]
    found = await refused(stub.Generate(request))
    assert found[:2] == (code, expected["message"])
    assert found[2].get("param") == expected["param"]
    assert found[2].get("code") == expected["code"]
    [answer] = await everything(stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=1, stream=False)))
    assert answer.choices[0].finish_reason == "length"


async def test_a_field_that_should_be_json(stub: InferenceStub) -> None:
    request = pb.GenerateRequest(model=MODEL, prompt="a", structured_outputs_json="{")
    code, message, _ = await refused(stub.Generate(request))
    assert (code, message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "structured_outputs_json: is not valid JSON: Input data was truncated.",
    )


@pytest.mark.parametrize(
    ("name", "param"), [("日本", r"\u65e5\u672c"), ("a\nb\x7f", r"a\nb\x7f"), ("é", r"\xe9"), ("foo", "foo")]
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_field_of_any_name_is_refused_by_it(stub: InferenceStub, name: str, param: str, streamed: bool) -> None:
    """Metadata hold printable ASCII alone."""
    given = json.dumps({"type": "text", name: 1})
    request = pb.GenerateRequest(model=MODEL, prompt="a", stream=streamed, response_format_json=given)
    code, message, told = await refused(stub.Generate(request))
    assert (code, told["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, f"response_format.{param}")
    assert message == f"response_format.{name}: is not a known field."


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_what_json_has_no_number_for_is_refused(stub: InferenceStub, value: float) -> None:
    for fields in ({"temperature": value}, {"logit_bias": {5: value}}):
        code, message, told = await refused(stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a", **fields)))
        [name] = fields
        assert (code, told["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, name)
        assert message.startswith(f"{name}: must ")


async def test_a_stream_whose_events_have_ids(stub: InferenceStub) -> None:
    request = pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=100)
    plain = await everything(stub.Generate(request))
    named = await everything(stub.Generate(request, metadata=(("x-request-id", "abc"),)))
    texts = ["".join(each.text for response in found for each in response.choices) for found in (plain, named)]
    assert texts == [DEFAULT_ANSWER] * 2


async def test_the_first_token_of_a_prompt_has_no_logprob(stub: InferenceStub) -> None:
    request = pb.GenerateRequest(model=MODEL, prompt="Once upon", max_tokens=1, echo=True, logprobs=1, stream=False)
    [answer] = await everything(stub.Generate(request))
    first, *others = answer.choices[0].logprobs
    assert not first.HasField("logprob")
    assert others
    assert all(each.HasField("logprob") for each in others)


async def test_failures_before_and_after_the_first_token(stub: InferenceStub, backend: FakeBackend) -> None:
    request = pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=50)
    backend.refusal = OverloadedError("The queue is full.", 2.5)
    code, message, told = await refused(stub.Generate(request))
    assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "The queue is full.")
    assert told["retry-after"] == "3"
    backend.refusal = None
    backend.failure = EngineError("No engine is left.")
    assert (await refused(stub.Generate(request)))[:2] == (grpc.StatusCode.INTERNAL, "No engine is left.")
    backend.failure, backend.deadline_after = None, 3
    request.deadline_ms = 100
    code, message, _ = await refused(stub.Generate(request))
    assert (code, message.startswith("deadline_ms: ")) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
    assert not backend.running


async def test_leaving_a_call_aborts_it(stub: InferenceStub, backend: FakeBackend) -> None:
    backend.gate.clear()
    call = stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=50))
    await anext(aiter(call))
    assert len(backend.running) == 1
    call.cancel()
    await asyncio.wait_for(backend.closed_early.wait(), 5)
    assert not backend.running
    backend.gate.set()
    assert await everything(stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=5)))


async def test_keys(backend: FakeBackend, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants: [{{name: a, key: {KEY}, requests_per_minute: 1}}]")
    request = pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=1)
    async for stub in stub_of(create_app(backend, keys=KeyRing(path))):
        code, message, _ = await refused(stub.Generate(request))
        assert (code, "No API key was given" in message) == (grpc.StatusCode.UNAUTHENTICATED, True)
        metadata = (("authorization", f"Bearer {KEY}"),)
        assert await everything(stub.Generate(request, metadata=metadata))
        assert backend.requests[0].tenant == "a"
        code, _, told = await refused(stub.Generate(request, metadata=metadata))
        assert (code, told["code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
        assert (await stub.Health(pb.HealthRequest())).status == "ok"


# What a request can say over HTTP and not here, and why.
ONLY_OVER_HTTP = {
    "stream_options",  # the usage is always in the last message
    "max_completion_tokens",  # max_tokens
    "prompt_cache_key",  # session_id
    "top_logprobs",  # logprobs
    "messages",  # conversation
    "documents",
    "prompt_logprobs",
    "include_reasoning",
    "add_special_tokens",
}


def test_what_http_takes_is_in_the_proto() -> None:
    def names(message: Any) -> set[str]:
        return {field.name.removesuffix("_json") for field in message.DESCRIPTOR.fields}

    here = names(pb.GenerateRequest) | names(pb.Conversation)
    assert set(CompletionRequest.model_fields) | set(ChatCompletionRequest.model_fields) <= here | ONLY_OVER_HTTP
    assert set(TokenizePromptRequest.model_fields) <= names(pb.TokenizeRequest)


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="needs grpcio-tools")
def test_the_generated_code_is_that_of_the_proto(repo_root: Path, tmp_path: Path) -> None:
    """`make proto` writes it. The generator's version is in it, and may differ."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, "proto/quire_inference.proto"]
    subprocess.run(command, cwd=repo_root, check=True)
    for name in ("quire_inference_pb2.pyi", "quire_inference_pb2.py"):
        fresh, kept = ((folder / name).read_text() for folder in (tmp_path, repo_root / "cluster/grpc"))
        assert [line for line in fresh.splitlines() if "b'" in line or ":" in line] == [
            line for line in kept.splitlines() if "b'" in line or ":" in line
        ]
