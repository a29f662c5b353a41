"""Sampling as a pure function of (logits, sampling parameters, seed, position): DESIGN 4.3.

    if batch.logit_bias is None and batch.constraints is None and batch.penalties is None and batch.masks is None:
        └─▶ logprobs

Constraints are allowed_token_ids, bad_words and min_tokens: what they exclude is -inf from there on.

Every row is worked out from its own logits, parameters and one uniform number, so a token does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import LogitEntries, SamplingBatch, TokenMasks
from .constraints import apply_constraints
from .filters import keep_min_p, keep_top_k, keep_top_p
from .logprobs import SampledScores, gather_logprobs
from .penalties import apply_penalties
from .rng import uniform

DRAW_TOKEN = 0  # the draw that picks the token of a position
_CDF_BLOCK = 256
_SPAN = 256  # tokens


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step sampled, in the order of the batch."""

    token_ids: Tensor  # [num_reqs] int64, on the device of the logits
    logprobs: SampledScores | None  # likewise


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Sample one token for each row of the batch. Modifies neither argument.

    `logits` is [num_reqs, vocab] float32, row i belonging to index i of the batch's arrays.
    """
    if logits.dim() != 2 or logits.shape[0] != batch.num_reqs or logits.dtype != torch.float32:
        raise ValueError(f"logits must be [{batch.num_reqs}, vocab] float32, got {list(logits.shape)} {logits.dtype}")
    processed = _process(logits, batch)
    random_rows = np.flatnonzero(batch.temperature > 0.0)
    if len(random_rows) == 0:
        token_ids = highest(processed)
    elif len(random_rows) == batch.num_reqs:
        token_ids = _sample_random(processed, batch, random_rows)
    else:
        index = torch.from_numpy(random_rows).to(logits.device)
        token_ids = highest(processed)
        token_ids[index] = _sample_random(processed[index], batch, random_rows)
    return SamplerOutput(token_ids, gather_logprobs(logits, token_ids, batch.num_logprobs))


def highest(logits: Tensor) -> Tensor:
    """The first token with the highest logit of each row, or with NaN if there is one: [num_reqs] int64.

    On CPU, argmax goes by single elements, amax by vectors: the span with the highest logit is found by amax, so that
    argmax has only that to look at. 32 rows of 49,152 take 0.2 ms so, and 1.2 by argmax.
    """
    vocab = logits.shape[1]
    if logits.device.type != "cpu" or vocab < _SPAN:
        return logits.argmax(dim=-1)
    whole = vocab // _SPAN * _SPAN
    tops = logits[:, :whole].view(len(logits), whole // _SPAN, _SPAN).amax(dim=-1)
    if whole < vocab:
        tops = torch.cat([tops, logits[:, whole:].amax(dim=-1, keepdim=True)], dim=1)
    # What the last span has of the one before it is lower: otherwise that one would have been the first.
    starts = (tops.argmax(dim=-1, keepdim=True) * _SPAN).clamp_(max=vocab - _SPAN)
    spans = logits.gather(1, starts + torch.arange(_SPAN))
    return starts.squeeze(1).add_(spans.argmax(dim=-1))


def _process(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits after everything that also decides a greedy token; the given ones where there is nothing to do."""
    if batch.logit_bias is None and batch.constraints is None and batch.penalties is None and batch.masks is None:
        return logits
    processed = logits.clone()
    if batch.logit_bias is not None:
        _add(processed, batch.logit_bias)
    if batch.constraints is not None:
        apply_constraints(processed, batch.constraints)
    if batch.penalties is not None:
        apply_penalties(processed, batch.penalties)
    if batch.masks is not None:
        _mask(processed, batch.masks)
    return processed


def _add(logits: Tensor, entries: LogitEntries) -> None:
    indices = torch.from_numpy(entries.indices).to(logits.device)
    token_ids = torch.from_numpy(entries.token_ids).to(logits.device)
    logits[indices, token_ids] += torch.from_numpy(entries.values).to(logits.device)


def _mask(logits: Tensor, masks: TokenMasks) -> None:
    """Tokens that a mask does not allow become impossible; so do those beyond its end."""
    words = torch.from_numpy(masks.allowed).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words[:, :, None] >> shifts & 1).flatten(1).bool()
    allowed = F.pad(allowed, (0, max(logits.shape[1] - allowed.shape[1], 0)))[:, : logits.shape[1]]
    indices = torch.from_numpy(masks.indices).to(logits.device)
    logits[indices] = logits[indices].masked_fill(~allowed, -torch.inf)


def _sample_random(logits: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
    """Tokens of the rows with a temperature. logits [r, vocab] are theirs; returns [r] int64."""
    highest = logits.amax(dim=-1, keepdim=True)
    broken = ~torch.isfinite(highest)  # NaN, or infinite: of one row, and the others must not suffer for it
    if broken.any():
        logits = torch.where(broken, _one_hot_logits(logits), logits)
        highest = torch.where(broken, 0.0, highest)
    # The highest logit becomes 0 before the division, so that no temperature, however small, overflows.
    scores = logits - highest
    scores /= torch.from_numpy(batch.temperature[rows]).to(logits.device)[:, None]
    keep_top_k(scores, batch.top_k[rows])
    keep_top_p(scores, batch.top_p[rows])
    keep_min_p(scores, batch.min_p[rows])
    numbers = uniform(batch.seeds[rows], batch.choice_indices[rows], batch.positions[rows], DRAW_TOKEN)
    return _pick(scores.exp_(), torch.from_numpy(numbers).to(logits.device))


def _one_hot_logits(logits: Tensor) -> Tensor:
    """Logits that leave each row its greedy choice alone, NaN counting as never."""
    choice = torch.nan_to_num(logits, nan=-torch.inf).argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -torch.inf).scatter_(1, choice, 0.0)


def _pick(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the running sum of the weights, in vocabulary order, passes `number` times their total.

    weights [r, vocab] float32, not negative; numbers [r] float64 in [0, 1). Returns [r] int64. The sum runs over blocks
    of the vocabulary first and then inside one block: two short scans instead of one over the whole row.
    """
    num_rows, vocab_size = weights.shape
    blocks = F.pad(weights, (0, -vocab_size % _CDF_BLOCK)).view(num_rows, -1, _CDF_BLOCK)
    block_ends = blocks.double().sum(dim=-1).cumsum(dim=-1)
    target = (numbers * block_ends[:, -1])[:, None]
    block = _first_above(block_ends, target)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _CDF_BLOCK))[:, 0].double()
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    offset = _first_above(before + inside.cumsum(dim=-1), target)
    return (block * _CDF_BLOCK + offset)[:, 0]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """First index whose running sum exceeds the target, [r, 1]; rounding may leave none: then the last that grew."""
    index = torch.searchsorted(sums, target, right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(index, last)
