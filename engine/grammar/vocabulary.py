"""A model's tokens as grammars see them: the bytes that each stands for, and how to spell bytes with few tokens.

Two tokenizers are made for llguidance. The *token* one is the model's own and gives the masks. In the *symbol* one
every byte is a token, and so is every special token of the model: with it a grammar can be explored byte by byte, some
ten microseconds each, where a mask over the whole vocabulary costs twenty times as much.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

NUM_BYTES = 256  # symbols below are bytes; those from here on are special tokens

_UNREACHABLE = 1 << 30


class Vocabulary:
    """Built once per model, in about half a second, and then only read. Raises `ValueError`.

    `tokenizer` is a fast tokenizer of transformers, `vocab_size` the rows of the model's logits: those that no token
    has are never allowed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos = list(eos_token_ids) or [vocab_size - 1]  # one is required; of a model without one it is never sampled
        self.tokens = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=eos)
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)  # int32 of a mask
        special = [i for i in range(vocab_size) if self.tokens.is_special_token(i)]
        self._symbols: list[list[int]] = [list(self.tokens.decode_bytes([i])) for i in range(vocab_size)]
        names = [bytes(self._symbols[token_id]) for token_id in special]
        for index, token_id in enumerate(special):
            self._symbols[token_id] = [NUM_BYTES + index]
        self._special = special
        symbols_eos = [NUM_BYTES + special.index(i) for i in eos if i in set(special)] or [NUM_BYTES]
        self.symbols = LLTokenizer(TokenizerWrapper(_Symbols(names or [b"<eos>"], symbols_eos[0])), slices=[])
        self._token_of: dict[bytes, int] = {}
        self._longest: dict[bytes, int] = {}  # by the first two bytes: the longest token that begins so
        self.run_length = [1] * NUM_BYTES  # by byte: the longest token that only repeats it
        self._spell(set(special))
        # Letters and digits, those first of which one token holds most.
        self.runs = sorted(b"aAfFxX0159" + bytes(range(98, 102)), key=lambda byte: -self.run_length[byte])
        single = [byte for byte in range(NUM_BYTES) if bytes([byte]) in self._token_of]
        self._spelled = {*single, *range(NUM_BYTES, NUM_BYTES + len(special))}
        # Bits of the symbols of which an answer is made: not its end, and no byte that is only found inside of tokens.
        self.usable_symbols = sum(1 << symbol for symbol in self._spelled) & ~(1 << symbols_eos[0])

    def _spell(self, special: set[int]) -> None:
        for token_id, symbols in enumerate(self._symbols):
            if token_id in special or not symbols:
                continue
            text = bytes(symbols)
            self._token_of.setdefault(text, token_id)
            self._longest[text[:2]] = max(self._longest.get(text[:2], 0), len(text))
            if text.count(text[0]) == len(text):
                self.run_length[text[0]] = max(self.run_length[text[0]], len(text))

    def symbols_of(self, token_id: int) -> list[int]:
        """What a token stands for. Do not modify."""
        return self._symbols[token_id]

    def spells_each(self, symbols: Sequence[int]) -> bool:
        """Whether each of the symbols is a token by itself."""
        return self._spelled.issuperset(symbols)

    def costs(self, symbols: Sequence[int]) -> list[int]:
        """For each position, and the end: how many tokens the symbols from there on need, at the least.

        A count of `1 << 30` or more says that they cannot be written in tokens.
        """
        costs = [_UNREACHABLE] * len(symbols) + [0]
        run_end = len(symbols)  # where the bytes around `start` end: at a special token, or the end
        text = bytes(symbol if symbol < NUM_BYTES else 0 for symbol in symbols)
        for start in range(len(symbols) - 1, -1, -1):
            if symbols[start] >= NUM_BYTES:
                costs[start], run_end = 1 + costs[start + 1], start
                continue
            best = min((costs[stop] for stop, _ in self._words(text, start, run_end)), default=_UNREACHABLE)
            costs[start] = best + 1
        return costs

    def first_token(self, symbols: Sequence[int], start: int, costs: Sequence[int]) -> int:
        """The token that begins the shortest spelling of the symbols from `start` on (`costs` are theirs)."""
        if symbols[start] >= NUM_BYTES:
            return self._special[symbols[start] - NUM_BYTES]
        run_end = next((i for i in range(start, len(symbols)) if symbols[i] >= NUM_BYTES), len(symbols))
        # What can be one token is looked at, and no more: a path may be long.
        longest = min(run_end, start + self._longest.get(bytes(symbols[start : min(start + 2, run_end)]), 1))
        text = bytes(symbols[start:longest])
        words = self._words(text, 0, len(text))
        return next(token for stop, token in words if costs[start + stop] == costs[start] - 1)

    def _words(self, text: bytes, start: int, end: int) -> list[tuple[int, int]]:
        """Tokens at `start` of the text: (where it ends, token id), the shortest first."""
        longest = self._longest.get(text[start : start + 2], 1)
        found = []
        for stop in range(start + 1, min(start + longest, end) + 1):
            token_id = self._token_of.get(text[start:stop])
            if token_id is not None:
                found.append((stop, token_id))
        return found


class _Symbols:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, special_names: list[bytes], eos: int) -> None:
        self.eos_token_id = eos
        self.tokens = [bytes([i]) for i in range(NUM_BYTES)] + special_names
        self.special_token_ids = list(range(NUM_BYTES, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
