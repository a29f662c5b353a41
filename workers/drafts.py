"""Draft tokens on a rank: a step with them is one of more requests, of one token each.

    request 0, two drafts   t7 a b        entries   t7      sees ... t7
    request 1               u3                      a       sees ... t7 a
                                                    b       sees ... t7 a b
                                                    u3

Within a layer, keys and values of all tokens are stored before any of them attends, so an entry is a decode like any
other: of the same row and block table, one token longer than the entry before. It is computed by the same kernels, and
in float32 on CPU to the same bits, as when its turn had come without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.engine.outputs import DraftTokens, IntArray, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Entries:
    """What the forward takes for requests. Without drafts they are the step's, in its order."""

    rows: IntArray  # [num_entries]
    num_scheduled: IntArray  # [num_entries] tokens, each >= 1
    start: IntArray  # [num_entries] position of the first
    indices: IntArray  # [num_entries] in the batch of the step, ascending
    depths: IntArray  # [num_entries] of how many drafts it is behind; 0 for those that need none
    num_reqs: int  # of the step
    num_tokens: int  # of all entries
    drafts: DraftTokens | None

    @classmethod
    def of(cls, step: SchedulerOutput) -> Entries:
        """Raises `ValueError` where a row computes something else than its last known token and drafts behind it."""
        num_reqs, num_tokens, drafts = len(step.rows), step.total_num_scheduled_tokens, step.drafts
        indices = np.arange(num_reqs, dtype=np.int32)
        if drafts is None:
            starts, depths = step.num_computed_tokens, np.zeros(num_reqs, np.int32)
            return cls(step.rows, step.num_scheduled_tokens, starts, indices, depths, num_reqs, num_tokens, None)
        if (step.num_scheduled_tokens[drafts.indices] != 1 + drafts.counts).any():
            raise ValueError(f"step {step.step_id}: {drafts} are not all that their rows compute behind a known token")
        counts = np.ones_like(indices)
        counts[drafts.indices] += drafts.counts
        indices = np.repeat(indices, counts)
        depths = np.arange(len(indices), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts).astype(
            np.int32
        )
        num_scheduled = np.where(counts > 1, 1, step.num_scheduled_tokens).astype(np.int32)[indices]
        start = step.num_computed_tokens[indices] + depths
        return cls(step.rows[indices], num_scheduled, start, indices, depths, num_reqs, num_tokens, drafts)

    def requests(self, sampling: IntArray) -> IntArray:
        """Those of the step, ascending, that have some of `sampling`, the entries that sample, ascending."""
        if self.drafts is None:
            return sampling
        found: IntArray = self.indices[sampling[self.depths[sampling] == 0]]
        return found

    def accept(self, sampling: IntArray, token_ids: IntArray) -> IntArray:
        """What entries have sampled, as the step's result: by request, up to the first that a draft was not.

        sampling: [n] the entries that sample, ascending; token_ids: [n]. Returns [num_reqs, 1 + most drafts], -1 behind
        the last token of each.
        """
        if self.drafts is None:
            sampled = np.full((self.num_reqs, 1), -1, np.int32)
            sampled[sampling, 0] = token_ids
            return sampled
        sampled = np.full((self.num_reqs, 1 + self.drafts.token_ids.shape[1]), -1, np.int32)
        sampled[self.indices[sampling], self.depths[sampling]] = token_ids
        ours = sampled[self.drafts.indices]
        are_right = np.cumprod(ours[:, :-1] == self.drafts.token_ids, axis=1, dtype=np.int32)
        ours[:, 1:][are_right == 0] = -1
        sampled[self.drafts.indices] = ours
        return sampled
