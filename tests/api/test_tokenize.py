"""/tokenize and /detokenize in vLLM's shapes, and what they refuse."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from test_completions import ids_of
from test_errors import error, still_answers

from quire.cluster.api import tokenization
from quire.cluster.api.backend import ServedModel

MODEL = "smollm2-135m-instruct"
TEXT = "The year 2024: 你好 🎉"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("named", [{}, {"model": MODEL}])
async def test_a_text(client: httpx.AsyncClient, served: ServedModel, named: dict[str, str]) -> None:
    response = await client.post("/tokenize", json={"prompt": TEXT, **named})
    tokens = ids_of(served, TEXT)
    expected = {"count": len(tokens), "max_model_len": 1024, "tokens": tokens, "token_strs": None}
    assert (response.status_code, response.json()) == (200, expected)
    back = await client.post("/detokenize", json={"tokens": tokens, **named})
    assert (back.status_code, back.json()) == (200, {"prompt": TEXT})


async def test_a_conversation(client: httpx.AsyncClient, served: ServedModel) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    rendered = served.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert answer["tokens"] == ids_of(served, rendered)
    assert answer["token_strs"][:2] == ["<|im_start|>", "system"]
    back = (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": rendered}  # special tokens and all
    chat = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES})
    assert chat.json()["usage"]["prompt_tokens"] == answer["count"]


async def test_a_text_longer_than_the_context(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "word " * 5000})).json()
    assert answer["count"] > answer["max_model_len"]
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(("num_tokens", "in_loop"), [(100, True), (20_000, False)])
async def test_what_takes_long_is_done_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, num_tokens: int, in_loop: bool
) -> None:
    """Names and checks of tokens, texts and the JSON of it all."""
    threads: list[int] = []
    shape = tokenization.json_response

    def noting(payload: Any) -> Any:
        threads.append(threading.get_ident())
        return shape(payload)

    monkeypatch.setattr(tokenization, "json_response", noting)
    text = "a " * num_tokens
    answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["token_strs"][0] == "a"
    assert len(answer["token_strs"]) == answer["count"] >= num_tokens
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}
    assert [thread == threading.get_ident() for thread in threads] == [in_loop] * 2


@pytest.mark.parametrize(
    ("path", "body", "message", "param", "code"),
    [
        ("/tokenize", {}, "prompt: is required.", "prompt", "missing_field"),
        ("/tokenize", {"prompt": 5}, "prompt: must be a string, got 5.", "prompt", None),
        (
            "/tokenize",
            {"prompt": "a", "messages": MESSAGES},
            "messages: is given together with prompt; give one of them.",
            "messages",
            None,
        ),
        ("/tokenize", {"messages": []}, "messages: must hold at least one message.", "messages", None),
        (
            "/tokenize",
            {"messages": [{"role": "user"}]},
            "messages[0].content: is required.",
            "messages[0].content",
            None,
        ),
        (
            "/tokenize",
            {"prompt": "a", "add_specials": True},
            "add_specials: is not a known field. Did you mean 'add_special_tokens'?",
            "add_specials",
            "unknown_field",
        ),
        ("/detokenize", {"tokens": [49152]}, "tokens: token ids must be from 0 to 49151, got 49152.", "tokens", None),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]: must be an integer, got 'a'.", "tokens[1]", None),
        (
            "/detokenize",
            {"model": "gpt-5", "tokens": []},
            f"The model 'gpt-5' does not exist. Served here: {MODEL}.",
            "model",
            "model_not_found",
        ),
    ],
)
async def test_what_is_refused(
    client: httpx.AsyncClient, path: str, body: Any, message: str, param: str, code: str | None
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert response.json() == error(message, param, code)
    await still_answers(client)
