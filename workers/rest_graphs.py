"""What follows the attention of the last layer, as graphs of as many tokens as sample. On CPU.

A step with prompts computes it for a few of its tokens alone (`models.model`): a dozen calls, which one by one take
longer than what they do. A graph of each number of tokens is recorded when that first comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode_graphs import Decoded, DecodeGraphs, End, GraphBackend
from .models.model import Model, TokenStates
from .prompt_graph import PromptGraph


class RestGraphs:
    """Of one model that gives logits. Owned by the model runner."""

    def __init__(self, backend: GraphBackend, model: Model, prompts: PromptGraph, most: int) -> None:
        """prompts: where that has no record, as of experts, nothing here is recorded either. most: tokens of the
        largest."""
        self._graphs = DecodeGraphs(backend, list(range(1, most + 1)))
        self._model = model
        self._prompts = prompts
        self._most = most
        self._inputs: TokenStates = ()  # for `most` tokens

    def compute(self, states: TokenStates, indices: Tensor, end: End) -> Decoded | None:
        """Of the tokens at `indices`, [n]: their logits, or by `End.TOKENS` the likeliest tokens; valid until the next
        call. None if they are too many, or nothing is recorded.
        """
        count = len(indices)
        if not self._prompts.has_records or self._graphs.size_for(count, count) is None:
            return None
        if not self._inputs:
            self._inputs = tuple(each.new_empty(self._most, *each.shape[1:]) for each in states)
        for place, each in zip(self._inputs, states, strict=True):
            torch.index_select(each, 0, indices, out=place[:count])
        return self._graphs.begin(self._forward, count, end).end()

    def _forward(self, size: int, end: End) -> Decoded:
        hidden = self._model.last_hidden_state(tuple(each[:size] for each in self._inputs))
        if end is End.TOKENS:
            return Decoded(token_ids=self._model.likeliest(hidden))
        return Decoded(logits=self._model.logits(hidden))
