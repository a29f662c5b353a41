"""`prompt_logprobs`, and `echo` with `logprobs`: exact bodies on a fake backend, streamed and not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_backend import DEFAULT_ANSWER, FakeBackend
from test_completions import CHAT, COMPLETION, ids_of, post, stream

from quire.cluster.api import completions
from quire.cluster.api.backend import ServedModel
from quire.engine.outputs import EngineOutput

PROMPT = "Once upon a time"


def texts(served: ServedModel, ids: list[int]) -> list[str]:
    return [served.token_decoder.decode([token_id], skip_special_tokens=False) for token_id in ids]


async def test_prompt_logprobs_in_vllms_shape(client: httpx.AsyncClient, served: ServedModel) -> None:
    ids = ids_of(served, PROMPT)
    names = texts(served, [*ids, 0, 1])
    body = await post(client, "completions", COMPLETION, prompt_logprobs=2, n=2, max_tokens=3)
    expected = [
        None,
        *(
            {
                str(ids[p]): {"logprob": -p / 4, "rank": p, "decoded_token": names[p]},
                "0": {"logprob": -1.0, "rank": 1, "decoded_token": names[4]},
                "1": {"logprob": -2.0, "rank": 2, "decoded_token": names[5]},
            }
            for p in (1, 2, 3)
        ),
    ]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected]
    plain = await post(client, "completions", COMPLETION, max_tokens=3)
    assert "prompt_logprobs" not in plain["choices"][0]


async def test_of_a_conversation_they_stand_beside_the_choices(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = await post(client, "chat/completions", CHAT, prompt_logprobs=0, n=2, max_tokens=3)
    [first, second] = backend.requests
    assert (first.sampling_params.prompt_logprobs, second.sampling_params.prompt_logprobs) == (0, None)
    told = body["prompt_logprobs"]
    assert told[0] is None
    assert [list(entry) for entry in told[1:]] == [[str(token_id)] for token_id in first.prompt_token_ids[1:]]
    assert all("prompt_logprobs" not in choice for choice in body["choices"])
    assert "prompt_logprobs" not in await post(client, "chat/completions", CHAT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [7] * 1000, "prompt_logprobs": 20, "n": 5}, "n"),
        ({"prompt": [[7] * 1000] * 5, "echo": True, "logprobs": 20}, "prompt"),
        ({"prompt": [[7] * 1000] * 5, "echo": True, "logprobs": 20, "stream": True}, "prompt"),
    ],
)
async def test_what_repeats_them_too_often_is_refused(
    fields: dict[str, Any],
    param: str,
    client: httpx.AsyncClient,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small request could else take gigabytes of a gateway. One prompt with one answer always may."""
    monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 100_000)
    response = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 1, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    expected = "105,000 logprobs of prompts in one response (tokens x 21 x n); for more than one answer at most 100,000"
    assert error["message"] == f"{param}: {expected} are allowed."
    assert backend.requests == []
    monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 1)
    await post(client, "completions", COMPLETION, max_tokens=1, prompt_logprobs=20)


async def test_an_echo_is_scored(client: httpx.AsyncClient, backend: FakeBackend, served: ServedModel) -> None:
    ids = ids_of(served, PROMPT)
    body = await post(client, "completions", COMPLETION, echo=True, logprobs=1, max_tokens=2)
    (choice,) = body["choices"]
    answer = backend.answer_ids[:2]
    names = texts(served, [*ids, *answer, 0])
    assert choice["text"] == PROMPT + "".join(names[4:6])
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == names[:6]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.5, -0.75, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, *(len("".join(names[:i])) for i in range(1, 6))]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {names[1]: -0.25, names[6]: -1.0}
    assert logprobs["top_logprobs"][4] == {names[4]: -0.5}
    assert body["usage"]["completion_tokens"] == 2


