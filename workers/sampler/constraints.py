"""Tokens that a row may not sample: all but the allowed ones, those that complete a bad word, an end that is too early.

What is forbidden follows from the row's parameters and its tokens alone, so it is the same after a preemption, on
another engine, and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.bad_words import TokenSequences
from quire.engine.outputs import IntArray, NewRow

from ..transfers import to_device

Int64Array = npt.NDArray[np.int64]
_NONE: Int64Array = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Single logits of the batch: entry j is token `token_ids[j]` of batch index `indices[j]`."""

    indices: Int64Array  # [m]
    token_ids: Int64Array  # [m]

    @classmethod
    def concatenate(cls, parts: list[tuple[int, Int64Array]]) -> TokenEntries | None:
        """From (batch index, its token ids) pairs; None where there are none."""
        if not parts:
            return None
        lengths = [len(token_ids) for _, token_ids in parts]
        return cls(
            np.repeat(np.array([i for i, _ in parts], np.int64), lengths),
            np.concatenate([token_ids for _, token_ids in parts]),
        )


class BadWords:
    """The bad words of one row: token sequences, by the length of what stands before their last token."""

    __slots__ = ("_by_prefix_length",)

    def __init__(self, sequences: TokenSequences) -> None:
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sequences:
            by_length.setdefault(len(sequence) - 1, []).append(sequence)
        # (prefix length p, prefixes [m, p], last tokens [m])
        self._by_prefix_length = [
            (length, np.array(group, np.int64)[:, :length], np.array(group, np.int64)[:, length])
            for length, group in sorted(by_length.items())
        ]

    def forbidden(self, output_token_ids: IntArray) -> Int64Array:
        """The tokens that would complete a word after this output. The prompt's tokens are no part of one."""
        found = []
        for length, prefixes, last in self._by_prefix_length:
            if length > len(output_token_ids):
                break
            tail = output_token_ids[len(output_token_ids) - length :]
            found.append(last[(prefixes == tail).all(axis=1)])
        return np.concatenate(found) if found else _NONE


@dataclass(slots=True)
class RowConstraints:
    """What constrains one row. Read only."""

    num_prompt_tokens: int
    min_tokens: int = 0
    stop_token_ids: Int64Array = field(default_factory=lambda: _NONE)
    bad_words: BadWords | None = None
    allowed_token_ids: Int64Array | None = None

    @classmethod
    def of(cls, new: NewRow, vocab_size: int) -> RowConstraints | None:
        """None where nothing constrains the row. Tokens outside the vocabulary are never sampled, and left out."""
        params = new.sampling_params
        if not (params.min_tokens or params.bad_words_token_ids or params.allowed_token_ids is not None):
            return None
        constraints = cls(new.num_prompt_tokens, params.min_tokens)
        if params.min_tokens:
            eos_token_ids = () if params.ignore_eos else new.eos_token_ids
            constraints.stop_token_ids = _within({*eos_token_ids, *params.stop_token_ids}, vocab_size)
        sequences = tuple(each for each in params.bad_words_token_ids if each and each[-1] < vocab_size)
        if sequences:
            constraints.bad_words = BadWords(sequences)
        if params.allowed_token_ids is not None:
            constraints.allowed_token_ids = _within(set(params.allowed_token_ids), vocab_size)
        return constraints

    def forbidden(self, token_ids: IntArray, position: int) -> Int64Array:
        """Tokens that may not stand at `position`, after `token_ids[:position]`.

        None of them where nothing would be left of the allowed tokens: there must be a next token.
        """
        found = []
        if position < self.num_prompt_tokens + self.min_tokens:
            found.append(self.stop_token_ids)
        if self.bad_words is not None:
            found.append(self.bad_words.forbidden(token_ids[self.num_prompt_tokens : position]))
        forbidden = np.unique(np.concatenate(found)) if found else _NONE
        allowed = self.allowed_token_ids
        if allowed is not None and len(forbidden) and np.isin(allowed, forbidden).all():
            return _NONE
        return forbidden


def _within(token_ids: set[int], vocab_size: int) -> Int64Array:
    return np.array(sorted(i for i in token_ids if i < vocab_size), np.int64)


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraints of the rows of one step; either part is None where no row has it."""

    allowed: TokenEntries | None  # of the rows that have some, all that they allow
    forbidden: TokenEntries | None

    @classmethod
    def gather(
        cls, by_row: dict[int, RowConstraints], rows: IntArray, positions: IntArray, token_ids: IntArray
    ) -> Constraints | None:
        """Those of the rows of a batch, in its order (arguments as of `SamplingRows.gather`)."""
        allowed, forbidden = [], []
        for i, row in enumerate(rows.tolist()):
            constraints = by_row.get(row)
            if constraints is None:
                continue
            if constraints.allowed_token_ids is not None:
                allowed.append((i, constraints.allowed_token_ids))
            tokens = constraints.forbidden(token_ids[row], int(positions[i]))
            if len(tokens):
                forbidden.append((i, tokens))
        if not allowed and not forbidden:
            return None
        return cls(TokenEntries.concatenate(allowed), TokenEntries.concatenate(forbidden))


def apply_constraints(logits: Tensor, constraints: Constraints) -> None:
    """Make impossible what is not allowed, in place; `logits` is [num_reqs, vocab] float32."""
    if constraints.allowed is not None:
        indices, token_ids = _to_device(constraints.allowed, logits.device)
        kept = logits[indices, token_ids]
        logits[to_device(np.unique(constraints.allowed.indices), logits.device)] = -torch.inf
        logits[indices, token_ids] = kept
    if constraints.forbidden is not None:
        logits[_to_device(constraints.forbidden, logits.device)] = -torch.inf


def _to_device(entries: TokenEntries, device: torch.device) -> tuple[Tensor, Tensor]:
    return to_device(entries.indices, device), to_device(entries.token_ids, device)
