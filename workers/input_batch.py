"""The inputs of one forward pass, gathered from the request table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.outputs import GrammarMasks, IntArray, SchedulerOutput
from quire.kernels.ops import AttentionMetadata

from .attention_metadata import build_attention_metadata
from .request_table import RequestTable
from .sampler import TokenMasks


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the model and the sampler need to know in one step.

    batch order           request 0          request 1   request 2
    tokens                t t t t t t t      t           t t t t
    query_start_loc       0                  7           8         12
    logits rows                       6      7           -            (request 2 has more of its prompt to come)
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    metadata: list[AttentionMetadata]  # per KV cache group
    sampling_indices: IntArray  # [num_sampling] the requests, in batch order, that sample in this step
    sampling_rows: IntArray  # [num_sampling] their rows
    logits_indices: Tensor  # [num_sampling] int64, the tokens whose logits they sample from
    masks: TokenMasks | None = None  # of those that have a grammar; its indices count the requests that sample


def gather_inputs(step: SchedulerOutput, table: RequestTable, block_size: int, device: torch.device) -> InputBatch:
    """The batch of a step whose changes are already in `table`.

    Raises `ValueError` when the step computes tokens that the table does not know.
    """
    rows, num_scheduled, start = step.rows, step.num_scheduled_tokens, step.num_computed_tokens
    seq_lens = start + num_scheduled
    known = table.num_tokens[rows]
    if (seq_lens > known).any():
        raise ValueError(f"step {step.step_id}: rows {rows} are computed up to {seq_lens} but have {known} tokens")

    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_scheduled, out=query_start_loc[1:])
    # Position of token t of request r: t - query_start_loc[r] + start[r].
    token_rows = np.repeat(rows, num_scheduled)
    positions = np.arange(query_start_loc[-1], dtype=np.int32) + np.repeat(start - query_start_loc[:-1], num_scheduled)

    sampling_indices = np.flatnonzero((seq_lens == known) & ~table.pooling.is_pooled(rows)).astype(np.int32)
    logits_indices = (query_start_loc[1:] - 1)[sampling_indices]
    return InputBatch(
        token_ids=_indices(table.token_ids[token_rows, positions], device),
        positions=_indices(positions, device),
        metadata=build_attention_metadata(
            table, rows, query_start_loc, seq_lens, token_rows, positions, block_size, device
        ),
        sampling_indices=sampling_indices,
        sampling_rows=rows[sampling_indices],
        logits_indices=_indices(logits_indices, device),
        masks=None if step.grammar is None else _masks(step.grammar, sampling_indices),
    )


def _masks(grammar: GrammarMasks, sampling_indices: IntArray) -> TokenMasks:
    return TokenMasks(
        indices=np.searchsorted(sampling_indices, grammar.indices).astype(np.int64),
        allowed=np.require(grammar.allowed, requirements="W"),  # one that has travelled is read-only
    )


def _indices(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)
