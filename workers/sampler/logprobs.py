"""Logprobs of the raw model distribution, for the rows that asked for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.outputs import BatchLogprobs, FloatArray, IntArray


def gather_logprobs(logits: Tensor, sampled: Tensor, num_logprobs: IntArray) -> BatchLogprobs | None:
    """Logprobs of the sampled and of the likeliest tokens; None when no row wants any.

    Args:
        logits: [n, vocab] float32, as the model gave them: before bias, penalties, temperature and filters.
        sampled: [n] int64.
        num_logprobs: [n]; -1: none wanted.
    """
    wanted = np.flatnonzero(num_logprobs >= 0)
    if len(wanted) == 0:
        return None
    rows = torch.from_numpy(wanted).to(logits.device)
    token_ids, logprobs, ranks = logprobs_of(logits[rows], sampled[rows], int(num_logprobs.max()))
    return BatchLogprobs(indices=wanted.astype(np.int32), token_ids=token_ids, logprobs=logprobs, sampled_ranks=ranks)


def logprobs_of(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[IntArray, FloatArray, IntArray]:
    """Of each row the chosen token and its `num_top` likeliest: ids and logprobs, and the rank of the chosen one.

    logits [n, vocab] float32, chosen [n] int64 -> [n, 1 + K] int32, [n, 1 + K] float32, [n] int32; K is at most vocab.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(1, chosen[:, None])
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    ranks = (logprobs > of_chosen).sum(dim=-1) + 1
    return (
        torch.cat([chosen[:, None], top.indices], dim=1).cpu().numpy().astype(np.int32),
        torch.cat([of_chosen, top.values], dim=1).cpu().numpy(),
        ranks.cpu().numpy().astype(np.int32),
    )
