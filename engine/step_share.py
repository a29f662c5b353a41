"""How much of the work one step takes.

Without a pipeline it takes all that fits in the budget, and the next step may go on with any row at once: the worker
knows what it has sampled. In a pipeline several steps are under way at the same time, each on another stage, and what
the last stage samples is known to the first only when the engine tells it. So a row whose token is not back yet cannot
be in the next step, and if one step took every row, the other stages would stand idle until it is back. Each step
therefore takes an equal part:

    8 rows, 2 steps in flight         stage 0:   0-3 | 4-7 | 0-3 | 4-7 | ...
                                      stage 1:         0-3 | 4-7 | 0-3 | ...
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .outputs import IntArray
from .running_table import RunningTable

# A step of fewer tokens takes hardly less time (its weights are read all the same), so prompts are not cut below it.
MIN_STEP_TOKENS = 64


class Share(NamedTuple):
    """What a step may take."""

    wants: IntArray  # [num_rows] most tokens of each row
    budget: int  # of tokens, over all rows


class StepShare(Protocol):
    """Asked by the scheduler once per step. Owned by it."""

    def known(self, table: RunningTable, rows: IntArray) -> IntArray:
        """[num_rows] the tokens of each row that the next step can compute, with those computed already."""
        ...

    def limit(self, wants: IntArray, num_running: int, num_waiting_tokens: int, budget: int) -> Share:
        """What the next step may take of the `wants` of the running rows, in order, and of those who wait."""
        ...

    def last_token_ids(self, table: RunningTable, rows: IntArray, samples: npt.NDArray[np.bool_]) -> IntArray | None:
        """What the step must tell the workers, see `SchedulerOutput`."""
        ...

    def given_out(self, num_tokens: int) -> None:
        """A step of so many tokens is under way."""
        ...

    def taken_in(self, num_tokens: int) -> None:
        """It is back."""
        ...

    def reset(self) -> None:
        """Nothing is under way any more."""
        ...


class WholeShare:
    """Without a pipeline: everything, at once."""

    def known(self, table: RunningTable, rows: IntArray) -> IntArray:
        return table.num_tokens[rows] + table.num_pending[rows] * ~table.is_constrained[rows]

    def limit(self, wants: IntArray, num_running: int, num_waiting_tokens: int, budget: int) -> Share:  # noqa: ARG002
        return Share(wants, budget)

    def last_token_ids(self, table: RunningTable, rows: IntArray, samples: npt.NDArray[np.bool_]) -> None:  # noqa: ARG002
        return None

    def given_out(self, num_tokens: int) -> None:
        pass

    def taken_in(self, num_tokens: int) -> None:
        pass

    def reset(self) -> None:
        pass


class PipelineShare:
    """One of `num_steps` equal parts: of the rows that decode, and of all tokens that are still to be computed.

    No row is left out for long: when `num_steps` - 1 steps with equal parts are under way, the rest is one part.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._num_tokens_under_way = 0

    def known(self, table: RunningTable, rows: IntArray) -> IntArray:
        return table.num_tokens[rows]

    def limit(self, wants: IntArray, num_running: int, num_waiting_tokens: int, budget: int) -> Share:
        most_rows = -(-num_running // self._num_steps)
        decodes = wants == 1
        wants = np.where(decodes & (np.cumsum(decodes) > most_rows), 0, wants)
        work = int(wants.sum()) + self._num_tokens_under_way + num_waiting_tokens
        return Share(wants, min(budget, max(-(-work // self._num_steps), MIN_STEP_TOKENS)))

    def last_token_ids(self, table: RunningTable, rows: IntArray, samples: npt.NDArray[np.bool_]) -> IntArray:
        return np.where(samples, table.last_token_ids[rows], np.int32(-1))

    def given_out(self, num_tokens: int) -> None:
        self._num_tokens_under_way += num_tokens

    def taken_in(self, num_tokens: int) -> None:
        self._num_tokens_under_way -= num_tokens

    def reset(self) -> None:
        self._num_tokens_under_way = 0
