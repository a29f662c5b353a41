"""Greedy answers to some fixed prompts, to see that those who are compared compute the same."""

from __future__ import annotations

import json
import urllib.request

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The year 2024 and 1,234 apples:",
)
NUM_TOKENS = 32

Answers = list[list[int]]


def of_server(url: str) -> Answers:
    """The token ids of each answer, asked for one by one."""
    return [_ask(url, prompt) for prompt in PROMPTS]


def num_equal(answers: Answers, others: Answers) -> int:
    """How many of the answers are the same, token by token."""
    return sum(one == other for one, other in zip(answers, others, strict=True))


def _ask(url: str, prompt: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        token_ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return token_ids
