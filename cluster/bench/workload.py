"""Prompts of an exact length that share nothing, so that no cache answers for the engine."""

from __future__ import annotations

import numpy as np

# Ids that ordinary text has in every common vocabulary: above the special tokens, below the smallest one's size.
LOWEST_TOKEN_ID = 256
WORDS = ("time", "people", "way", "water", "day", "man", "thing", "life", "child", "world", "school", "hand", "place")


def random_token_prompts(num_prompts: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """`num_prompts` prompts of `length` ids below `vocab_size` (from 0 where the vocabulary is tiny)."""
    lowest = LOWEST_TOKEN_ID if vocab_size > 2 * LOWEST_TOKEN_ID else 0
    ids = np.random.default_rng(seed).integers(lowest, vocab_size, size=(num_prompts, length))
    return [[int(token_id) for token_id in row] for row in ids]


def random_word_prompts(num_prompts: int, length: int, seed: int) -> list[str]:
    """Texts of `length` common words: about as many tokens (the server's own count is what is reported)."""
    picks = np.random.default_rng(seed).integers(0, len(WORDS), size=(num_prompts, length))
    return [" ".join(WORDS[pick] for pick in row) for row in picks]
