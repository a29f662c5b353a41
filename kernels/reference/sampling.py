"""Masks, and drawing tokens by sorting each row: what the operations mean, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..sampling import Draws


def exclude_tokens(logits: Tensor, indices: Tensor, allowed: Tensor) -> None:
    """See `sampling.exclude_tokens`."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    may_stay = (allowed[:, :, None] >> shifts & 1).flatten(1).bool()
    may_stay = F.pad(may_stay, (0, max(logits.shape[1] - may_stay.shape[1], 0)))[:, : logits.shape[1]]
    logits[indices] = logits[indices].masked_fill(~may_stay, -torch.inf)


def likeliest_tokens(logits: Tensor) -> Tensor:
    """See `sampling.likeliest_tokens`."""
    return logits.argmax(dim=-1)


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """See `sampling.draw_tokens`."""
    temperature, top_k, top_p, min_p, numbers = (values[:, None] for values in draws)
    highest = logits.amax(dim=-1, keepdim=True)
    is_greedy = (temperature == 0) | ~torch.isfinite(highest)
    scores = torch.where(is_greedy, 0.0, (logits - highest) / torch.where(is_greedy, 1.0, temperature))
    ranked, tokens = scores.sort(dim=-1, descending=True, stable=True)

    is_off = (top_k <= 0) | (top_k >= logits.shape[1])
    kth = ranked.gather(1, torch.where(is_off, 1, top_k).long() - 1)
    kept = is_off | (ranked >= kth)
    weights = torch.where(kept, ranked.double().exp(), 0.0)
    mass_before = weights.cumsum(dim=-1) - weights
    kept &= (top_p >= 1) | (mass_before < top_p.double() * weights.sum(dim=-1, keepdim=True))
    kept &= (ranked >= min_p.log()) | (min_p <= 0)
    kept[:, 0] = True

    in_order = torch.zeros_like(weights).scatter_(1, tokens, torch.where(kept, weights, 0.0))
    sums = in_order.cumsum(dim=-1)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    drawn = torch.minimum(torch.searchsorted(sums, numbers * sums[:, -1:], right=True), last)
    return torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), drawn)[:, 0]
