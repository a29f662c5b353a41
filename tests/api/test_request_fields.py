"""Fields that change how an answer is made or shown, one by one, on a fake backend: exact bodies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from test_completions import CHAT, COMPLETION, REPORT, SHOWN_REPORT, ids_of, post, stream

from quire.cluster.api.backend import ServedModel
from quire.engine.errors import OverloadedError
from quire.engine.outputs import EngineOutput, EngineRequest, TokenLogprobs

BOTH = pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])


async def refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any], **fields: Any) -> tuple[int, str]:
    response = await client.post(f"/v1/{path}", json={**body, **fields})
    return response.status_code, response.json()["error"]["message"]


class LogprobsByChoice(FakeBackend):
    """The tokens of choice i all have the logprob that `choice_logprobs` says."""

    choice_logprobs = (-2.0, -0.5, -1.0, -3.0)

    def _step(self, request: EngineRequest, num_sent: dict[str, int]) -> Any:
        [output] = super()._step(request, num_sent)
        assert output.logprobs is not None
        logprob = self.choice_logprobs[request.choice_index]
        for i, entry in enumerate(output.logprobs):
            output.logprobs[i] = TokenLogprobs(entry.token_id, logprob, entry.rank, entry.top)
        return [output]


async def test_best_of_returns_the_likeliest_per_token(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.__class__ = LogprobsByChoice
    everything = await post(client, "completions", COMPLETION, n=4, logprobs=0, max_tokens=3)
    body = await post(client, "completions", COMPLETION, best_of=4, n=2, max_tokens=3)
    texts = [choice["text"] for choice in everything["choices"]]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, texts[1]), (1, texts[2])]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"] == everything["usage"]  # all four were computed
    shown = await post(client, "completions", COMPLETION, best_of=4, logprobs=1, max_tokens=3)
    assert shown["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
    several = await post(client, "completions", COMPLETION, prompt=["a", "b"], best_of=3, n=1, max_tokens=3)
    assert [(c["index"], c["text"]) for c in several["choices"]] == [(0, texts[1]), (1, texts[1])]


async def test_best_of_and_streams(client: httpx.AsyncClient) -> None:
    message = "best_of: the best answers are known only when all are complete, so it does not work with stream."
    assert await refusal(client, "completions", COMPLETION, best_of=2, stream=True) == (400, message)
    assert await stream(client, "completions", COMPLETION, best_of=2, n=2)  # all of them are returned


@BOTH
async def test_usage_in_every_chunk(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, last = await stream(client, path, body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    without_last = await stream(client, path, body, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"] for chunk in without_last] == [chunk["usage"] for chunk in chunks]


@BOTH
async def test_token_ids(client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]) -> None:
    whole = await post(client, path, body, return_token_ids=True, n=2)
    first = backend.requests[0]
    expected = [[*backend.answer_ids[i:], 2] for i in range(2)]
    assert [choice["token_ids"] for choice in whole["choices"]] == expected
    prompts = [whole["prompt_token_ids"]] if "chat" in path else [c["prompt_token_ids"] for c in whole["choices"]]
    assert prompts == [first.prompt_token_ids] * len(prompts)
    joined: list[list[int]] = [[], []]
    prompts = []
    for chunk in await stream(client, path, body, return_token_ids=True, n=2):
        [choice] = chunk["choices"]
        joined[choice["index"]] += choice.get("token_ids", [])
        prompts += [part["prompt_token_ids"] for part in (chunk, choice) if "prompt_token_ids" in part]
    assert joined == expected
    assert prompts == [first.prompt_token_ids] * (1 if "chat" in path else 2)
    bare = await post(client, path, body)
    assert "token_ids" not in bare["choices"][0]
    assert "prompt_token_ids" not in {**bare, **bare["choices"][0]}


async def test_tokens_as_token_ids(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    body = await post(client, "completions", COMPLETION, logprobs=2, **fields)
    logprobs = body["choices"][0]["logprobs"]
    names = [f"token_id:{token_id}" for token_id in backend.answer_ids[:2]]
    assert logprobs["tokens"] == names
    assert list(logprobs["top_logprobs"][0]) == [names[0], f"token_id:{backend.answer_ids[0] + 1}"]
    plain = await post(client, "completions", COMPLETION, logprobs=2, max_tokens=2)
    assert logprobs["text_offset"] == plain["choices"][0]["logprobs"]["text_offset"]
    chat = await post(client, "chat/completions", CHAT, logprobs=True, top_logprobs=1, **fields)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == names
    assert [entry["top_logprobs"][0]["token"] for entry in content] == names


@BOTH
async def test_a_request_id_of_the_users_own(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    prefix = "chatcmpl" if "chat" in path else "cmpl"
    answers = [await post(client, path, body, request_id="mine-1") for _ in range(2)]
    assert [answer["id"] for answer in answers] == [f"{prefix}-mine-1"] * 2
    assert len({request.request_id for request in backend.requests}) == 2  # engines need them to differ
    drawn = await post(client, path, body)
    assert drawn["id"] == backend.requests[-1].request_id


@BOTH
async def test_session_ids_reach_the_router(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    await post(client, path, body, session_id="s-1", user="ann")
    assert backend.requests[0].session_id == "s-1"


@BOTH
async def test_prompts_are_cut_from_the_left(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    await post(client, path, body)
    await post(client, path, body, truncate_prompt_tokens=3)
    whole, cut = (request.prompt_token_ids for request in backend.requests)
    assert cut == whole[-3:]
    text = "word " * 2000  # more than the context holds
    long = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    await post(client, path, {**body, **long}, truncate_prompt_tokens=-1, max_tokens=24)
    assert len(backend.requests[-1].prompt_token_ids) == 1000


async def test_an_echo_is_what_the_model_has_read(client: httpx.AsyncClient) -> None:
    body = await post(client, "completions", COMPLETION, truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert body["choices"][0]["text"].startswith(" a time")
    assert body["usage"]["prompt_tokens"] == 2


async def test_an_echo_of_token_ids_shows_special_tokens_where_the_answer_does(
    client: httpx.AsyncClient, served: ServedModel
) -> None:
    ids = ids_of(served, "<|im_start|>x")
    for skip, text, offsets in ((True, "x", [0, 0]), (False, "<|im_start|>x", [0, 12])):
        fields = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0, "skip_special_tokens": skip}
        [choice] = (await post(client, "completions", COMPLETION, **fields))["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


async def test_spaces_between_special_tokens_are_the_samplers_parameter(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await post(client, "completions", COMPLETION, spaces_between_special_tokens=False, skip_special_tokens=False)
    assert backend.requests[0].sampling_params.spaces_between_special_tokens is False


@BOTH
async def test_beam_search(
    client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel, path: str, body: dict[str, Any]
) -> None:
    """On a backend whose likeliest token is always the first of the answer, the next one the second likeliest."""
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True, "temperature": 0}
    answer = await post(client, path, body, **fields)
    a = backend.answer_ids[0]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[a] * 3, [a, a, a + 1]]
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]
    assert texts == [served.token_decoder.decode([a] * 3), served.token_decoder.decode([a, a, a + 1])]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert answer["usage"]["completion_tokens"] == 6
    assert len(backend.requests) == 1 + 2 + 2
    assert all(request.sampling_params.max_tokens == 1 for request in backend.requests)
    message = "stream: does not work together with use_beam_search."
    assert await refusal(client, path, body, **fields, stream=True) == (400, message)


@BOTH
async def test_beam_search_with_what_asks_for_nothing(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    search = {"use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True, "temperature": 0}
    expected = (await post(client, path, body, **search))["choices"]
    labels = {"user": "ann", "prompt_cache_key": "k", "metadata": {"a": "b"}, "seed": 7, "safety_identifier": "x"}
    lists = {"stop": [], "stop_token_ids": [], "bad_words": [], "logit_bias": {}, "tools": []}
    numbers = {"top_p": 1.0, "top_k": -1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1}
    penalties = {"presence_penalty": 0, "frequency_penalty": 0, "include_stop_str_in_output": False}
    formats = {"response_format": {"type": "text", "json_schema": None}, "parallel_tool_calls": False}
    for nothing in (labels, lists, numbers, penalties, formats, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        assert (await post(client, path, body, **search, **nothing))["choices"] == expected
    for something in (
        {"stop": ["a"]},
        {"top_p": 0.9},
        {"logprobs": 1 if "prompt" in body else True},
        {"min_tokens": 1},
    ):
        response = await client.post(f"/v1/{path}", json={**body, **search, **something})
        [name] = something
        assert response.json()["error"]["message"] == f"{name}: does not work together with use_beam_search."


async def test_a_search_that_has_begun_waits_for_room(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True}
    expected = (await post(client, "completions", COMPLETION, **fields))["choices"]
    generate, calls = backend.generate, []

    async def sometimes_full(model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        calls.append(len(requests))
        if len(calls) in full:
            raise OverloadedError("The queue is full.", 0.01)
        async for outputs in generate(model, requests):
            yield outputs

    backend.generate = sometimes_full  # type: ignore[method-assign]
    full = {2, 3}
    assert (await post(client, "completions", COMPLETION, **fields))["choices"] == expected
    assert calls == [1, 2, 2, 2, 2]
    full = {6}
    assert await refusal(client, "completions", COMPLETION, **fields) == (503, "The queue is full.")


async def test_beam_search_ends_with_the_deadline_and_with_errors(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 5}
    backend.failure, backend.failure_after = "It failed.", 1
    assert await refusal(client, "completions", COMPLETION, **fields) == (500, "It failed.")
    backend.failure, backend.deadline_after = None, 1
    response = await client.post("/v1/completions", json={**COMPLETION, **fields, "deadline_ms": 1000})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert not backend.running


@BOTH
async def test_a_stop_string_keeps_the_report(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    """The engine tells its report only when it is told to stop."""
    backend.report = REPORT
    fields: dict[str, Any] = {"stop": "2024", "include_report": True, "n": 2}
    whole = await post(client, path, body, **fields)
    assert [(c["finish_reason"], c["report"]) for c in whole["choices"]] == [("stop", SHOWN_REPORT)] * 2
    ends = [c for chunk in await stream(client, path, body, **fields) if (c := chunk["choices"][0])["finish_reason"]]
    assert [(end["stop_reason"], end["report"]) for end in ends] == [("2024", SHOWN_REPORT)] * 2
    backend.reports_aborts = False
    lost = await post(client, path, body, **fields)
    assert [(c["finish_reason"], c["report"]) for c in lost["choices"]] == [("stop", None)] * 2
    assert not backend.running


@pytest.mark.parametrize("streamed", [False, True])
@BOTH
async def test_what_asks_for_nothing_changes_nothing(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], streamed: bool
) -> None:
    fields = {"user": "ann", "store": False, "service_tier": "auto", "metadata": {"a": "b"}, "modalities": ["text"]}
    if streamed:
        chunks = await stream(client, path, body, **fields)
        parts = [chunk["choices"][0] for chunk in chunks]
        text = "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)
    else:
        [choice] = (await post(client, path, body, **fields))["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text == DEFAULT_ANSWER
