"""Which requests are past their deadline, without looking at the others."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from .request import Request

_SLACK = 64  # entries of finished requests that may stand before they are cleared away


class Deadlines:
    """A heap of the deadlines of unfinished requests, which `requests` holds by id. Finished ones leave by themselves.

    An entry holds no request, so that one that is finished can go although its deadline is still far.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int, str]] = []  # deadline, arrival index, request id

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is None:
            return
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.deadline, request.arrival_index, request.request_id))

    def passed(self, now: float) -> list[Request]:
        """The unfinished requests whose deadline has come, earliest first. Each is told once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            request = self._find(heapq.heappop(self._heap))
            if request is not None:
                found.append(request)
        return found

    def _find(self, entry: tuple[float, int, str]) -> Request | None:
        """An id may have been used again: the arrival tells."""
        request = self._requests.get(entry[2])
        return request if request is not None and request.arrival_index == entry[1] else None
