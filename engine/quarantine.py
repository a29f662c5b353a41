"""Finding the one request that breaks every step it is in, without ending the others.

A step that fails is tried again with everybody in it: most failures are a machine's. Requests whose step has failed
twice in a row are suspects. Until each is cleared, every step computes one suspect alone; a new token clears it, and a
failure of a step that it was alone in is its own. So a poisonous request costs the others time, never their answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request, RequestStatus

SUSPECT_FAILURES = 2  # failed steps in a row after which a request is computed alone
MAX_FAILURES = 3  # after which it is given up: the last one was its own


class Quarantine:
    """The suspects, in the order in which they are tried. `Request.num_failures` counts up to its next token."""

    def __init__(self) -> None:
        self._suspects: dict[str, Request] = {}

    def blame(self, requests: Iterable[Request]) -> list[Request]:
        """A step with these requests has failed. Returns those that are to be given up."""
        given_up = []
        for request in requests:
            request.num_failures += 1
            if request.num_failures >= MAX_FAILURES:
                given_up.append(request)
            elif request.num_failures >= SUSPECT_FAILURES:
                self._suspects[request.request_id] = request
        return given_up

    def next(self) -> Request | None:
        """The suspect that the next step computes alone; None, as nearly always, when there is none."""
        while self._suspects:
            request_id, request = next(iter(self._suspects.items()))
            if request.num_failures >= SUSPECT_FAILURES and request.status is not RequestStatus.FINISHED:
                return request
            del self._suspects[request_id]
        return None
