"""What a worker knows of the running requests: arrays indexed by row. Rebuilt from the engine's records at any time."""

from __future__ import annotations

import numpy as np

from quire.engine.outputs import DraftTokens, IntArray, NewRow, SchedulerOutput

from .pooling import PoolingRows
from .prompt_logprobs import PromptLogprobRows
from .sampler import SamplingRows


class RequestTable:
    """The rows of one worker, on the host. The model runner is its only owner.

    `token_ids[row, :num_tokens[row]]` is the prompt and every output token. With several steps in flight, a token that
    was sampled in one whose result is still on the device stands there as a *reference*: `-(row + 1)`, the last token
    that the row has sampled, which is what `DeviceRows` keeps. `settle` replaces it by the token. No step computes
    another token of a row than known ones and the last: so at most one of the tokens that a step reads is a reference.

    `generation[row]` changes whenever another request takes the row, so that late tokens are recognised.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, vocab_size: int
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.token_ids: IntArray = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: IntArray = np.zeros(max_num_seqs, np.int32)
        self.generation: IntArray = np.zeros(max_num_seqs, np.int32)
        self.block_tables: IntArray = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self.sampling = SamplingRows(max_num_seqs, vocab_size)
        self.prompt_logprobs = PromptLogprobRows()
        self.pooling = PoolingRows(max_num_seqs)
        self._changed: list[tuple[int, int]] = []  # (first, count) in the flat block tables

    @property
    def no_row(self) -> int:
        """Of nobody: one past the last."""
        return len(self.num_tokens)

    def update(self, step: SchedulerOutput) -> None:
        """Apply the changes that a step brings, in the order that its record promises."""
        for row in step.released_rows:
            self.num_tokens[row] = 0
        for new in step.new_rows:
            self._write_row(new)
        for update in step.block_updates:
            self._write_blocks(update.group, update.row, update.offset, update.block_ids)
        if step.drafts is not None:
            self._write_drafts(step.rows[step.drafts.indices], step.drafts)
        if step.last_token_ids is not None:
            self._tell(step, step.last_token_ids)

    def is_asked_for_more(self, step: SchedulerOutput) -> bool:
        """Whether somebody wants more of a step than the tokens that are sampled."""
        return self.pooling.concerns(step.rows) or self.prompt_logprobs.concerns(step)

    def take_block_changes(self) -> np.ndarray:
        """[m] int64, the entries of the flat block tables that were written since the last call."""
        changed, self._changed = self._changed, []
        if not changed:
            return _NOTHING
        return np.concatenate([np.arange(first, first + count) for first, count in changed])

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Each of `rows` has sampled its `token_ids`, [len(rows), k] with -1 behind the last.

        A row that is full has reached its last position: its token is not kept.
        """
        if token_ids.shape[1] > 1:
            for row, own in zip(rows.tolist(), token_ids, strict=True):
                first = self.num_tokens[row]
                self._write_known(row, first, own[own >= 0][: self.max_model_len - first])
            return
        lengths = self.num_tokens[rows]
        fits = lengths < self.max_model_len
        if not fits.all():
            rows, lengths, token_ids = rows[fits], lengths[fits], token_ids[fits]
        self.token_ids[rows, lengths] = token_ids[:, 0]
        self.num_tokens[rows] = lengths + 1

    def append_references(self, rows: IntArray) -> IntArray:
        """Each of `rows` is about to sample a token. Returns its position, [len(rows)]; -1 where there is no room.

        A row that is full has reached its last position: none is needed.
        """
        lengths = self.num_tokens[rows]
        fits = lengths < self.max_model_len
        self.token_ids[rows[fits], lengths[fits]] = -(rows[fits] + 1)
        self.num_tokens[rows] += fits
        return np.where(fits, lengths, np.int32(-1))

    def settle(self, rows: IntArray, generation: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """The tokens of `append_references` are known, and those after them where drafts were right.

        [len(rows)] all, token_ids [len(rows), k] with -1 behind the last. Rows of another generation are left alone.
        """
        own = (self.generation[rows] == generation) & (positions >= 0)
        self.token_ids[rows[own], positions[own]] = token_ids[own, 0]
        if token_ids.shape[1] == 1:
            return
        counts = np.count_nonzero(token_ids >= 0, axis=1)
        for index in np.flatnonzero(own & (counts > 1)).tolist():
            self._write_known(rows[index], positions[index], token_ids[index, : counts[index]])

    def _write_known(self, row: int, first: int, token_ids: IntArray) -> None:
        """The last tokens of a row, from position `first` on."""
        self.token_ids[row, first : first + len(token_ids)] = token_ids
        self.num_tokens[row] = first + len(token_ids)

    def _write_drafts(self, rows: IntArray, drafts: DraftTokens) -> None:
        """Behind the last known token, and not counted as known: what is sampled comes over them."""
        for row, token_ids, count in zip(rows.tolist(), drafts.token_ids, drafts.counts.tolist(), strict=True):
            first = self.num_tokens[row]
            self.token_ids[row, first : first + count] = token_ids[:count]

    def _tell(self, step: SchedulerOutput, last_token_ids: IntArray) -> None:
        """Write down what the engine knows of the rows that sample. Of most of it this is the first word here."""
        samples = last_token_ids >= 0
        rows, ends = step.rows[samples], (step.num_computed_tokens + step.num_scheduled_tokens)[samples]
        self.token_ids[rows, ends - 1] = last_token_ids[samples]
        self.num_tokens[rows] = ends

    def _write_row(self, new: NewRow) -> None:
        self.generation[new.row] += 1
        self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[new.row] = len(new.token_ids)
        for group, block_ids in enumerate(new.block_ids):
            self._write_blocks(group, new.row, 0, block_ids)
        self.sampling.set_row(new)
        self.prompt_logprobs.set_row(new)
        self.pooling.set_row(new)

    def _write_blocks(self, group: int, row: int, offset: int, block_ids: list[int]) -> None:
        self.block_tables[group, row, offset : offset + len(block_ids)] = block_ids
        _, max_num_seqs, max_blocks = self.block_tables.shape
        self._changed.append(((group * max_num_seqs + row) * max_blocks + offset, len(block_ids)))


_NOTHING = np.empty(0, np.int64)
