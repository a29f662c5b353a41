"""Logprobs of the raw model distribution, for the rows that asked for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.outputs import IntArray

from ..transfers import to_device


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of m rows a chosen token and the K likeliest ones, on the device or, copied, on the host."""

    token_ids: Tensor  # [m, 1 + K] int32, the chosen token first, then the likeliest in order
    logprobs: Tensor  # [m, 1 + K] float32
    ranks: Tensor  # [m] int32 of the chosen token, 1 is the likeliest

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenScores:
        return TokenScores(function(self.token_ids), function(self.logprobs), function(self.ranks))


@dataclass(frozen=True, slots=True)
class SampledScores:
    """The scores of the rows of a batch that want some."""

    indices: IntArray  # [m] in the batch of the sampler
    scores: TokenScores

    def map(self, function: Callable[[Tensor], Tensor]) -> SampledScores:
        return SampledScores(self.indices, self.scores.map(function))


def gather_logprobs(logits: Tensor, sampled: Tensor, num_logprobs: IntArray) -> SampledScores | None:
    """Logprobs of the sampled and of the likeliest tokens; None when no row wants any.

    Args:
        logits: [n, vocab] float32, as the model gave them: before bias, penalties, temperature and filters.
        sampled: [n] int64.
        num_logprobs: [n]; -1: none wanted.
    """
    wanted = np.flatnonzero(num_logprobs >= 0)
    if len(wanted) == 0:
        return None
    if len(wanted) < len(num_logprobs):
        rows = to_device(wanted, logits.device)
        logits, sampled = logits[rows], sampled[rows]
    return SampledScores(wanted.astype(np.int32), logprobs_of(logits, sampled, int(num_logprobs.max())))


def logprobs_of(logits: Tensor, chosen: Tensor, num_top: int) -> TokenScores:
    """Of each row the chosen token and its `num_top` likeliest, or as many as there are. Does not wait for the device.

    logits: [n, vocab] float32; chosen: [n] int64.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    ranks = (logprobs > of_chosen).sum(dim=-1, dtype=torch.int32) + 1
    return TokenScores(
        torch.cat([chosen[:, None], top.indices], dim=1).int(), torch.cat([of_chosen, top.values], dim=1), ranks
    )
