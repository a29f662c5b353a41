"""Words that must not appear, as the token sequences that would make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TokenSequences = tuple[tuple[int, ...], ...]


def bad_word_sequences(words: Sequence[str], tokenize: Callable[[str], list[int]]) -> TokenSequences:
    """Each word as it is written at the beginning of a text and after a space, in order and without repeats.

    `tokenize` adds no special tokens. A word may still be made of other tokens than these, piece by piece: as in vLLM,
    it is the usual tokens of a word that are forbidden, not its characters.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}") if bare else (word,):
            token_ids = tuple(tokenize(text))
            if token_ids:
                sequences[token_ids] = None
    return tuple(sequences)
