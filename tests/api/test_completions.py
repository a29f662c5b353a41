"""/v1/completions and /v1/chat/completions on a fake backend: exact bodies, streams equal to whole answers."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend

from quire.cluster.api.backend import ServedModel
from quire.engine.outputs import RequestReport, TokenLogprobs

MODEL = "smollm2-135m-instruct"
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = await client.post(f"/v1/{path}", json={**body, **fields})
    assert response.status_code == 200, response.text
    data: dict[str, Any] = response.json()
    return data


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    response = await client.post(f"/v1/{path}", json={**body, **fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def ids_of(served: ServedModel, text: str) -> list[int]:
    return served.input_processor.tokenize(text, add_special_tokens=False)


async def test_a_completion_has_openais_shape(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.num_cached_tokens = 2
    body = await post(client, "completions", COMPLETION)
    num_tokens = len(backend.answer_ids) + 1
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": DEFAULT_ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": num_tokens,
            "total_tokens": 4 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_a_chat_completion_has_openais_shape(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel
) -> None:
    body = await post(client, "chat/completions", CHAT, max_tokens=4)
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    text = served.token_decoder.decode(backend.answer_ids[:4])
    [request] = backend.requests
    num_prompt = len(request.prompt_token_ids)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 4,
            "total_tokens": num_prompt + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    rendered = served.tokenizer.apply_chat_template(CHAT["messages"], tokenize=False, add_generation_prompt=True)
    assert request.prompt_token_ids == ids_of(served, rendered)
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" in rendered


async def test_a_streamed_completion(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, "completions", COMPLETION)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == DEFAULT_ANSWER
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "text_completion"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_streamed_chat_completion(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, "chat/completions", CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == DEFAULT_ANSWER
    assert not any("\ufffd" in delta.get("content", "") for delta in deltas)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_usage_of_a_stream_equals_that_of_the_whole(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await post(client, path, body)
    *chunks, last = await stream(client, path, body, stream_options={"include_usage": True})
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"max_tokens": 5},
    {"stop": "🎉"},
    {"stop": ["2024: 你", "never"]},
    {"stop": "and", "include_stop_str_in_output": True},
    {"stop": [" The"], "min_tokens": 4},
    {"stop": ["more.", " more"], "n": 2},
]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_streams_join_to_the_whole_answer(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    repeat: bool,
    tokens_per_step: int,
) -> None:
    whole = await post(client, path, body, **fields)
    backend.repeat, backend.tokens_per_step = repeat, tokens_per_step
    chunks = await stream(client, path, body, **fields)
    joined = [{"text": "", "finish_reason": None, "stop_reason": None} for _ in whole["choices"]]
    for chunk in chunks:
        [choice] = chunk["choices"]
        target = joined[choice["index"]]
        target["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert target["finish_reason"] is None
        target["finish_reason"], target["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
    assert joined == [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in whole["choices"]
    ]
    assert not backend.running


async def test_a_stop_string_cuts_the_answer_and_ends_the_engines_work(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = await post(client, "completions", COMPLETION, stop=["你好"])
    assert body["choices"][0]["text"] == " The year 2024: "
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "你好")
    assert backend.aborted == [backend.requests[0].request_id]
    assert not backend.running


async def test_choices_differ_and_count_the_prompt_once(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel
) -> None:
    body = await post(client, "completions", COMPLETION, n=2, max_tokens=3)
    expected = [served.token_decoder.decode(backend.answer_ids[i : i + 3]) for i in range(2)]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(expected))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 6)
    assert len({request.seed for request in backend.requests}) == 1


async def test_several_prompts_answer_in_order(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel
) -> None:
    ids = ids_of(served, " king")
    body = await post(client, "completions", COMPLETION, prompt=["a b c", ids], n=2, max_tokens=2, echo=True)
    texts = [served.token_decoder.decode(backend.answer_ids[i : i + 2]) for i in range(2)]
    expected = [prompt + text for prompt in ("a b c", " king") for text in texts]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == len(ids_of(served, "a b c")) + len(ids)
    assert [request.prompt_token_ids for request in backend.requests][2:] == [ids, ids]
    assert len({request.request_id for request in backend.requests}) == 4
    chunks = await stream(client, "completions", COMPLETION, prompt=["a b c", ids], n=2, max_tokens=2, echo=True)
    joined = ["", "", "", ""]
    for chunk in chunks:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == expected


async def test_max_tokens_defaults(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await post(client, "completions", {"model": MODEL, "prompt": [1, 2, 3]})
    await post(client, "chat/completions", CHAT)
    completion, chat = backend.requests
    assert completion.sampling_params.max_tokens == 16
    assert chat.sampling_params.max_tokens == 1024 - len(chat.prompt_token_ids)


async def test_logprobs_of_a_completion(client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel) -> None:
    body = await post(client, "completions", COMPLETION, max_tokens=3, logprobs=4)
    logprobs = body["choices"][0]["logprobs"]
    texts = [served.token_decoder.decode([token_id]) for token_id in backend.answer_ids[:3]]
    assert logprobs["tokens"] == texts
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, len(texts[0]), len(texts[0] + texts[1])]
    assert logprobs["top_logprobs"][0][texts[0]] == -0.5
    assert sorted(logprobs["top_logprobs"][0].values()) == [-9999.0, -2.5, -1.5, -0.5]
    chunks = await stream(client, "completions", COMPLETION, max_tokens=3, logprobs=4)
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"][key]] == logprobs[key]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_offsets_are_where_the_text_has_the_tokens(
    client: httpx.AsyncClient, backend: FakeBackend, tokens_per_step: int, skip_special_tokens: bool
) -> None:
    """Also after characters of several tokens, which all begin with theirs, and after special tokens. Tokens that are
    parts of one are spelled by bytes: by text, several would have the same name."""
    backend.tokens_per_step = tokens_per_step
    backend.answer_ids = [1, *backend.answer_ids]
    fields = {"logprobs": 0, "skip_special_tokens": skip_special_tokens}
    [choice] = (await post(client, "completions", COMPLETION, **fields))["choices"]
    text, logprobs = choice["text"], choice["logprobs"]
    offsets, tokens = logprobs["text_offset"], logprobs["tokens"]
    start = 0 if skip_special_tokens else len("<|im_start|>")
    assert text == "<|im_start|>"[:start] + DEFAULT_ANSWER
    parts = [token.startswith("bytes:") for token in tokens]
    spelled = [each for *each, part in zip(tokens, offsets, parts, strict=True) if each[0].isascii() and not part][1:-1]
    assert all(text.startswith(token, offset) for token, offset in spelled)
    assert dict(spelled)[" and"] == start + DEFAULT_ANSWER.index(" and")
    assert {text[o : o + 1] for o, part in zip(offsets, parts, strict=True) if part} <= {*" 你好🎉"}
    data = b"".join(
        re.sub(rb"\\x(..)", lambda found: bytes.fromhex(found[1].decode()), token.removeprefix("bytes:").encode())
        for token in tokens
    )
    assert data.decode() == "<|im_start|>" + DEFAULT_ANSWER + "<|im_end|>"
    chunks = await stream(client, "completions", COMPLETION, **fields)
    assert [o for chunk in chunks for o in chunk["choices"][0]["logprobs"]["text_offset"]] == offsets


async def test_tokens_that_are_no_characters_are_told_apart(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = backend.served.tokenizer.encode("🎉", add_special_tokens=False)
    others = backend.served.tokenizer.encode("🦄", add_special_tokens=False)
    told = TokenLogprobs(parts[0], -3.0, 4, [(others[-1], -0.5), (parts[-1], -1.0), (parts[1], -2.0)])
    monkeypatch.setattr(FakeBackend, "logprobs_of", staticmethod(lambda token_id, num_top: told))
    [choice] = (await post(client, "completions", COMPLETION, logprobs=3, max_tokens=1))["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert sorted(top.values()) == [-3.0, -2.0, -1.0, -0.5]
    assert top[choice["logprobs"]["tokens"][0]] == choice["logprobs"]["token_logprobs"][0] == -3.0
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0\\x9f"]


async def test_logprobs_of_a_chat_completion(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = await post(client, "chat/completions", CHAT, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == DEFAULT_ANSWER
    assert content[-1]["token"] == "<|im_end|>"
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    chunks = await stream(client, "chat/completions", CHAT, logprobs=True, top_logprobs=2)
    streamed = [entry for chunk in chunks[1:] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    bare = await post(client, "chat/completions", CHAT, logprobs=True)
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_text_parts_mean_the_same_as_a_string(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await post(client, "chat/completions", CHAT)
    parts = [{"type": "text", "text": "hi"}]
    await post(client, "chat/completions", CHAT, messages=[{"role": "user", "content": parts}])
    assert backend.requests[0].prompt_token_ids == backend.requests[1].prompt_token_ids


REPORT = RequestReport(wall_s=1.5, compute_s=1.0, wait_s={"kv_blocks": 0.5}, num_preemptions=1, first_miss="evicted")
SHOWN_REPORT = {
    "wall_s": 1.5,
    "compute_s": 1.0,
    "wait_s": {"kv_blocks": 0.5},
    "num_preemptions": 1,
    "first_miss": "evicted",
}


@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_a_report_comes_with_the_end_where_it_is_asked_for(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    backend.report = REPORT
    whole = await post(client, path, body, n=2, include_report=True)
    assert [choice["report"] for choice in whole["choices"]] == [SHOWN_REPORT] * 2
    chunks = await stream(client, path, body, include_report=True)
    *deltas, last = [chunk["choices"][0] for chunk in chunks]
    assert last["report"] == SHOWN_REPORT
    assert not any("report" in delta for delta in deltas)
    assert "report" not in (await post(client, path, body))["choices"][0]
    backend.report = None
    assert (await post(client, path, body, include_report=True))["choices"][0]["report"] is None


@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_what_the_scheduler_is_told(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    await post(client, path, body)
    backend.served = dataclasses.replace(backend.served, has_priorities=True)
    await post(client, path, body, priority=-3, deadline_ms=60_000, cache_salt="team-7")
    told = [(request.priority, request.deadline_ms, request.cache_salt) for request in backend.requests]
    assert told == [(0, None, None), (-3, 60_000, "team-7")]


@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
async def test_a_priority_that_nobody_heeds(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(f"/v1/{path}", json={**body, "priority": 0})).status_code == 200
    num_asked = len(backend.requests)
    for priority in (1, -1):
        response = await client.post(f"/v1/{path}", json={**body, "priority": priority})
        told = response.json()["error"]
        assert (response.status_code, told["param"], told["code"]) == (400, "priority", "unsupported")
        assert told["message"] == (
            "priority: smollm2-135m-instruct serves requests by arrival (scheduler policy fcfs), so that only 0 is "
            f"allowed, got {priority}."
        )
    assert len(backend.requests) == num_asked


async def test_words_become_tokens_before_they_reach_an_engine(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel
) -> None:
    await post(client, "completions", COMPLETION, bad_words=["Paris"], allowed_token_ids=[5, 6])
    await post(client, "chat/completions", CHAT, bad_words=["Paris", " Paris"])
    words = (tuple(ids_of(served, "Paris")), tuple(ids_of(served, " Paris")))
    params = [request.sampling_params for request in backend.requests]
    assert [each.bad_words_token_ids for each in params] == [words, words]
    assert [each.allowed_token_ids for each in params] == [(5, 6), None]
