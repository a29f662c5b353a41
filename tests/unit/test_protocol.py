"""Requests of the API: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.cluster.api.parsing import parse_request
from quire.cluster.api.protocol import ChatCompletionRequest, CompletionRequest
from quire.engine.errors import InvalidRequestError
from quire.engine.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_request(ChatCompletionRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(make: Any, **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields).sampling_params({}, 100)
    return caught.value.param, caught.value.message


def test_defaults_are_openais() -> None:
    assert completion().sampling_params({}, 100) == SamplingParams(max_tokens=16)
    assert chat().sampling_params({}, 100) == SamplingParams(max_tokens=100)
    assert completion().sampling_params({}, 5).max_tokens == 16  # cut per prompt, by the input processor
    assert completion(min_tokens=20).sampling_params({}, 100).max_tokens == 20


def test_the_models_advice_stands_between_the_request_and_openais_defaults() -> None:
    advice = {"temperature": 0.6, "top_k": 20}
    params = completion(temperature=0).sampling_params(advice, 100)
    assert (params.temperature, params.top_k, params.top_p) == (0, 20, 1.0)


def test_every_field_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 3,
        "allowed_token_ids": [3, 4],
        "bad_words": ["x"],
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    expected = SamplingParams(**fields, max_tokens=9, logit_bias={5: -1.0})
    bias = {"logit_bias": {"5": -1}}
    assert completion(**fields, **bias, max_tokens=9).sampling_params({}, 100) == expected
    assert chat(**fields, **bias, max_completion_tokens=9).sampling_params({}, 100) == expected


def test_null_means_not_given() -> None:
    names = [name for name in CompletionRequest.model_fields if name not in ("model", "prompt")]
    assert completion(**dict.fromkeys(names)) == completion()
    assert completion(stop="x").sampling_params({}, 100).stop == ("x",)


def test_logprobs() -> None:
    assert completion(logprobs=3).sampling_params({}, 100).logprobs == 3
    assert chat(logprobs=True).sampling_params({}, 100).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling_params({}, 100).logprobs == 4
    assert (
        chat(top_logprobs=0).sampling_params({}, 100).logprobs is None
    )  # as clients of vLLM send it, whose default it is
    assert chat(logprobs=False).sampling_params({}, 100).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [1.5], [True], {"a": 1}, 5, [["a"]]])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"


def test_messages() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts, "name": "ann"},
        # As the official SDK dumps an answer.
        {
            "role": "assistant",
            "content": "hello",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
            "audio": None,
        },
    ]
    assert chat(messages=given).conversation({}).messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": ["one", "two"], "name": "ann"},
        {"role": "assistant", "content": "hello"},
    ]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "1"}, "temperature", "temperature: must be a number, got '1'."),
        ({"max_tokens": "16"}, "max_tokens", "max_tokens: must be an integer, got '16'."),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens: must be an integer, got 1.5."),
        ({"n": True}, "n", "n: must be an integer, got True."),
        ({"stream": "yes"}, "stream", "stream: must be true or false, got 'yes'."),
        ({"stop": 5}, "stop", "stop: must be a list, got 5."),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1]: must be a string, got 5."),
        ({"model": 5}, "model", "model: must be a string, got 5."),
        ({"logit_bias": []}, "logit_bias", "logit_bias: must be an object from token ids to numbers, got []."),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: keys must be token ids, got {'a': 1}."),
        ({"logit_bias": {"1": "x"}}, "logit_bias[1]", "logit_bias[1]: must be a number, got 'x'."),
        ({"temperature": 3}, "temperature", "temperature: must be a number >= 0 and <= 2, got 3.0."),
        ({"n": 0}, "n", "n: must be an integer from 1 to 128, got 0."),
        (
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens: must be an integer from 1 to 100, what the context leaves after the prompt; got 0.",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens: must be an integer from 0 to 4, got 5."),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options: is allowed only when stream is true.",
        ),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "stream_options.include_usages: is not a known field. Did you mean 'stream_options.include_usage'?",
        ),
        ({"temprature": 1}, "temprature", "temprature: is not a known field. Did you mean 'temperature'?"),
        ({"qqqqqqqq": 1}, "qqqqqqqq", "qqqqqqqq: is not a known field."),
        ({"store": True}, "store", "store: is not supported: this service keeps no answers, got True."),
        ({"store": 0}, "store", "store: is not supported: this service keeps no answers, got 0."),
        ({"audio": {}}, "audio", "audio: is not supported: answers are text, got {}."),
        (
            {"modalities": ["text", "audio"]},
            "modalities",
            "modalities: is not supported: answers are text, got ['text', 'audio'].",
        ),
        (
            {"guided_json": {}},
            "guided_json",
            "guided_json: is the old name of a structured output; use structured_outputs, got {}.",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type: must be 'text', 'json_object' or 'json_schema', got 'xml'.",
        ),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_refused_by_name(make: Any, fields: dict[str, Any], param: str, message: str) -> None:
    assert refused(make, **fields) == (param, message)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: must hold at least one message."),
        ({"messages": "hi"}, "messages", "messages: must be a list, got 'hi'."),
        ({"messages": None}, "messages", "messages: is required."),
        ({"messages": ["hi"]}, "messages[0]", "messages[0]: must be an object, got 'hi'."),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role: is required."),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content: is required."),
        (
            {"messages": [USER, {"role": "function", "content": "x"}]},
            "messages[1].role",
            "messages[1].role: must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'function'.",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content: must be a string or a list of text parts, got 5.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "messages[0].content: parts of type 'image_url' are not supported yet, only 'text' is, got "
            "[{'type': 'image_url', 'image_url': {'url': 'x'}}].",
        ),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0].contents",
            "messages[0].contents: is not a known field. Did you mean 'messages[0].content'?",
        ),
        (
            {"messages": [{**USER, "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
            "messages[0].tool_calls[0].id: is required.",
        ),
        (
            {"max_completion_tokens": 101},
            "max_completion_tokens",
            "max_completion_tokens: must be an integer from 1 to 100, what the context leaves after the prompt; "
            "got 101.",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs: is allowed only when logprobs is true."),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "top_logprobs: must be an integer from 0 to 20, got 21.",
        ),
        ({"logprobs": 2}, "logprobs", "logprobs: must be true or false, got 2."),
    ],
)
def test_refused_by_name_in_chat(fields: dict[str, Any], param: str, message: str) -> None:
    def read() -> None:
        request = chat(**fields)
        request.conversation({})
        request.sampling_params({}, 100)

    with pytest.raises(InvalidRequestError) as caught:
        read()
    assert (caught.value.param, caught.value.message) == (param, message)


@pytest.mark.parametrize(
    ("fields", "session_id"),
    [
        ({"user": "me"}, "me"),
        ({"user": "me", "prompt_cache_key": "key"}, "key"),
        ({"user": "me", "prompt_cache_key": "key", "session_id": "s"}, "s"),
        ({"user": {"a": 1}, "prompt_cache_key": ""}, None),
        ({"user": "x" * 10_000}, None),
        ({}, None),
    ],
)
def test_what_requests_have_in_common_is_their_session(fields: dict[str, Any], session_id: str | None) -> None:
    assert completion(**fields).options().session_id == chat(**fields).options().session_id == session_id


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
        {"tools": None, "tool_choice": "none", "store": False},
        {"parallel_tool_calls": True, "modalities": ["text"], "verbosity": "medium", "suffix": None},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion()
    asked = [request.conversation({}) for request in (chat(**fields), chat())]
    assert asked[0] == asked[1]
    assert chat(**fields).tool_set() is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"null", b"\xff", b'{"model": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000]
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_request(CompletionRequest, body)
