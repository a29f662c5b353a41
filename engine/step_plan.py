"""A step, from its first plan to the record of what was given to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .outputs import (
    BatchLogprobs,
    BlockUpdate,
    FloatArray,
    IntArray,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
    TokenLogprobs,
)
from .request import Request


@dataclass(slots=True)
class StepPlan:
    """A step while it is being planned.

    `rows` and `grants` are the running requests and the tokens that each gets; a request that gives way gets 0 and is
    left out. `new_rows` and `new_grants` are those admitted in this step. `drafts` are computed on top of the grants.
    """

    now: float
    budget: int  # tokens that nobody has got yet
    rows: IntArray
    grants: IntArray
    new_rows: list[NewRow] = field(default_factory=list)
    new_grants: list[int] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)  # by row
    preempted: bool = False

    def revoke(self, row: int) -> None:
        """The request in this row computes nothing after all."""
        self.grants[np.flatnonzero(self.rows == row)] = 0
        self.preempted = True

    def batch(self) -> tuple[IntArray, IntArray]:
        """(rows, tokens of each) that really compute something, in order: running ones, then new ones."""
        granted = self.grants > 0
        rows, grants = (self.rows, self.grants) if granted.all() else (self.rows[granted], self.grants[granted])
        if not self.new_rows:
            return rows, grants
        new_rows = np.array([new.row for new in self.new_rows], dtype=np.int32)
        return np.concatenate((rows, new_rows)), np.concatenate((grants, np.array(self.new_grants, dtype=np.int32)))


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step as it was given to the workers, with what is needed to recognise whose its results are."""

    output: SchedulerOutput
    num_tokens: int  # of all requests
    planned_at: float
    requests: list[Request | None]  # in batch order
    epochs: IntArray  # [num_reqs] of the rows, when the step was planned
    samples: npt.NDArray[np.bool_]  # [num_reqs] whether the row samples a token

    def several_tokens(self, result: ModelRunnerOutput, taken: npt.NDArray[np.bool_]) -> dict[int, list[int]]:
        """By position in the batch, what those with drafts have sampled. taken: [num_reqs] whose results count."""
        drafts = self.output.drafts
        if drafts is None:
            return {}
        indices = drafts.indices[taken[drafts.indices]]
        sampled = result.sampled_token_ids[indices]
        return {
            index: token_ids[:count]
            for index, token_ids, count in zip(
                indices.tolist(), sampled.tolist(), np.count_nonzero(sampled >= 0, axis=1).tolist(), strict=True
            )
        }

    def split_logprobs(self, batch: BatchLogprobs | None) -> dict[int, list[TokenLogprobs]]:
        """Logprobs by position in the batch, each request getting as many as it asked for."""
        if batch is None:
            return {}
        result: dict[int, list[TokenLogprobs]] = {}
        columns = (batch.indices, batch.token_ids, batch.logprobs, batch.sampled_ranks)
        for index, token_ids, values, rank in zip(*(column.tolist() for column in columns), strict=True):
            request = self.requests[index]
            wanted = 1 + ((request.source.sampling_params.logprobs if request is not None else 0) or 0)
            pairs = zip(token_ids[1:wanted], values[1:wanted], strict=True)
            top = [(token_id, value) for token_id, value in pairs if token_id >= 0]
            result.setdefault(index, []).append(TokenLogprobs(token_ids[0], values[0], rank, top))
        return result

    def book_prompt_logprobs(self, result: ModelRunnerOutput, epochs_now: IntArray) -> None:
        """Let requests keep what the step tells of their prompts, but for those that have lost their row since.

        `epochs_now`: [max_num_seqs] of the rows.
        """
        for index, part in result.prompt_logprobs:
            request = self.requests[index]
            if epochs_now[self.output.rows[index]] == self.epochs[index]:
                assert request is not None
                assert request.prompt_logprobs is not None
                request.prompt_logprobs.add(part)

    @staticmethod
    def embedding_of(index: int, result: ModelRunnerOutput) -> FloatArray | None:
        """What became of the prompt at an index of the batch, if it was to become that."""
        return next((embedding for at, embedding in result.embeddings if at == index), None)
