"""Streams that go on after their connection was lost: whatever the client had seen, it gets the rest and no more."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_backend import FakeBackend

from quire.cluster.api.resume import EventIds, Position
from quire.cluster.messages import ResumePoint
from quire.engine.outputs import CompletionOutput, EngineOutput

MODEL = "smollm2-135m-instruct"
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100, "stream": True}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
ID = {"x-request-id": "mine"}


class Event:
    """One event of a stream, as the client's parser sees it."""

    def __init__(self, text: str) -> None:
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        self.id: str | None = fields.get("id")
        self.data = fields["data"]


async def ask(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[Event]:
    response = await client.post(f"/v1/{path}", json=body, headers=ID if headers is None else headers)
    assert response.status_code == 200, response.text
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert events[-1] == "data: [DONE]"
    return [Event(event) for event in events]


async def refusal(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == "Last-Event-ID"
    return error


def remember(backend: FakeBackend, num_tokens: int) -> None:
    """What engines would of the requests that the backend got, and of no others: so many tokens of each answer."""
    backend.remembered.clear()
    for request in backend.requests:
        tag = request.resume_tag
        assert tag is not None
        tokens = backend.answer_ids[request.choice_index :][:num_tokens]
        backend.remembered.setdefault(tag.key, []).append(ResumePoint(tag, request.seed, tokens))
    backend.requests.clear()


VARIANTS = {
    "completion": ("completions", COMPLETION),
    "chat": ("chat/completions", CHAT),
    "echo": ("completions", {**COMPLETION, "echo": True}),
    "two": ("completions", {**COMPLETION, "n": 2, "seed": 5}),
    "chat of three": ("chat/completions", {**CHAT, "n": 3}),
    "two prompts": ("completions", {**COMPLETION, "prompt": ["Once", "upon a"]}),
    "stop string": ("completions", {**COMPLETION, "stop": ["and more"]}),
    "usage": ("chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    "logprobs": ("completions", {**COMPLETION, "logprobs": 2}),
    "chat logprobs": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "token ids": ("completions", {**COMPLETION, "return_token_ids": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_what_follows_is_what_would_have_followed(
    client: httpx.AsyncClient, backend: FakeBackend, variant: str, tokens_per_step: int
) -> None:
    """After every event that the client may have seen last, whether the engine remembers more or less than that."""
    path, body = VARIANTS[variant]
    backend.tokens_per_step = tokens_per_step
    whole = await ask(client, path, body)
    seeds = [request.seed for request in backend.requests]
    numbered = [index for index, event in enumerate(whole) if event.id is not None]
    assert len({whole[index].id for index in numbered}) == len(numbered) > 3
    requests = list(backend.requests)
    for count, index in enumerate(numbered):
        backend.requests[:] = requests
        remember(backend, num_tokens=(100, 2)[count % 2])
        last = whole[index].id
        assert last is not None
        rest = await ask(client, path, body, {**ID, "Last-Event-ID": last})
        if tokens_per_step == 1:
            assert by_choice(rest) == by_choice(whole[index + 1 :])
            if len(requests) == 1:
                assert [event.id for event in rest] == [event.id for event in whole[index + 1 :]]
        else:
            assert texts(rest) == texts(whole[index + 1 :])
        assert all(request.seed == seeds[request.resume_tag.index] for request in backend.requests)


def by_choice(events: list[Event]) -> dict[int, list[dict[str, Any]]]:
    """The chunks of each choice, and of none under -1. Choices do not wait for each other."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.data != "[DONE]":
            chunk = json.loads(event.data)
            index = chunk["choices"][0]["index"] if chunk["choices"] else -1
            found.setdefault(index, []).append(chunk)
    return found


def texts(events: list[Event]) -> dict[int, str]:
    """By choice. Steps of several tokens may be cut into other events."""
    found: dict[int, str] = {}
    for event in events:
        for choice in [] if event.data == "[DONE]" else json.loads(event.data)["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return {index: text for index, text in found.items() if text}


async def test_tokens_that_are_remembered_are_not_asked_for_again(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await ask(client, "completions", COMPLETION)
    (first,) = backend.requests
    remember(backend, num_tokens=8)
    await ask(client, "completions", COMPLETION, {**ID, "Last-Event-ID": "5"})
    (again,) = backend.requests
    assert again.resume_token_ids == backend.answer_ids[:5]  # no more than was seen: the others have no event yet
    assert again.seed == first.seed
    assert again.resume_tag == msgspec.structs.replace(first.resume_tag, num_resumes=1)
    assert again.request_id != first.request_id  # the gateway may still hold the old stream


async def test_a_stream_that_is_resumed_can_be_resumed_again(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    whole = await ask(client, "chat/completions", CHAT)
    for seen in (2, 4, 7):
        remember(backend, num_tokens=seen + 1)
        rest = await ask(client, "chat/completions", CHAT, {**ID, "Last-Event-ID": str(seen)})
        assert [e.data for e in rest] == [e.data for e in whole if num_tokens(e) > seen][-len(rest) :]


def num_tokens(event: Event) -> float:
    """Of the only answer, that the client has seen with this event."""
    return float("inf") if event.id is None else int(event.id.partition("-")[0].rstrip("e"))


async def test_what_nobody_remembers_goes_on_only_where_it_would_be_the_same(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    for fields in ({"temperature": 0}, {"seed": 4}):
        body = {**COMPLETION, **fields}
        whole = await ask(client, "completions", body)
        rest = await ask(client, "completions", body, {**ID, "Last-Event-ID": "3"})
        assert texts(rest)[0] == texts(whole[whole.index(next(e for e in whole if num_tokens(e) == 3)) + 1 :])[0]
    body = {**COMPLETION, "temperature": 1}
    await ask(client, "completions", body)
    error = await refusal(client, body, {**ID, "Last-Event-ID": "3"})
    assert error["code"] == "not_resumable"
    assert "Send it without Last-Event-ID" in error["message"]


@pytest.mark.parametrize("change", ["id", "body", "path"])
async def test_only_the_same_request_goes_on(client: httpx.AsyncClient, backend: FakeBackend, change: str) -> None:
    keys = set()
    for name, path, body in [
        ("mine", "completions", COMPLETION),
        ("other" if change == "id" else "mine",
         "chat/completions" if change == "path" else "completions",
         CHAT if change == "path" else {**COMPLETION, "max_tokens": 99} if change == "body" else COMPLETION),
    ]:  # fmt: skip
        await ask(client, path, body, {"x-request-id": name})
        tag = backend.requests[-1].resume_tag
        assert tag is not None
        keys.add(tag.key)
    assert len(keys) == 2


@pytest.mark.parametrize(
    "last", ["x", "-1", "1.2", "5e5", "", "3 ", "1" * 5000, "3-", "3-12345", "3-1234567", "3-12345g", "3-123456-123456"]
)
async def test_an_id_that_no_event_had(client: httpx.AsyncClient, backend: FakeBackend, last: str) -> None:
    if not last:
        assert await ask(client, "completions", COMPLETION, {**ID, "Last-Event-ID": ""})  # as if it were not there
        return
    if last == "3 ":  # HTTP drops it
        return
    error = await refusal(client, COMPLETION, {**ID, "Last-Event-ID": last})
    assert "must be the id of an event of this stream" in error["message"]
    assert len(error["message"]) < 300


async def test_without_an_id_of_the_request_nothing_can_go_on(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert [event.id for event in await ask(client, "completions", COMPLETION, {})] == [None] * len(
        await ask(client, "completions", COMPLETION, {})
    )
    assert backend.requests[0].resume_tag is None
    error = await refusal(client, COMPLETION, {"Last-Event-ID": "3"})
    assert "needs the x-request-id" in error["message"]


async def test_answers_that_are_no_streams_are_left_alone(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {**COMPLETION, "stream": False}
    response = await client.post("/v1/completions", json=body, headers={**ID, "Last-Event-ID": "3"})
    assert response.status_code == 200
    assert backend.requests[0].resume_tag is None


def test_an_output_that_crosses_what_was_seen_is_cut() -> None:
    ids = EventIds(1, "abcdef", [Position(5)])
    output = EngineOutput("r", 3, [30, 40, 50, 60], "length")
    assert [(part.new_token_ids, part.finish_reason) for part in ids.cut(0, 3, output)] == [
        ([30, 40], None),
        ([30, 40, 50, 60], "length"),
    ]
    assert [part.new_token_ids for part in ids.cut(0, 4, output)] == [[30, 40], [30, 40, 50, 60]]
    assert ids.cut(0, 5, output) == [output]
    assert ids.cut(0, 0, EngineOutput("r", 0, [1, 2, 3, 4, 5])) == [EngineOutput("r", 0, [1, 2, 3, 4, 5])]
    assert EventIds(1, "abcdef").cut(0, 0, output) == [output]


def test_the_end_of_an_answer_is_an_event_of_its_own() -> None:
    ids = EventIds(2, "abcdef")
    ids.advance(CompletionOutput(index=0, text="a", token_ids=[1, 2]))
    assert str(ids) == "2.0-abcdef"
    ids.advance(CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop"))
    ids.advance(CompletionOutput(index=1, text="a", token_ids=[1]))
    assert str(ids) == "2e.1-abcdef"
