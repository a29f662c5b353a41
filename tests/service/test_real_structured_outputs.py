"""Structured output through the real server, by the official SDK."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from json_schemas import SCHEMAS

MODEL = "smollm2-135m-instruct"
MESSAGES: Any = [{"role": "user", "content": "Tell me about a person who lives in Paris, in JSON."}]


@pytest.fixture
def sdk(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


class Address(BaseModel):
    city: str
    country: Literal["France", "elsewhere"]


class Person(BaseModel):
    name: str
    age: int
    address: Address
    hobbies: list[str]


def test_parse_gives_the_model_of_the_user(sdk: openai.OpenAI) -> None:
    done = sdk.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=120, temperature=0.7, seed=5
    )
    person = done.choices[0].message.parsed
    assert isinstance(person, Person)
    assert done.choices[0].finish_reason == "stop"
    assert person.address.country in ("France", "elsewhere")


def test_streamed_deltas_are_the_same_answer(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50, "seed": 3, "temperature": 1.0}
    fmt: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    whole = sdk.chat.completions.create(**asked, response_format=fmt, logprobs=True, n=2)
    chunks = list(sdk.chat.completions.create(**asked, response_format=fmt, n=2, stream=True))
    for choice in whole.choices:
        pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(pieces) == choice.message.content
        Person.model_validate_json(choice.message.content or "")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content).startswith(choice.message.content or "?")


@pytest.mark.parametrize("max_tokens", [16, 24, 48])
def test_every_schema_closes(sdk: openai.OpenAI, max_tokens: int) -> None:
    """All at once, greedy and not; those that need more tokens are told how many, and then get them."""

    def ask(name: str, tokens: int) -> str:
        fmt: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}}
        done = sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=tokens, response_format=fmt, temperature=tokens % 2, seed=tokens
        )
        return done.choices[0].message.content or ""

    def closes(name: str) -> int:
        tokens = max_tokens
        try:
            text = ask(name, tokens)
        except openai.BadRequestError as error:
            needed = re.search(r"max_tokens: .* needs (\d+)\.", error.message)
            if needed is None:
                raise
            tokens = int(needed[1])
            text = ask(name, tokens)
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        return tokens

    with ThreadPoolExecutor(12) as pool:
        tokens = list(pool.map(closes, SCHEMAS))
    assert len(tokens) >= 25
    assert tokens.count(max_tokens) >= 20


def test_the_kinds_of_vllm(sdk: openai.OpenAI, service_url: str) -> None:
    asked: Any = {"model": MODEL, "prompt": "The answer is", "max_tokens": 20, "temperature": 1, "seed": 1}
    for outputs, pattern in (
        ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"choice": ["yes", "no", "maybe"]}, "yes|no|maybe"),
        ({"grammar": 'root ::= "(" [a-z]+ ")"'}, r"\([a-z]+\)"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, r"(?s)\[.*\]"),
    ):
        text = sdk.completions.create(**asked, extra_body={"structured_outputs": outputs}).choices[0].text
        assert re.fullmatch(pattern, text), (outputs, text)
    assert httpx.get(f"{service_url}/health").status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_schema_that_is_not_supported_is_a_400_with_a_pointer(sdk: openai.OpenAI, streamed: bool) -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    fmt: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=fmt, stream=streamed)
    body: Any = caught.value.body
    assert body["message"] == "response_format: /properties/tags/uniqueItems: 'uniqueItems' is not supported."
    assert (body["param"], body["code"]) == ("response_format", "unsupported")