async def test_what_evaluation_harnesses_ask(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """Scores of texts given as token ids, and no answer."""
    body = await post(
        client, "completions", COMPLETION, prompt=[[5, 6, 7], [8]], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert [request.sampling_params.max_tokens for request in backend.requests] == [0, 0]
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[None, -0.25, -0.5], [None]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [3, 1]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == 4
    alone = await post(client, "completions", COMPLETION, echo=True, max_tokens=0)
    assert (alone["choices"][0]["text"], alone["choices"][0]["logprobs"]) == (PROMPT, None)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_tokens": 0}, {"prompt": ["a b c", "d e"], "n": 2}])
async def test_a_streamed_echo_adds_up_to_the_whole_one(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    asked = {"echo": True, "logprobs": 2, **fields}
    whole = await post(client, "completions", COMPLETION, **asked)
    chunks = await stream(client, "completions", COMPLETION, **asked)
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in mine for value in chunk["logprobs"][name]] == values


async def test_choices_that_are_faster_wait_for_the_scores_of_their_prompt(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first choice of a prompt brings its logprobs; here it begins after the second has ended."""
    original = FakeBackend._step

    def late(self: FakeBackend, request: Any, num_sent: dict[str, int]) -> list[EngineOutput]:
        others = [each for each in self.running if each != request.request_id]
        return [] if request.choice_index == 0 and others else original(self, request, num_sent)

    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "n": 2}
    whole = await post(client, "completions", COMPLETION, **asked)
    monkeypatch.setattr(FakeBackend, "_step", late)
    chunks = await stream(client, "completions", COMPLETION, **asked)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == whole["choices"][index]["text"]
        scores = [value for chunk in mine for value in chunk["logprobs"]["token_logprobs"]]
        assert scores == whole["choices"][index]["logprobs"]["token_logprobs"]
    assert len(backend.running) == 0


async def test_an_answer_that_ends_before_its_prompt_was_told_is_sent_all_the_same(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "prompt_logprobs_of", staticmethod(lambda _: None))
    chunks = await stream(client, "completions", COMPLETION, echo=True, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + DEFAULT_ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_both_at_once_and_the_best_of_several(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = await post(
        client, "completions", COMPLETION, echo=True, logprobs=1, prompt_logprobs=3, best_of=2, max_tokens=2
    )
    assert backend.requests[0].sampling_params.prompt_logprobs == 3
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["tokens"]) == 6
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert len(choice["prompt_logprobs"][1]) == 4


async def test_names_as_ids(client: httpx.AsyncClient, served: ServedModel) -> None:
    body = await post(
        client,
        "completions",
        COMPLETION,
        echo=True,
        logprobs=0,
        max_tokens=0,
        return_tokens_as_token_ids=True,
    )
    expected = [f"token_id:{token_id}" for token_id in ids_of(served, PROMPT)]
    assert body["choices"][0]["logprobs"]["tokens"] == expected


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs", "must be an integer from 0 to 20, got 21."),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "must be an integer from 0 to 20, got -1."),
        (
            "completions",
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "are not available when stream is true.",
        ),
        (
            "chat/completions",
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs",
            "are not available when stream is true.",
        ),
        (
            "completions",
            {"max_tokens": 0},
            "max_tokens",
            "must be an integer from 1 to 1020, what the context leaves after the prompt; got 0.",
        ),
        (
            "completions",
            {"max_tokens": -1, "echo": True},
            "max_tokens",
            "must be an integer from 0 to 1020, what the context leaves after the prompt; got -1.",
        ),
        ("completions", {"max_tokens": 0, "echo": True, "use_beam_search": True}, "max_tokens", "must be an integer"),
        (
            "completions",
            {"prompt_logprobs": 1, "use_beam_search": True},
            "prompt_logprobs",
            "does not work together with use_beam_search.",
        ),
    ],
)
async def test_refusals(client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    response = await client.post(f"/v1/{path}", json={**(CHAT if "chat" in path else COMPLETION), **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: {message}")
    assert (await post(client, "completions", COMPLETION))["choices"][0]["text"] == DEFAULT_ANSWER


async def test_a_prompt_without_an_answer_counts_in_the_metrics(client: httpx.AsyncClient) -> None:
    await post(client, "completions", COMPLETION, echo=True, max_tokens=0, n=2)
    text = (await client.get("/metrics")).text
    counted = [line for line in text.splitlines() if line.startswith("quire:request_prompt_tokens_sum")]
    assert [float(line.rsplit(" ", 1)[1]) for line in counted] == [4.0]
