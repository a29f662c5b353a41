"""Why a request waited: its wall time split over causes, booked at transitions only.

A running request is billed directly, when a step begins to give it less than it could use and when that ends. Waiting
requests are billed together: a `QueueClock` adds up how long its queue stood still for which cause, and a request reads
it when it joins and when it leaves. So a change of cause costs the same with one request in the queue as with 100,000.
"""

from __future__ import annotations

import enum


class WaitCause(enum.IntEnum):
    """What a request with work lacked. Exactly one is billed at a time."""

    TOKEN_BUDGET = 0  # the step under way, or the ones planned, had no tokens left for it
    KV_BLOCKS = enum.auto()  # no free blocks for it, or it was preempted for want of them
    MAX_NUM_SEQS = enum.auto()  # no free row
    GRAMMAR = enum.auto()  # its grammar was being compiled
    LORA_SLOT = enum.auto()
    ENCODER_BUDGET = enum.auto()
    REMOTE_KV = enum.auto()
    TENANT_SHARE = enum.auto()  # its tenant had more than the one whose turn it was
    RECOVERY = enum.auto()  # the workers were being rebuilt


class QueueClock:
    """Seconds per cause for which a queue stood still. The cause is the same for everyone in it."""

    __slots__ = ("_seconds", "_since", "cause")

    def __init__(self, now: float, cause: WaitCause = WaitCause.TOKEN_BUDGET) -> None:
        self.cause = cause
        self._seconds = [0.0] * len(WaitCause)
        self._since = now

    def turn(self, cause: WaitCause, now: float) -> None:
        """From now on the queue waits for `cause`."""
        self._seconds[self.cause] += now - self._since
        self._since = now
        self.cause = cause

    def read(self, now: float) -> list[float]:
        """Seconds per cause since the clock was made."""
        seconds = list(self._seconds)
        seconds[self.cause] += now - self._since
        return seconds


class WaitLedger:
    """The books of one request, from its arrival on. Owned by the scheduler.

    At any time the request is in a queue, billed to one cause of its own, or computing.
    """

    __slots__ = ("_cause", "_clock", "_joined", "_since", "arrived", "compute_s", "wait_s")

    def __init__(self, now: float) -> None:
        self.arrived = now
        self.wait_s = [0.0] * len(WaitCause)
        self.compute_s = 0.0
        self._since = now
        self._cause: WaitCause | None = None
        self._clock: QueueClock | None = None
        self._joined: list[float] = []

    def join(self, clock: QueueClock, now: float) -> None:
        """The request stands in the queue of `clock` from now on."""
        self._close(now)
        self._clock, self._joined = clock, clock.read(now)

    def bill(self, cause: WaitCause | None, now: float) -> None:
        """The request lacks `cause` from now on, or nothing: it is being computed."""
        self._close(now)
        self._clock, self._cause = None, cause

    def read(self, now: float) -> tuple[list[float], float]:
        """(seconds per cause, seconds of computing) up to now. They sum to `now - arrived`."""
        self._close(now)
        return self.wait_s, self.compute_s

    def _close(self, now: float) -> None:
        """Book the time since the last transition."""
        if self._clock is not None:
            reading = self._clock.read(now)
            for cause, seconds in enumerate(reading):
                self.wait_s[cause] += seconds - self._joined[cause]
            self._joined = reading
        elif self._cause is None:
            self.compute_s += now - self._since
        else:
            self.wait_s[self._cause] += now - self._since
        self._since = now
