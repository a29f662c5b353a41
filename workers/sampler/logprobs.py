"""Logprobs of the raw model distribution, for the rows that asked for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.outputs import BatchLogprobs, IntArray


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
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    token_ids = sampled[rows, None]
    chosen = logprobs.gather(1, token_ids)
    top = logprobs.topk(min(int(num_logprobs.max()), logits.shape[1]), dim=-1)
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    return BatchLogprobs(
        indices=wanted.astype(np.int32),
        token_ids=torch.cat([token_ids, top.indices], dim=1).cpu().numpy().astype(np.int32),
        logprobs=torch.cat([chosen, top.values], dim=1).cpu().numpy(),
        sampled_ranks=ranks.cpu().numpy().astype(np.int32),
    )
