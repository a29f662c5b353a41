"""Structured output at the front door: what reaches the engine, and what is refused under which name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend

from quire.engine.grammar import GrammarSpec
from quire.engine.outputs import Refusal

MODEL = "smollm2-135m-instruct"
ENDPOINTS = [
    ("/v1/completions", {"model": MODEL, "prompt": "Once", "max_tokens": 20}),
    ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}),
]
SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
AS_TEXT = json.dumps(SCHEMA, ensure_ascii=False)


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": SCHEMA_FORMAT}, "json_schema", AS_TEXT, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", AS_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": AS_TEXT}}, "json_schema", AS_TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["ja", "nö"]}}, "choice", '["ja", "nö"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"', "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
    ],
)
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_the_engine_gets_the_grammar(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    kind: Any,
    source: str,
    param: str,
) -> None:
    response = await client.post(path, json={**body, **fields, "n": 2})
    assert response.status_code == 200, response.text
    grammar = GrammarSpec(kind=kind, source=source, param=param)
    assert [request.grammar for request in backend.requests] == [grammar, grammar]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
async def test_free_text_has_no_grammar(
    client: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any]
) -> None:
    path, body = ENDPOINTS[1]
    assert (await client.post(path, json={**body, **fields})).status_code == 200
    assert backend.requests[0].grammar is None


ONE_OF = "structured_outputs: must hold exactly one of json, regex, choice, grammar, json_object; got "


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", f"{ONE_OF}none."),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", f"{ONE_OF}regex, choice."),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", f"{ONE_OF}none."),
        (
            {"structured_outputs": {"json": False}},
            "structured_outputs.json",
            "structured_outputs.json: must be a JSON schema, which is an object; got False.",
        ),
        (
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp",
            "structured_outputs.regexp: is not a known field. Did you mean 'structured_outputs.regex'?",
        ),
        (
            {"structured_outputs": {"json_": {}}},
            "structured_outputs.json_",
            "structured_outputs.json_: is not a known field. Did you mean 'structured_outputs.json'?",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "scema": {}}}},
            "response_format.json_schema.scema",
            "response_format.json_schema.scema: is not a known field. Did you mean "
            "'response_format.json_schema.schema'?",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "structured_outputs.choice: must be a list of 1 to 10000 texts, none of them empty; got ().",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json",
            "structured_outputs.json: is not JSON: Input data was truncated.",
        ),
        (
            {"structured_outputs": {"json": [1]}},
            "structured_outputs.json",
            "structured_outputs.json: must be a JSON schema, got [1].",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema: is required with type 'json_schema', and allowed with no other.",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "structured_outputs: is not allowed together with response_format.",
        ),
        (
            {"response_format": {"type": "json_object"}, "use_beam_search": True, "temperature": 0},
            "response_format",
            "response_format: does not work together with use_beam_search.",
        ),
    ],
)
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_what_is_refused_at_once(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
    message: str,
) -> None:
    response = await client.post(path, json={**body, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (400, param, message)
    assert not backend.requests
    assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_what_the_engine_refuses_before_the_first_token_is_a_400_also_for_a_stream(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any], streamed: bool
) -> None:
    """A schema that is not supported, or too few tokens: known when it is compiled, after the request was taken in."""
    message = "max_tokens: 3 tokens are left for the answer, but the shortest one that response_format allows needs 8."
    backend.failure, backend.failure_after = message, 0
    backend.late_refusal = Refusal("max_tokens", None)
    response = await client.post(path, json={**body, "response_format": SCHEMA_FORMAT, "stream": streamed, "n": 2})
    expected = {"message": message, "type": "invalid_request_error", "param": "max_tokens", "code": None}
    assert (response.status_code, response.json()) == (400, {"error": expected})
    backend.failure = backend.late_refusal = None
    assert (await client.post(path, json=body)).status_code == 200
    assert not backend.running
