"""The running requests, by row: the counters that every step reads and writes, as arrays.

In steady decode a step changes nothing but these counters, for all rows alike, so a step costs a few array operations
and not a walk over objects. Tokens stay in `Request`; here are only numbers about them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from .outputs import IntArray
from .request import Request


class RunningTable:
    """Rows 0 .. max_num_seqs - 1. Owned by the scheduler.

    `num_tokens` counts the known tokens of a row (prompt and output), `num_pending` those that steps in flight will
    sample, `num_computed` those whose keys and values are in the cache or will be, by the steps given out so far.
    `is_constrained` rows sample under a mask that follows from their last token: they are not computed again before
    that token is known here.
    `last_token_ids` are the last known ones. `is_short` says that the last step gave the row less than it could use.
    `epoch` changes whenever a row is released, so that the result of a step that was in flight then is recognised.
    """

    def __init__(self, max_num_seqs: int) -> None:
        def column() -> IntArray:
            return np.zeros(max_num_seqs, dtype=np.int32)

        self.num_tokens = column()
        self.num_pending = column()
        self.num_computed = column()
        self.num_blocks = column()
        self.max_total = column()
        self.is_constrained = np.zeros(max_num_seqs, dtype=np.bool_)
        self.last_token_ids = column()
        self.is_short = np.zeros(max_num_seqs, dtype=np.bool_)
        self.epoch = column()
        self.requests: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._order: list[tuple[tuple[int, int], int]] = []  # (sort_key, row), first served first
        self._rows: IntArray | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def rows(self) -> IntArray:
        """[num_running] the rows in use, who goes first first. The same array until a row is taken or released."""
        if self._rows is None:
            self._rows = np.fromiter((row for _, row in self._order), dtype=np.int32, count=len(self._order))
        return self._rows

    def last(self) -> Request | None:
        """The request that gives way first."""
        return self.requests[self._order[-1][1]] if self._order else None

    def take_row(self, request: Request, num_computed: int, num_blocks: int) -> int:
        row = self._free_rows.pop()
        request.row = row
        self.requests[row] = request
        self.num_tokens[row] = request.num_tokens
        self.num_pending[row] = 0
        self.num_computed[row] = num_computed
        self.num_blocks[row] = num_blocks
        self.max_total[row] = request.max_total_tokens
        self.is_constrained[row] = request.constraint is not None
        self.last_token_ids[row] = request.token_slice(request.num_tokens - 1, request.num_tokens)[0]
        self.is_short[row] = False
        insort(self._order, (request.sort_key, row))
        self._rows = None
        return row

    def release_row(self, request: Request) -> int:
        row = request.row
        del self._order[bisect_left(self._order, (request.sort_key, row))]
        self._rows = None
        self.requests[row] = None
        self.epoch[row] += 1
        self._free_rows.append(row)
        request.row = -1
        return row
