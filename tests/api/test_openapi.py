"""/openapi.json says what the endpoints really take and answer, and generated requests cannot make the service fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from fake_backend import FakeBackend
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from live_server import LiveServer
from schemathesis import GenerationMode
from test_completions import CHAT, COMPLETION

from quire.cluster.api.app import create_app
from quire.cluster.api.openapi import ENDPOINTS, document
from quire.cluster.api.parsing import HARMLESS, REFUSED
from quire.cluster.api.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from quire.engine.outputs import RequestReport

DOCUMENT = json.loads(json.dumps(document()))
EXAMPLES_PER_OPERATION = 40


def schema_of(reference: str) -> dict[str, Any]:
    return {"$ref": reference, "components": DOCUMENT["components"]}


def answer_schema(path: str, method: str = "post", status: str = "200") -> dict[str, Any]:
    content = DOCUMENT["paths"][path][method]["responses"][status]["content"]
    return schema_of(content["application/json"]["schema"]["$ref"])


async def test_every_route_is_described_and_every_description_is_a_route(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    served = (await client.get("/openapi.json")).json()
    assert served == DOCUMENT
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in create_app(backend).routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods
    }
    assert routes == {(path, method) for path, methods in served["paths"].items() for method in methods}


async def test_the_docs_page_names_everything_and_loads_nothing(client: httpx.AsyncClient) -> None:
    """It is read where there is no network but the service's."""
    page = await client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in page.text
            assert operation["summary"] in page.text
    for name in CompletionRequest.model_fields:
        assert f"<code>{name}</code>" in page.text
    assert re.findall(r"(?:href|src|action)=\W?([^\"' >]+)", page.text) == ["openapi.json"]
    assert not re.search(r"<(script|link|img|iframe)|https?:|url\(|@import", page.text)


def test_the_page_on_the_api_names_every_field(repo_root: Path) -> None:
    """Whoever adds a field tells the users."""
    page = (repo_root / "docs/api.md").read_text()
    table = page[page.index("## Field by field") : page.index("## Errors and limits")]
    models = (CompletionRequest, ChatCompletionRequest, ResponsesRequest)
    known = {*HARMLESS, *REFUSED, *(name for model in models for name in model.model_fields)}
    assert [name for name in sorted(known) if f"`{name}`" not in table and f"`{name}:" not in table] == []


def test_schemas_are_schemas() -> None:
    for name in DOCUMENT["components"]["schemas"]:
        jsonschema.Draft202012Validator.check_schema(schema_of(f"#/components/schemas/{name}"))


CHUNKS = {endpoint.path: [chunk.__name__ for chunk in endpoint.chunks] for endpoint in ENDPOINTS if endpoint.chunks}
RESPONSE = {"model": COMPLETION["model"], "input": "hi"}
EXTRAS: dict[str, Any] = {"return_token_ids": True, "include_report": True, "n": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, **EXTRAS, "logprobs": 3}),
        ("/v1/chat/completions", {**CHAT, **EXTRAS, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {**COMPLETION, **EXTRAS, "echo": True, "logprobs": 3, "max_tokens": 0}),
        ("/v1/responses", {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        ("/v1/responses", {**RESPONSE, "include_report": True, "max_output_tokens": 3, "instructions": "Be brief."}),
        ("/v1/embeddings", {"model": COMPLETION["model"], "input": ["a", [5]]}),
        ("/v1/embeddings", {"model": COMPLETION["model"], "input": "a", "encoding_format": "base64"}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_answers_and_errors_are_as_described(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    backend.report = RequestReport(wall_s=1.0, compute_s=1.0, wait_s={})
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), answer_schema(path))
    refused = await client.post(path, json={**body, "nonsense": 1})
    jsonschema.validate(refused.json(), answer_schema(path, status="400"))
    if path in CHUNKS:
        streamed = await client.post(path, json={**body, "stream": True})
        described = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in CHUNKS[path]]}
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line.startswith("data: {")]
        assert len(events) > 2 or body.get("max_tokens") == 0
        for event in events:
            jsonschema.validate(json.loads(event), {**described, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/health", "/ready", "/version"])
async def test_what_is_read_is_as_described(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path.replace("{model}", "smollm2-135m-instruct"))
    jsonschema.validate(answer.json(), answer_schema(path, "get"))


GOOD: list[dict[str, Any]] = [
    {},
    {"stop": "a"},
    {"stop": ["a", "b"], "logit_bias": {"5": 1.5}, "seed": None},
    {"user": "me", "service_tier": "auto", "store": False, "modalities": ["text"], "n": None},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 3.0, "seed": -1.0},
    {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}},
]
BAD: list[dict[str, Any]] = [
    {"temperature": 3},
    {"temperature": "1"},
    {"max_tokens": -1},
    {"max_tokens": 1.5},
    {"max_completion_tokens": 0},
    {"seed": 1e300},
    {"stop": [""]},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 101}},
    {"nonsense": 1},
    {"store": True},
    {"model": 5},
    {"request_id": "a b"},
]


