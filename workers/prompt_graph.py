"""Steps with prompts as one graph, of any number of tokens up to some thousands. On CPU (`kernels.cpu.any_rows`).

Prompts come in every length, so what differs between two steps is placed where the graph reads it: tokens at the
beginning of memory that has room for the largest step, and who is in the batch in the metadata that it was recorded
with, whose plans are made anew in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.ops import AttentionMetadata

_LEAST_RECORDED = 32  # tokens: fewer are multiplied by other kernels than most prompts
_MOST_RECORDED = 2048  # with more, what lies between the calls hardly counts, and all memory has room for them

# token_ids, positions [num_tokens], metadata of each KV cache group -> hidden states [num_tokens, hidden_size]
Compute = Callable[[Tensor, Tensor, Sequence[AttentionMetadata]], Tensor]


class Record(Protocol):
    """A forward that can be repeated."""

    least_rows: int

    def replay(self, num_rows: int) -> Tensor: ...


class AnyRowsBackend(Protocol):
    """How such a graph is made."""

    def capture_any_rows(
        self, run: Callable[[], Tensor], num_rows: int, most_rows: int, inputs: Sequence[Tensor]
    ) -> tuple[Record, Tensor] | None:
        """Run `run`, which reads the first `num_rows` rows of the inputs, and record it for up to `most_rows`.

        Returns the record and what `run` gave; None where what it does cannot be repeated.
        """
        ...


class PromptGraph:
    """Computes steps: from the first that can be recorded on, those of so many tokens or more as its graph.

    It does not keep the runner, whose cache is to be freed before the next one is made.
    """

    def __init__(self, backend: AnyRowsBackend, max_num_tokens: int, num_groups: int) -> None:
        self._backend: AnyRowsBackend | None = backend  # until it has tried
        self._capacity = _next_prime(min(max_num_tokens, _MOST_RECORDED))
        # Token ids, positions, and slots by group.
        self._inputs = torch.zeros(2 + num_groups, self._capacity, dtype=torch.int64)
        self._metadata: list[AttentionMetadata] = []  # what the record was made with
        self._record: Record | None = None

    def forward(
        self, compute: Compute, token_ids: Tensor, positions: Tensor, by_group: Sequence[AttentionMetadata]
    ) -> Tensor:
        """What `compute` gives for these, valid until the next call."""
        num_tokens = len(token_ids)
        if num_tokens > self._capacity:
            return compute(token_ids, positions, by_group)
        if self._record is not None and num_tokens >= self._record.least_rows:
            self._place(token_ids, positions, by_group)
            for placed, metadata in zip(self._metadata, by_group, strict=True):
                _place_all_but_slots(metadata, placed)
            return self._record.replay(num_tokens)
        if self._backend is not None and num_tokens >= _LEAST_RECORDED:
            self._place(token_ids, positions, by_group)
            hidden = self._capture(self._backend, compute, num_tokens, by_group)
            if hidden is not None:
                return hidden
        return compute(token_ids, positions, by_group)

    def _place(self, token_ids: Tensor, positions: Tensor, by_group: Sequence[AttentionMetadata]) -> None:
        rows = (token_ids, positions, *(metadata.slot_mapping for metadata in by_group))
        for place, given in zip(self._inputs, rows, strict=True):
            place[: len(token_ids)].copy_(given)

    def _capture(
        self, backend: AnyRowsBackend, compute: Compute, num_tokens: int, by_group: Sequence[AttentionMetadata]
    ) -> Tensor | None:
        """With padding up to a prime number, which is hardly a size of the model as well."""
        num_recorded = _next_prime(num_tokens)
        self._inputs[:2, num_tokens:num_recorded] = 0
        self._inputs[2:, num_tokens:num_recorded] = -1  # stored nowhere
        token_ids, positions, *slots = (place[:num_recorded] for place in self._inputs)
        placed = [replace(each, slot_mapping=own, plans={}) for each, own in zip(by_group, slots, strict=True)]
        self._backend = None
        captured = backend.capture_any_rows(
            lambda: compute(token_ids, positions, placed), num_recorded, self._capacity, [self._inputs]
        )
        if captured is None:
            return None
        self._metadata, (self._record, hidden) = placed, captured
        return hidden[:num_tokens]


def _next_prime(number: int) -> int:
    """The smallest that is not less."""
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number


def _place_all_but_slots(metadata: AttentionMetadata, to: AttentionMetadata) -> None:
    """The plans of `to` stay as well: they are made anew by the record."""
    to.query_start_loc, to.query_start_loc_np = metadata.query_start_loc, metadata.query_start_loc_np
    to.seq_lens, to.seq_lens_np = metadata.seq_lens, metadata.seq_lens_np
    to.block_table = metadata.block_table
