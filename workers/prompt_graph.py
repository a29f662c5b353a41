"""Steps with prompts as a graph, of any number of tokens up to some thousands. On CPU (`kernels.cpu.any_rows`).

Prompts come in every length, so what differs between two steps is placed where the graph reads it: tokens at the
beginning of memory that has room for the largest step, and who is in the batch in the metadata that it was recorded
with, whose plans are made anew in each step.

Few tokens, as what is left of a prompt that is in the cache, are multiplied by other kernels than many: those that one
record is not for are another's, which is made when they first come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.kernels.ops import AttentionMetadata

from .models.model import TokenStates, slice_tokens

# With more tokens, what lies between the calls hardly counts, and all memory has room for them.
_MOST_RECORDED = 2048
_LEAST_RECORDED = 7  # tokens, with padding: a prime number; most kernels for few rows take 8 or more (of the rest, 4)
_MOST_FEW = 24  # with more, kernels for few rows say that they are, and not all of those for many do

# token_ids, positions [num_tokens], metadata of each KV cache group -> what there is of each token
Compute = Callable[[Tensor, Tensor, Sequence[AttentionMetadata]], TokenStates]


class Record(Protocol):
    """A forward that can be repeated."""

    least_rows: int
    most_rows: int

    def replay(self, num_rows: int) -> tuple[Tensor, ...]: ...


class AnyRowsBackend(Protocol):
    """How such a graph is made."""

    def capture_any_rows(
        self, run: Callable[[], tuple[Tensor, ...]], num_rows: int, most_rows: int, inputs: Sequence[Tensor]
    ) -> tuple[Record, tuple[Tensor, ...]] | None:
        """Run `run`, which reads the first `num_rows` rows of the inputs, and record it for up to `most_rows`.

        Returns the record and what `run` gave; None where what it does cannot be repeated.
        """
        ...


class _Recorded(NamedTuple):
    record: Record
    metadata: list[AttentionMetadata]  # what it was made with

    def is_for(self, num_tokens: int) -> bool:
        return self.record.least_rows <= num_tokens <= self.record.most_rows


class PromptGraph:
    """Computes steps: from the first that can be recorded on, those of about as many tokens or more as its graph.

    It does not keep the runner, whose cache is to be freed before the next one is made.
    """

    def __init__(self, backend: AnyRowsBackend, max_num_tokens: int, num_groups: int) -> None:
        self._backend = backend
        self._capacity = _next_prime(min(max_num_tokens, _MOST_RECORDED))
        # Token ids, positions, and slots by group.
        self._inputs = torch.zeros(2 + num_groups, max(self._capacity, _LEAST_RECORDED), dtype=torch.int64)
        self._recorded: list[_Recorded] = []
        # Of how many tokens steps may begin a record. Between these, it is not known which kernels one with padding
        # would have.
        self._few, self._many = range(1, _LEAST_RECORDED + 1), range(_MOST_FEW + 1, self._capacity + 1)
        self._recordable = [self._few, self._many]

    @property
    def has_records(self) -> bool:
        """Whether steps can be recorded, and some were."""
        return bool(self._recorded)

    def forward(
        self, compute: Compute, token_ids: Tensor, positions: Tensor, by_group: Sequence[AttentionMetadata]
    ) -> TokenStates:
        """What `compute` gives for these, valid until the next call."""
        num_tokens = len(token_ids)
        if num_tokens > self._capacity:
            return compute(token_ids, positions, by_group)
        recorded = self._record_for(num_tokens)
        if recorded is not None:
            self._place(token_ids, positions, by_group)
            for placed, metadata in zip(recorded.metadata, by_group, strict=True):
                _place_all_but_slots(metadata, placed)
            return recorded.record.replay(num_tokens)
        sizes = next((each for each in self._recordable if num_tokens in each), None)
        states = None if sizes is None else self._capture(compute, token_ids, positions, by_group, sizes)
        return compute(token_ids, positions, by_group) if states is None else states

    def _record_for(self, num_tokens: int) -> _Recorded | None:
        return next((each for each in self._recorded if each.is_for(num_tokens)), None)

    def _place(self, token_ids: Tensor, positions: Tensor, by_group: Sequence[AttentionMetadata]) -> None:
        rows = (token_ids, positions, *(metadata.slot_mapping for metadata in by_group))
        for place, given in zip(self._inputs, rows, strict=True):
            place[: len(token_ids)].copy_(given)

    def _capture(
        self,
        compute: Compute,
        token_ids: Tensor,
        positions: Tensor,
        by_group: Sequence[AttentionMetadata],
        sizes: range,
    ) -> TokenStates | None:
        """With padding up to a prime number, which is hardly a size of the model as well. None where that cannot be
        recorded, or so few would be computed otherwise. It is for more up to those that another record is for."""
        num_tokens, num_recorded = len(token_ids), _next_prime(max(len(token_ids), _LEAST_RECORDED))
        others = (each.record.least_rows for each in self._recorded)
        room = min((least - 1 for least in others if least > num_tokens), default=self._inputs.shape[1])
        if num_recorded > room:
            return None
        if sizes is self._few:
            room = min(room, _MOST_FEW)
        self._place(token_ids, positions, by_group)
        self._inputs[:2, num_tokens:num_recorded] = 0
        self._inputs[2:, num_tokens:num_recorded] = -1  # stored nowhere
        token_ids, positions, *slots = (place[:num_recorded] for place in self._inputs)
        placed = [replace(each, slot_mapping=own, plans={}) for each, own in zip(by_group, slots, strict=True)]
        captured = self._backend.capture_any_rows(
            lambda: compute(token_ids, positions, placed), num_recorded, room, [self._inputs]
        )
        if captured is None:
            self._recordable.remove(sizes)
            return None
        record, states = captured
        self._recorded.append(_Recorded(record, placed))
        return slice_tokens(states, 0, num_tokens) if self._recorded[-1].is_for(num_tokens) else None


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
