"""The inputs of one forward pass, gathered from the request table into the buffers that the device reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.engine.outputs import GrammarMasks, IntArray, SchedulerOutput

from .drafts import Entries
from .input_buffers import HostInputs
from .request_table import RequestTable
from .sampler import TokenMasks


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the host has to know of a step, beside the inputs themselves.

    batch order           request 0          request 1   request 2      padding
    tokens                t t t t t t t      t           t t t t        - - -
    query_start_loc       0                  7           8         12   12 12 ...
    logits rows                       6      7           -              (request 2 has more of its prompt to come)

    With drafts, "request" is an entry (`drafts`) here and in the inputs.
    """

    entries: Entries
    max_blocks: int  # of any request of the batch
    sampling: IntArray  # [num_sampling] the entries, in batch order, that sample in this step
    sampling_rows: IntArray  # [num_sampling] their rows
    sampling_positions: IntArray  # [num_sampling] of the tokens to be sampled
    reads_references: bool  # some token is still to be read from where the device keeps it
    is_greedy: bool  # no row draws its token
    is_plain: bool  # nothing else is asked of logits, or done to them
    masks: TokenMasks | None = None  # of those that have a grammar; its indices count the entries that sample

    @property
    def takes_likeliest(self) -> bool:
        return self.is_greedy and self.is_plain

    @property
    def all_sample(self) -> bool:
        """Each request one token, in their order."""
        return len(self.sampling) == len(self.entries.rows)


def gather_inputs(
    step: SchedulerOutput, entries: Entries, table: RequestTable, target: HostInputs, *, samples: bool
) -> InputBatch:
    """Write the batch of a step, whose changes are already in `table`, to `target`, with padding up to its end.

    `entries` are the step's; `samples`: on this rank, which has logits.

    Raises `ValueError` when the step computes tokens that the table does not know.
    """
    rows, num_scheduled, start = entries.rows, entries.num_scheduled, entries.start
    num_reqs, num_tokens = len(rows), entries.num_tokens
    seq_lens = start + num_scheduled
    known = table.num_tokens[rows] + entries.depths
    if (seq_lens > known).any():
        raise ValueError(f"step {step.step_id}: rows {rows} are computed up to {seq_lens} but have {known} tokens")

    query_start_loc = target.query_start_loc
    query_start_loc[0] = 0
    num_scheduled.cumsum(out=query_start_loc[1 : num_reqs + 1])
    query_start_loc[num_reqs + 1 :] = num_tokens
    _write_padded(target.seq_lens, seq_lens, 0)
    _write_padded(target.rows, rows, 0)
    token_rows, positions = rows, start  # where each has one token, as none has none
    if num_tokens > num_reqs:  # position of token t of request r: t - query_start_loc[r] + start[r]
        token_rows = rows.repeat(num_scheduled)
        positions = np.arange(num_tokens) + (start - query_start_loc[:num_reqs]).repeat(num_scheduled)
    token_ids = table.token_ids[token_rows, positions]
    _write_padded(target.token_ids, token_ids, 0)
    _write_padded(target.positions, positions, 0)
    block_index, offset = np.divmod(positions, table.block_size)
    slots = target.slot_mapping[:, :num_tokens]
    np.multiply(table.block_tables[:, token_rows, block_index], table.block_size, out=slots, dtype=np.int64)
    slots += offset
    target.slot_mapping[:, num_tokens:] = -1

    sampling = ((seq_lens == known) & ~table.pooling.is_pooled(rows)).nonzero()[0].astype(np.int32)
    sampling_rows, sampling_positions = rows[sampling], known[sampling]
    _write_padded(target.sampling_rows, sampling_rows, table.no_row)
    _write_padded(target.logits_indices, query_start_loc[1:][sampling] - 1, 0)
    draws = table.sampling.draws(sampling_rows, sampling_positions) if samples else None
    if draws is not None:
        for name, values in draws._asdict().items():
            getattr(target, name)[: len(values)] = values
        target.temperature[len(sampling) :] = 0
    return InputBatch(
        entries=entries,
        max_blocks=-(-int(seq_lens.max()) // table.block_size),
        sampling=sampling,
        sampling_rows=sampling_rows,
        sampling_positions=sampling_positions,
        reads_references=bool((token_ids < 0).any()),
        is_greedy=draws is None,
        is_plain=step.grammar is None and table.sampling.is_plain(sampling_rows),
        masks=None if step.grammar is None else _masks(step.grammar, entries.indices[sampling]),
    )


def write_idle(target: HostInputs, no_row: int) -> None:
    """One token of each request, which belongs to nobody: to be computed where only the shape matters."""
    target.query_start_loc[:] = np.arange(len(target.query_start_loc))
    target.seq_lens[:] = 1
    target.slot_mapping[:] = -1
    for section in (target.token_ids, target.positions, target.rows):
        section[:] = 0
    target.sampling_rows[:] = no_row
    target.temperature[:] = 0


def _write_padded(target: np.ndarray, values: np.ndarray, padding: int) -> None:
    count = len(values)
    target[:count] = values
    if count < len(target):
        target[count:] = padding


def _masks(grammar: GrammarMasks, sampling_indices: IntArray) -> TokenMasks:
    if not np.isin(grammar.indices, sampling_indices).all():
        raise ValueError(f"requests {grammar.indices} have masks, but {sampling_indices} sample")
    return TokenMasks(
        indices=np.searchsorted(sampling_indices, grammar.indices).astype(np.int64),
        allowed=np.require(grammar.allowed, requirements="W"),  # one that has travelled is read-only
    )
