"""Logprobs of prompt tokens: which rows want them, and what a step computes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from quire.engine.outputs import IntArray, NewRow, PromptLogprobs, SchedulerOutput

from .launched_step import HostCopies
from .models.model import Model, TokenStates, select_tokens
from .sampler.logprobs import TokenScores, logprobs_of
from .transfers import to_device

_SLICE_ELEMENTS = 1 << 23  # logits computed at a time: 32 MiB, however long the prompts are


@dataclass(frozen=True, slots=True)
class _Wanted:
    first_position: int
    num_prompt_tokens: int
    num_top: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Prompt positions `first` to `first + count - 1` of a request; the logits of the first are those of `token`.

    prompt positions     0   1   2   3   4   5           the step computes tokens 2 to 4 (their hidden states)
    logprobs of                      3   4   5           each comes from the token before
    """

    index: int  # in the batch
    row: int
    first: int
    count: int
    token: int  # in the batch
    num_top: int


class PromptLogprobRows:
    """Owned by the request table."""

    def __init__(self) -> None:
        self._wanted: dict[int, _Wanted] = {}

    def set_row(self, new: NewRow) -> None:
        """Take over what a request wants that enters row `new.row`."""
        self._wanted.pop(new.row, None)
        if new.first_prompt_logprob is not None:
            num_top = new.sampling_params.prompt_logprobs or 0
            self._wanted[new.row] = _Wanted(new.first_prompt_logprob, new.num_prompt_tokens, num_top)

    def concerns(self, step: SchedulerOutput) -> bool:
        """Whether `compute` may have something to do."""
        if not self._wanted:
            return False
        computed = zip(step.rows.tolist(), step.num_computed_tokens.tolist(), strict=True)
        wanted = ((self._wanted.get(row), start) for row, start in computed)
        return any(each is not None and start < each.num_prompt_tokens - 1 for each, start in wanted)

    def compute(
        self, step: SchedulerOutput, token_ids: IntArray, model: Model, states: TokenStates, copies: HostCopies
    ) -> Callable[[], list[tuple[int, PromptLogprobs]]]:
        """What a step brings, by index in its batch; to be called when `copies` are there.

        token_ids: [max_num_seqs, max_len] the tokens of every row; states: of all tokens of the step.
        """
        spans = self._spans(step) if self._wanted else []
        if not spans:
            return list
        tokens = np.concatenate([np.arange(span.token, span.token + span.count) for span in spans])
        own = np.concatenate([token_ids[span.row, span.first : span.first + span.count] for span in spans])
        num_top = min(max(span.num_top for span in spans), model.vocab_size)
        parts = [part.map(copies.start) for part in _in_slices(model, states, tokens, own.astype(np.int64), num_top)]
        return lambda: _by_span(spans, parts)

    def _spans(self, step: SchedulerOutput) -> list[_Span]:
        rows, computed = step.rows.tolist(), step.num_computed_tokens.tolist()
        ends = np.cumsum(step.num_scheduled_tokens)
        spans = []
        for index, row in enumerate(rows):
            wanted = self._wanted.get(row)
            if wanted is None:
                continue
            start = computed[index]
            stop = start + int(step.num_scheduled_tokens[index])
            first = max(start + 1, wanted.first_position)
            count = min(stop, wanted.num_prompt_tokens - 1) + 1 - first
            if count > 0:
                token = int(ends[index]) - (stop - start) + (first - 1 - start)
                spans.append(_Span(index, row, first, count, token, wanted.num_top))
        return spans


def _in_slices(
    model: Model, states: TokenStates, tokens: np.ndarray, own: np.ndarray, num_top: int
) -> Iterator[TokenScores]:
    """`logprobs_of` over all positions, with the logits of some of them at a time."""
    size = max(_SLICE_ELEMENTS // model.vocab_size, 1)
    hidden = model.last_hidden_state(select_tokens(states, to_device(tokens, states[0].device)))
    for start in range(0, len(tokens), size):
        chosen = to_device(own[start : start + size], hidden.device)
        yield logprobs_of(model.logits(hidden[start : start + size]), chosen, num_top)


def _by_span(spans: list[_Span], parts: list[TokenScores]) -> list[tuple[int, PromptLogprobs]]:
    """Each request's part of the scores of all positions, which are on the host."""
    ids = np.concatenate([part.token_ids.numpy() for part in parts])
    logprobs = np.concatenate([part.logprobs.numpy() for part in parts])
    ranks = np.concatenate([part.ranks.numpy() for part in parts])
    found, start = [], 0
    for span in spans:
        end = start + span.count
        columns = 1 + span.num_top
        part = PromptLogprobs(span.first, ids[start:end, :columns], logprobs[start:end, :columns], ranks[start:end])
        found.append((span.index, part))
        start = end
    return found
