"""What long texts cost: where they are tokenized, how much of them, and how many at once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from test_completions import ids_of

from quire.cluster.api import chat_prompt as chat_prompt_module
from quire.cluster.api import encoding
from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.encoding import tokenize_end, tokenize_start
from quire.cluster.api.heavy_work import LARGE, HeavyWork
from quire.cluster.api.limits import ApiLimits

MODEL = "smollm2-135m-instruct"
USER = {"role": "user", "content": "hi"}


async def test_what_a_template_renders_is_tokenized_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 100 bytes may have a prompt of 24 kB."""
    threads: list[int] = []
    tokenize = chat_prompt_module.tokenize_any

    def noting(*args: Any, **kwargs: Any) -> list[int]:
        threads.append(threading.get_ident())
        return tokenize(*args, **kwargs)

    monkeypatch.setattr(chat_prompt_module, "tokenize_any", noting)
    body = {"messages": [USER], "chat_template": "{{ 'a b ' * 6000 }}"}
    response = await client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["count"]) == (200, 12_001)
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("cut", [{}, {"truncate_prompt_tokens": 5}])
async def test_a_template_renders_little_more_than_fits(
    client: httpx.AsyncClient, path: str, cut: dict[str, int]
) -> None:
    body = {"model": MODEL, "messages": [USER], "chat_template": "{{ 'a b ' * 1000000 }}", **cut}
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "chat_template: the prompt has more than 32768 characters, which never fit into the model's context."
    )


TEXTS = {
    "words": "The year 2024 was 365 days long; 你好 🎉 it's over now.\n\n  Next: " * 1000,
    "one word": "abcdefgh" * 4_000,
    "code": "def f(x):\n\treturn x ** 2  # square\n\n\n" * 1500,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("lead", ["", "x", "\n12"])
def test_an_end_or_beginning_of_a_text_has_the_tokens_of_the_whole(
    served: ServedModel, text: str, num_tokens: int, lead: str
) -> None:
    whole = ids_of(served, lead + text)
    assert tokenize_end(served, lead + text, num_tokens, add_special_tokens=True) == whole[-num_tokens:]
    assert tokenize_start(served, lead + text, num_tokens, add_special_tokens=True)[:num_tokens] == whole[:num_tokens]


@pytest.mark.parametrize("num_chars", [60_000, 60_001, 200_000])
def test_a_text_without_structure_is_only_divided_otherwise(served: ServedModel, num_chars: int) -> None:
    for token_ids in (
        tokenize_end(served, " " * num_chars, 100, add_special_tokens=True),
        tokenize_start(served, " " * num_chars, 100, add_special_tokens=True)[:100],
    ):
        assert len(token_ids) == 100
        assert served.token_decoder.decode(token_ids).strip(" ") == ""


def test_a_text_that_is_cut_costs_as_much_as_its_end(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = encoding._encode

    def noting(served: ServedModel, text: str, **kwargs: Any) -> list[int]:
        encoded.append(len(text))
        return encode(served, text, **kwargs)

    monkeypatch.setattr(encoding, "_encode", noting)
    assert len(tokenize_end(served, "word and word " * 500_000, 10, add_special_tokens=False)) == 10
    assert sum(encoded) < 20_000


async def test_tokenize_has_a_limit_of_its_own_and_cuts(backend: FakeBackend, served: ServedModel) -> None:
    transport = httpx.ASGITransport(create_app(backend, limits=ApiLimits(max_tokenize_chars=20_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        text = "word " * 5000
        response = await http.post("/tokenize", json={"prompt": text})
        message = (
            "prompt: 25000 characters given, at most 20000 are tokenized at once; "
            "truncate_prompt_tokens keeps the end of a longer text."
        )
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)
        response = await http.post("/tokenize", json={"prompt": text, "truncate_prompt_tokens": 9})
        assert response.json()["tokens"] == ids_of(served, text)[-9:]
        messages = [{"role": "user", "content": text}]
        response = await http.post("/tokenize", json={"messages": messages})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        response = await http.post("/tokenize", json={"messages": messages, "truncate_prompt_tokens": 9})
        assert response.json()["count"] == 9
        response = await http.post("/tokenize", json={"prompt": text, "truncate_prompt_tokens": 1024})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_few_long_texts_are_worked_on_at_once() -> None:
    """Also when those who wait for them have gone: their threads have not."""
    heavy, running, most = HeavyWork(2), 0, 0
    lock, may_end = threading.Lock(), threading.Event()

    def work() -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        may_end.wait(10)
        with lock:
            running -= 1
        return "done"

    gone = [asyncio.create_task(heavy.run("x" * LARGE, work)) for _ in range(2)]
    await asyncio.sleep(0.05)
    for task in gone:
        task.cancel()
    tasks = [asyncio.create_task(heavy.run("x" * LARGE, work)) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert (running, most) == (2, 2)
    assert await heavy.run("short", lambda: "at once") == "at once"
    may_end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 3
    assert most == 2