@pytest.mark.parametrize(("fields", "works"), [*((f, True) for f in GOOD), *((f, False) for f in BAD)], ids=str)
@pytest.mark.parametrize(
    ("path", "body", "model"),
    [("completions", COMPLETION, CompletionRequest), ("chat/completions", CHAT, ChatCompletionRequest)],
)
async def test_the_schema_and_the_service_agree(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], model: type, fields: dict[str, Any], works: bool
) -> None:
    request = {**body, **fields}
    found = list(
        jsonschema.Draft202012Validator(schema_of(f"#/components/schemas/{model.__name__}")).iter_errors(request)
    )
    assert (not found, (await client.post(f"/v1/{path}", json=request)).status_code == 200) == (works, works)


@pytest.mark.parametrize(("fields", "works"), [
    ({}, True),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, True),
    ({"input": [{"type": "reasoning", "summary": []}, {"role": "assistant", "content": "a"}]}, True),
    ({"text": {"format": {"type": "json_object"}}, "tool_choice": "none", "user": None, "store": False}, True),
    ({"input": []}, False),
    ({"input": [{"role": "user"}]}, False),
    ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]}, False),
    ({"max_output_tokens": 0}, False),
    ({"tools": [{"type": "web_search"}]}, False),
    ({"tool_choice": {"type": "function"}}, False),
    ({"top_logprobs": 21}, False),
    ({"previous_response_id": "resp_1"}, False),
    ({"nonsense": 1}, False),
])  # fmt: skip
async def test_the_schema_of_responses_and_the_service_agree(
    client: httpx.AsyncClient, fields: dict[str, Any], works: bool
) -> None:
    request = {**RESPONSE, **fields}
    schema = jsonschema.Draft202012Validator(schema_of("#/components/schemas/ResponsesRequest"))
    assert (await client.post("/v1/responses", json=request)).status_code == (200 if works else 400)
    assert schema.is_valid(request) is works


async def test_no_tokens_are_allowed_where_a_prompt_is_scored(client: httpx.AsyncClient) -> None:
    """`max_tokens: 0` is in the schema of completions, and not in that of chats."""
    for path, body, model, echo, status in (
        ("completions", COMPLETION, "CompletionRequest", True, 200),
        ("completions", COMPLETION, "CompletionRequest", False, 400),
        ("chat/completions", CHAT, "ChatCompletionRequest", False, 400),
    ):
        request = {**body, "max_tokens": 0, "echo": echo}
        assert (await client.post(f"/v1/{path}", json=request)).status_code == status
        schema = jsonschema.Draft202012Validator(schema_of(f"#/components/schemas/{model}"))
        assert schema.is_valid(request) is (path == "completions")


# Fields that go with some values of others only, which a schema does not say.
INTERTWINED = (
    "best_of",
    "length_penalty",
    "max_tokens",
    "min_tokens",
    "response_format",
    "stop_token_ids",
    "stream_options",
    "structured_outputs",
    "top_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
)


TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}


def told_to_the_generator(mode: GenerationMode) -> dict[str, Any]:
    """The document with what a generator needs to get anywhere: it would never guess the model's name."""
    told: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    schemas = told["components"]["schemas"]
    text = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
    message = {"role": {"enum": ["system", "user", "assistant"]}, "content": text}
    messages = {"type": "object", "properties": message, "required": [*message], "additionalProperties": False}
    for schema in schemas.values():
        if "messages" in schema.get("properties", {}):
            schema["properties"]["messages"] |= {"items": messages, "maxItems": 3}
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] = 49151
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [COMPLETION["model"]]}
            if "n" in schema["properties"]:
                schema["properties"]["n"] = {"type": "integer", "minimum": 1, "maximum": 4}
            for name in INTERTWINED if mode is GenerationMode.POSITIVE else ():
                schema["properties"].pop(name, None)
    return told


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_generated_request_makes_the_service_fail(live_server: LiveServer, mode: GenerationMode) -> None:
    """Valid and invalid requests by the hundred: an answer in OpenAI's shape each time, and never a 5xx."""
    statuses: dict[int, int] = {}

    def check(case: Any) -> None:
        response = case.call(base_url=live_server.url, timeout=20)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        assert response.status_code < 500, (case.method, case.path, case.body, response.text)
        assert response.status_code != 422
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    bounded = settings(
        max_examples=EXAMPLES_PER_OPERATION,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for found in schemathesis.openapi.from_dict(told_to_the_generator(mode)).get_all_operations():
        operation = found.ok()
        if operation.method == "post" or mode is GenerationMode.POSITIVE:
            bounded(given(operation.as_strategy(generation_mode=mode))(check))()
    assert statuses[200 if mode is GenerationMode.POSITIVE else 400] > EXAMPLES_PER_OPERATION, statuses
