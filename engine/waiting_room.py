"""Requests without a row: the queue, those that stand aside for a gate, and the limit on both.

The scheduler asks for the next request, lets it through the gates, and takes it out when it has a row for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .config import SchedulerConfig
from .errors import OverloadedError, TenantShareError
from .gates import Gate
from .request import Request
from .request_queue import RequestQueue, TenantBook


@dataclass(slots=True)
class _Aside:
    """Requests that one gate refused when its version was `version`."""

    version: int = -1
    requests: dict[str, Request] = field(default_factory=dict)


class DrainRate:
    """Tokens per second that the engine computes, as an exponential average over about ten seconds of work."""

    def __init__(self, half_life_s: float = 5.0) -> None:
        self.tokens_per_s = 0.0
        self._half_life_s = half_life_s
        self._last: float | None = None

    def record(self, num_tokens: int, now: float) -> None:
        """A step of `num_tokens` was given out."""
        if self._last is not None and now > self._last:
            keep = 0.5 ** ((now - self._last) / self._half_life_s)
            rate = num_tokens / (now - self._last)
            self.tokens_per_s = rate if self.tokens_per_s == 0 else keep * self.tokens_per_s + (1 - keep) * rate
        self._last = now

    def pause(self) -> None:
        """There was nothing to do: the time until the next step does not count."""
        self._last = None

    def seconds_for(self, num_tokens: int) -> float:
        """How long that many tokens take, between 1 s and 10 min; 1 s as long as nothing was measured."""
        return min(max(num_tokens / self.tokens_per_s, 1.0), 600.0) if self.tokens_per_s else 1.0


class WaitingRoom:
    """Owned by the scheduler."""

    def __init__(self, config: SchedulerConfig, gates: tuple[Gate, ...]) -> None:
        self.tenants = TenantBook()
        self.queue = RequestQueue(self.tenants)
        self.drain_rate = DrainRate()
        self.num_tokens = 0  # known tokens of all requests here
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._gates = gates
        self._aside = [_Aside() for _ in gates]

    def __len__(self) -> int:
        return len(self.queue) + self.num_aside

    @property
    def num_aside(self) -> int:
        """Requests that a gate has refused for now."""
        return sum(len(aside.requests) for aside in self._aside)

    def num_by_cause(self) -> dict[str, int]:
        """How many wait for what, by the name of the `WaitCause`."""
        counts: dict[str, int] = {}
        if len(self.queue):
            for tenant in self.tenants:
                if tenant.num_waiting:
                    cause = tenant.clock.cause.name
                    counts[cause] = counts.get(cause, 0) + tenant.num_waiting
        for gate, aside in zip(self._gates, self._aside, strict=True):
            if aside.requests:
                cause = gate.cause.name
                counts[cause] = counts.get(cause, 0) + len(aside.requests)
        return counts

    def check_room(self, num_tokens: int, tenant: str = "", weight: float = 1.0) -> None:
        """Raise `OverloadedError` unless a new request of `num_tokens` may wait here.

        A queue that others have filled does not turn away a tenant that has less than its share of the places (one at
        least), so there may be more requests than allowed: by a share for each of the other tenants.
        """
        for name, limit, waiting, more in (
            ("requests", self._max_requests, len(self), 1),
            ("tokens", self._max_tokens, self.num_tokens, num_tokens),
        ):
            # An empty queue takes any request: refusing it for its size alone would never end.
            if limit is not None and waiting and waiting + more > limit:
                retry_after_s = self.drain_rate.seconds_for(self.num_tokens)
                if name == "requests" and self._has_its_share(limit, tenant, weight, retry_after_s):
                    continue
                raise OverloadedError(
                    f"The queue is full: {waiting} {name} are waiting, at most {limit} are allowed. "
                    f"Try again in {math.ceil(retry_after_s)} s.",
                    retry_after_s,
                )

    def _has_its_share(self, limit: int, name: str, weight: float, retry_after_s: float) -> bool:
        """Whether a place is kept for the tenant. False when it is the only one; raises when it has used its share."""
        others = [each for each in self.tenants if each.num_unfinished and each.name != name]
        if not others:
            return False
        share = max(1.0, limit * weight / (weight + sum(each.weight for each in others)))
        held = sum(each.num_waiting for each in self.tenants if each.name == name)
        if held < share:
            return True
        raise TenantShareError(
            f"The queue is full, and {held} of the {len(self)} requests in it are this tenant's, whose share is "
            f"{share:.0f}. Try again in {math.ceil(retry_after_s)} s.",
            retry_after_s,
        )

    def push(self, request: Request, now: float) -> None:
        self.queue.push(request, now)
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits."""
        self.num_tokens -= request.num_tokens
        for aside in self._aside:
            if aside.requests.pop(request.request_id, None) is not None:
                return
        self.queue.remove(request)

    def ask_gates_again(self, now: float) -> None:
        """Let requests back to their places in the queue whose gate may have changed its mind."""
        for gate, aside in zip(self._gates, self._aside, strict=True):
            version = gate.version
            if not aside.requests or aside.version == version:
                continue
            aside.version = version
            for request in [each for each in aside.requests.values() if gate.may_enter(each)]:
                del aside.requests[request.request_id]
                self.queue.push(request, now)

    def pass_gates(self, request: Request, now: float) -> bool:
        """Let the next request through every gate, or through none: then it stands aside.

        Raises what a gate raises for a request that it will never let in; nothing is set aside then either.
        """
        for index, gate in enumerate(self._gates):
            version = gate.version
            try:
                passed = gate.enter(request)
            except BaseException:
                self.leave_gates(request, index)
                raise
            if not passed:
                self.leave_gates(request, index)
                self._stand_aside(request, index, version, now)
                return False
        return True

    def leave_gates(self, request: Request, count: int | None = None) -> None:
        """Give back what the (first `count`) gates set aside for a request."""
        for gate in reversed(self._gates[:count]):
            gate.leave(request)

    def _stand_aside(self, request: Request, index: int, version: int, now: float) -> None:
        self.queue.remove(request)
        aside = self._aside[index]
        # The oldest refusal counts: the gate may have changed its mind about it while it was asked about others.
        aside.version = min(aside.version, version) if aside.requests else version
        aside.requests[request.request_id] = request
        request.ledger.bill(self._gates[index].cause, now)
