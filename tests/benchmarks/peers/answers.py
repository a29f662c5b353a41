"""Greedy answers to some fixed prompts, to see that those who are compared compute the same."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The year 2024 and 1,234 apples:",
)
NUM_TOKENS = 32

Answers = list[list[int]]
Ask = Callable[[str, str], list[int]]  # of a URL and a prompt: the ids of NUM_TOKENS tokens


def of_server(url: str, ask: Ask) -> Answers:
    """The token ids of each answer, asked for one by one."""
    return [ask(url, prompt) for prompt in PROMPTS]


def num_equal(answers: Answers, others: Answers) -> int:
    """How many of the answers are the same, token by token."""
    return sum(one == other for one, other in zip(answers, others, strict=True))


def ask_openai(url: str, prompt: str) -> list[int]:
    """As vLLM has it: `return_token_ids` beside OpenAI's fields."""
    token_ids: list[int] = _complete(url, prompt, {"return_token_ids": True})["choices"][0]["token_ids"]
    return token_ids


def ask_dynamo(url: str, prompt: str) -> list[int]:
    """In a field that is its own."""
    answer = _complete(url, prompt, {"nvext": {"extra_fields": ["completion_token_ids"]}})
    token_ids: list[int] = answer["nvext"]["completion_token_ids"]
    return token_ids


def ask_sglang(url: str, prompt: str) -> list[int]:
    """Its own path, as llama.cpp's below."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    token_ids: list[int] = _post(f"{url}/generate", {"text": prompt, "sampling_params": sampling})["output_ids"]
    return token_ids


def ask_llamacpp(url: str, prompt: str) -> list[int]:
    """Its own path: the one in OpenAI's form tells no ids."""
    body = {"prompt": prompt, "n_predict": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    token_ids: list[int] = _post(f"{url}/completion", body)["tokens"]
    return token_ids


def _complete(url: str, prompt: str, extra: dict[str, Any]) -> Any:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    asked = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return _post(f"{url}/v1/completions", asked | extra)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)
