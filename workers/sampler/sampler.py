"""Sampling as a pure function of (logits, sampling parameters, seed, position): DESIGN 4.3.

    logits ─┬─▶ bias ─▶ constraints ─▶ penalties ─▶ grammar ─▶ temperature, top-k, top-p, min-p ─▶ token
            └─▶ logprobs

Constraints are allowed_token_ids, bad_words and min_tokens: what they exclude is -inf from there on.

Every row is worked out from its own logits, parameters and one uniform number, so a token does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.sampling import Draws, draw_tokens, exclude_tokens

from .batch import LogitEntries, SamplingBatch
from .constraints import apply_constraints
from .logprobs import SampledScores, gather_logprobs
from .penalties import apply_penalties

_SPAN = 256  # tokens


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step sampled, in the order of the batch."""

    token_ids: Tensor  # [num_reqs] int64, on the device of the logits
    logprobs: SampledScores | None  # likewise


def sample(logits: Tensor, draws: Draws | None, batch: SamplingBatch) -> SamplerOutput:
    """Sample one token for each row of the batch. Modifies none of its arguments.

    Args:
        logits: [num_reqs, vocab] float32, row i belonging to index i of the batch's arrays.
        draws: how the rows draw, on the device of the logits; None where all of them take the likeliest token.
    """
    if logits.dim() != 2 or logits.shape[0] != batch.num_reqs or logits.dtype != torch.float32:
        raise ValueError(f"logits must be [{batch.num_reqs}, vocab] float32, got {list(logits.shape)} {logits.dtype}")
    processed = _process(logits, batch)
    token_ids = highest(processed) if draws is None else draw_tokens(processed, draws)
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
        indices, allowed = batch.masks.indices, batch.masks.allowed
        exclude_tokens(processed, *(torch.from_numpy(each).to(logits.device) for each in (indices, allowed)))
    return processed


def _add(logits: Tensor, entries: LogitEntries) -> None:
    indices = torch.from_numpy(entries.indices).to(logits.device)
    token_ids = torch.from_numpy(entries.token_ids).to(logits.device)
    logits[indices, token_ids] += torch.from_numpy(entries.values).to(logits.device)
