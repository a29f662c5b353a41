"""How many blocks the next request was short of. Until as many may have come, its prompt is not looked up again.

To look it up is to walk over all of its blocks: some milliseconds for a long prompt that is cached, in every step in
which the request is the next one.
"""

from __future__ import annotations

from .block_pool import BlockPool
from .request import Request

_LOOK_AGAIN = 32  # attempts


class Shortage:
    """Of one request, when it was looked up. `reserve` were the blocks to be left, `budget` the step's tokens."""

    def __init__(self, request: Request, num_missing: int, pool: BlockPool, reserve: int, budget: int) -> None:
        self._arrival = request.arrival_index  # and not the request, which may end meanwhile
        self._num_missing = num_missing
        self._events = pool.num_released + pool.num_stored
        self._reserve = reserve
        self._budget = budget
        self._num_attempts = 0

    def lasts(self, request: Request, pool: BlockPool, reserve: int, budget: int) -> bool:
        """Whether it is still short. To be asked once per attempt to admit it.

        A block that is given back makes up for one that is missing, and so does one that becomes findable, if it is of
        the prompt. (It may also close a gap before others that are there: so it is looked up now and then anyway.) With
        less of a budget it may ask for less.
        """
        self._num_attempts += 1
        gained = pool.num_released + pool.num_stored - self._events + self._reserve - reserve
        is_known = (
            request.arrival_index == self._arrival and budget >= self._budget and self._num_attempts < _LOOK_AGAIN
        )
        return is_known and gained < self._num_missing
