"""What a worker knows of the running requests: arrays indexed by row. Rebuilt from the engine's records at any time."""

from __future__ import annotations

import numpy as np

from quire.engine.outputs import IntArray, NewRow, SchedulerOutput

from .pooling import PoolingRows
from .prompt_logprobs import PromptLogprobRows
from .sampler import SamplingRows


class RequestTable:
    """The rows of one worker. The model runner is its only owner.

    `token_ids[row, :num_tokens[row]]` is the prompt and every output token known here. With several steps in flight
    that may be ahead of the engine, never behind: the runner appends what it samples.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, vocab_size: int
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.max_model_len = max_model_len
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        # per group [max_num_seqs, max_blocks]
        self.block_tables: list[IntArray] = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_groups)]
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        self.prompt_logprobs = PromptLogprobRows()
        self.pooling = PoolingRows(max_num_seqs)

    def update(self, step: SchedulerOutput) -> None:
        """Apply the changes that a step brings, in the order that its record promises."""
        for row in step.released_rows:
            self.num_tokens[row] = 0
        for new in step.new_rows:
            self._write_row(new)
        for update in step.block_updates:
            end = update.offset + len(update.block_ids)
            self.block_tables[update.group][update.row, update.offset : end] = update.block_ids
        if step.last_token_ids is not None:
            self._tell(step, step.last_token_ids)

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Add one sampled token to each of `rows`. A row that is full has reached its last position: none is needed."""
        lengths = self.num_tokens[rows]
        fits = lengths < self.max_model_len
        self.token_ids[rows[fits], lengths[fits]] = token_ids[fits]
        self.num_tokens[rows] += fits

    def _tell(self, step: SchedulerOutput, last_token_ids: IntArray) -> None:
        """Write down what the engine knows of the rows that sample. Of most of it this is the first word here."""
        samples = last_token_ids >= 0
        rows, ends = step.rows[samples], (step.num_computed_tokens + step.num_scheduled_tokens)[samples]
        self.token_ids[rows, ends - 1] = last_token_ids[samples]
        self.num_tokens[rows] = ends

    def _write_row(self, new: NewRow) -> None:
        self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[new.row] = len(new.token_ids)
        for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
            table[new.row, : len(block_ids)] = block_ids
        self.sampling.set_row(new)
        self.prompt_logprobs.set_row(new)
        self.pooling.set_row(new)
