"""What long answers cost: short requests may ask for them, and no other stream must wait while they are shaped."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_backend import FakeBackend

from quire.cluster.api import chat as chat_module
from quire.cluster.api import chat_turn as turn_module
from quire.cluster.api import completions as completions_module
from quire.cluster.api import heavy_work, whole_answers
from quire.cluster.api.answers import Embedding, Embeddings, EmbeddingUsage
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.beam_search import BeamGeneration
from quire.cluster.api.heavy_work import HeavyWork
from quire.cluster.api.logprobs import TokenNames, chat_logprobs
from quire.cluster.api.whole_answers import json_pieces, whole_response
from quire.engine import beam_search as beam_search_module
from quire.engine.beam_search import BeamSearch, BeamSearchParams

MODEL = "smollm2-135m-instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": MODEL, "prompt": [504] * 600}


@pytest.mark.parametrize(
    ("path", "body", "in_loop"),
    [
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "max_tokens": 5}, True),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "n": 4}, False),
        ("chat/completions", {**CHAT, "logprobs": True, "n": 32}, False),
        ("completions", {**PROMPT, "logprobs": 20, "max_tokens": 5}, True),
        ("completions", {**PROMPT, "logprobs": 20, "max_tokens": 300, "n": 4}, False),
        ("completions", {**PROMPT, "logprobs": 20, "max_tokens": 1, "echo": True}, False),
        ("completions", {**PROMPT, "logprobs": 20, "max_tokens": 1, "echo": True, "stream": True}, False),
        ("completions", {**PROMPT, "logprobs": 0, "max_tokens": 1, "prompt_logprobs": 20}, False),
        ("completions", {**PROMPT, "logprobs": 0, "max_tokens": 1, "n": 20}, True),
        ("completions", {**PROMPT, "logprobs": 0, "max_tokens": 1, "n": 20, "return_token_ids": True}, False),
        (
            "completions",
            {**PROMPT, "prompt": "word " * 600, "logprobs": 0, "max_tokens": 1, "n": 20, "echo": True},
            False,
        ),
    ],
)
async def test_a_long_answer_is_shaped_off_the_loop(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    in_loop: bool,
) -> None:
    threads: list[int] = []

    def noting(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(chat_module, "chat_logprobs", noting(chat_module.chat_logprobs))
    monkeypatch.setattr(completions_module, "completion_logprobs", noting(completions_module.completion_logprobs))
    backend.answer_ids = list(range(504, 804))
    backend.tokens_per_step = 50
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    assert {thread == threading.get_ident() for thread in threads[:1]} == {in_loop}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 5, "n": 3, "return_token_ids": True}),
        ("chat/completions", {**CHAT, "prompt_logprobs": 2, "tools": []}),
        ("completions", {**PROMPT, "logprobs": 3, "echo": True, "n": 2, "return_token_ids": True}),
        ("completions", {**PROMPT, "prompt_logprobs": 1, "return_token_ids": True}),
        ("embeddings", {"model": MODEL, "input": ["a", "b c"] * 70}),
        ("embeddings", {"model": MODEL, "input": "a", "encoding_format": "base64"}),
    ],
)
async def test_a_long_answer_is_the_same_as_a_short_one(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    answers = []
    for large in (0, 1 << 30):
        monkeypatch.setattr(whole_answers, "LARGE_ANSWER", large)
        monkeypatch.setattr(heavy_work, "LARGE_ANSWER", large)
        response = await client.post(f"/v1/{path}", json={**body, "request_id": "mine"})
        assert response.status_code == 200, response.text
        answer = response.json()
        answers.append(response.content.replace(b'"created":%d' % answer.get("created", 0), b""))
    assert answers[0] == answers[1]


async def test_a_long_answer_is_sent_in_pieces() -> None:
    """A server copies what its socket does not take at once, and other streams wait for it."""
    numbers = np.arange(4096, dtype=np.float32).tolist()

    def answer() -> Embeddings:
        return Embeddings([Embedding(i, numbers) for i in range(100)], "m", EmbeddingUsage(1, 1))

    response = await whole_response(HeavyWork(), 100 * 4096, answer)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await response({"type": "http"}, send, send)  # type: ignore[arg-type]
    begin, *pieces, end = sent
    whole = msgspec.json.encode(answer())
    assert dict(begin["headers"])[b"content-length"] == str(len(whole)).encode()
    assert b"".join(piece["body"] for piece in pieces) == whole
    assert len(pieces) > 2
    assert all(piece["more_body"] for piece in pieces)
    assert not end.get("more_body")


@pytest.mark.parametrize(
    ("module", "path", "body"),
    [
        (turn_module, "chat/completions", {**CHAT, "logprobs": True, "n": 3}),
        (turn_module, "responses", {"model": MODEL, "input": "a", "include": ["message.output_text.logprobs"]}),
        (completions_module, "completions", {**PROMPT, "logprobs": 1, "n": 3}),
    ],
)
async def test_logprobs_end_choice_by_choice(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, module: Any, path: str, body: dict[str, Any]
) -> None:
    """With the request, all at once, they would take the loop with them."""
    made: list[Any] = []
    generation_of = module.generation_of

    def noting(*args: Any, **kwargs: Any) -> Any:
        made.append(generation_of(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, "generation_of", noting)
    response = await client.post(f"/v1/{path}", json=body)
    answer = response.json()
    assert all(each["logprobs"] for each in answer.get("choices") or answer["output"][0]["content"])
    assert [state.logprobs for state in made[0].states] == [None] * body.get("n", 1)


def test_no_piece_of_a_long_answer_takes_long(served: ServedModel) -> None:
    """The encoder keeps other threads from running until it is through."""
    numbers = np.arange(2048, dtype=np.float32).tolist()
    data = [Embedding(i, numbers) for i in range(300)]
    told = FakeBackend.logprobs_of
    logprobs = chat_logprobs([told(504 + i, 20) for i in range(2000)], TokenNames(served.token_decoder))
    for answer in (Embeddings(data, "m", EmbeddingUsage(1, 1)), logprobs):
        whole = msgspec.json.encode(answer)
        pieces = list(json_pieces(answer))
        assert b"".join(pieces) == whole
        assert max(map(len, pieces)) < len(whole) / 4


def test_a_token_is_looked_up_once_in_an_answer(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    token_bytes = type(served.token_decoder).token_bytes

    def counting(decoder: Any, token_id: int) -> bytes:
        asked[token_id] += 1
        return token_bytes(decoder, token_id)

    monkeypatch.setattr(type(served.token_decoder), "token_bytes", counting)
    chat_logprobs([FakeBackend.logprobs_of(504 + i % 3, 20) for i in range(100)], TokenNames(served.token_decoder))
    assert len(asked) == 22
    assert set(asked.values()) == {1}


def test_continuations_that_a_beam_search_drops_cost_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step makes twenty for each beam, and keeps one."""
    made = 0
    beam_type = beam_search_module.Beam

    def counting(**fields: Any) -> Any:
        nonlocal made
        made += 1
        return beam_type(**fields)

    monkeypatch.setattr(beam_search_module, "Beam", counting)
    search = BeamSearch([[1], [2]], BeamSearchParams(beam_width=10, max_tokens=50), [2], 100)
    for _ in range(50):
        made = 0
        top = [(token_id, -0.1 * token_id) for token_id in range(3, 23)]
        search.advance([top for _ in search.wanted()])
        assert made == 20


async def test_others_go_on_while_beams_become_text(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    seen: list[int] = []
    answer = BeamGeneration._answer

    def noting(generation: BeamGeneration, *args: Any) -> None:
        seen.append(turns)
        answer(generation, *args)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(BeamGeneration, "_answer", noting)
    task = asyncio.create_task(others())
    body = {**CHAT, "use_beam_search": True, "n": 4, "temperature": 0, "max_tokens": 3}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    task.cancel()
    assert len(seen) == len(set(seen)) == 4


async def test_prompts_do_not_wait_for_the_answers_of_others() -> None:
    work, may_end = HeavyWork(), threading.Event()
    answers = [asyncio.create_task(work.shape(heavy_work.LARGE_ANSWER, lambda: may_end.wait(60))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(work.run("x" * heavy_work.LARGE, lambda: "tokens"), 20) == "tokens"
    assert not any(answer.done() for answer in answers)
    may_end.set()
    assert await asyncio.gather(*answers) == [True] * 3
