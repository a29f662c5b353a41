"""Sampling as a pure function of (logits, sampling parameters, seed, position).

    logits ─┬─▶ bias ─▶ constraints ─▶ penalties ─▶ grammar ─▶ temperature, top-k, top-p, min-p ─▶ token
            └─▶ logprobs

Constraints are allowed_token_ids, bad_words and min_tokens: what they exclude is -inf from there on.

Every row is worked out from its own logits, parameters and one uniform number, so a token does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.sampling import Draws, draw_tokens, exclude_tokens, likeliest_tokens

from ..transfers import to_device
from .batch import LogitEntries, SamplingBatch
from .constraints import apply_constraints
from .logprobs import SampledScores, gather_logprobs
from .penalties import apply_penalties


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
    token_ids = likeliest_tokens(processed) if draws is None else draw_tokens(processed, draws)
    return SamplerOutput(token_ids, gather_logprobs(logits, token_ids, batch.num_logprobs))


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
        exclude_tokens(processed, *(to_device(each, logits.device) for each in (indices, allowed)))
    return processed


def _add(logits: Tensor, entries: LogitEntries) -> None:
    indices = to_device(entries.indices, logits.device)
    token_ids = to_device(entries.token_ids, logits.device)
    logits[indices, token_ids] += to_device(entries.values, logits.device)
