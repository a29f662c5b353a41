"""Requests that wait for a row, in the order in which they will get one."""

from __future__ import annotations

import heapq

from .request import Request


class RequestQueue:
    """A heap by `Request.sort_key`. A push costs O(log n), a removal O(1): removed entries are skipped at the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.sort_key, request))

    def peek(self) -> Request | None:
        """The next request, left in place."""
        while self._heap and self._members.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._members):
            self._heap = [(request.sort_key, request) for request in self._members.values()]
            heapq.heapify(self._heap)
