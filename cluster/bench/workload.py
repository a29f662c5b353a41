"""What is sent: prompts of known lengths, with nothing in common but the prefix that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import Endpoint

# Ids that ordinary text has in every common vocabulary: above the special tokens, below the smallest one's size.
LOWEST_TOKEN_ID = 256
WORDS = ("time", "people", "way", "water", "day", "man", "thing", "life", "child", "world", "school", "hand", "place")

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`128` or `64:256`. Raises `ValueError`."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(text)
        return lengths

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        return [int(length) for length in random.integers(self.low, self.high + 1, size=count)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Question:
    """One request to be sent: its prompt, and how many tokens of an answer it asks for."""

    prompt: Prompt
    output_len: int


def questions(
    endpoint: Endpoint, count: int, prefix_len: int, input_len: Lengths, output_len: Lengths, vocab_size: int, seed: int
) -> list[Question]:
    """`count` requests whose prompts begin with the same `prefix_len` tokens and go on with `input_len` of their own.

    The same seed gives the same requests; another one another prefix, too. For `chat` a length is one of words.
    """
    random = np.random.default_rng(seed)
    inputs, outputs = input_len.draw(count, random), output_len.draw(count, random)
    prompts: Sequence[Prompt]
    if endpoint == "completions":
        (prefix,) = random_token_prompts(1, prefix_len, vocab_size, seed + 2**32)
        tails = random_token_prompts(count, input_len.high, vocab_size, seed)
        prompts = [prefix + tail[:length] for tail, length in zip(tails, inputs, strict=True)]
    else:
        (start,) = random_word_prompts(1, prefix_len, seed + 2**32)
        texts = random_word_prompts(count, input_len.high, seed)
        prompts = [" ".join([*start.split(), *t.split()[:length]]) for t, length in zip(texts, inputs, strict=True)]
    return [Question(prompt, length) for prompt, length in zip(prompts, outputs, strict=True)]


def random_token_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`num_prompts` prompts of `length` ids below `vocab_size` (from 0 where the vocabulary is tiny)."""
    lowest = LOWEST_TOKEN_ID if vocab_size > 2 * LOWEST_TOKEN_ID else 0
    ids = np.random.default_rng(seed).integers(lowest, vocab_size, size=(num_prompts, length))
    return [[int(token_id) for token_id in row] for row in ids]


def random_word_prompts(num_prompts: int, length: int, seed: int) -> list[str]:
    """Texts of `length` common words: about as many tokens (the server's own count is what is reported)."""
    picks = np.random.default_rng(seed).integers(0, len(WORDS), size=(num_prompts, length))
    return [" ".join(WORDS[pick] for pick in row) for row in picks]
