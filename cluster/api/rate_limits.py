"""How much a tenant may ask of one gateway: token buckets for requests and for tokens.

A limit of N per minute is a bucket that holds N and fills at N/60 per second: a burst of N is fine, then the rate
holds. Requests are taken before they are let in. How many tokens a request will need is not known then, so tokens are
taken as they are used, the bucket may go below zero, and the next request waits until it is above again.

There is one bucket per gateway, and requests are spread over the gateways: each grants its share, the limit divided by
the number of gateways. The sum keeps to the limit, as far as the proxy spreads the tenant's requests evenly.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_PER_MINUTE = 1 / 60.0


class Bucket:
    """`take` lowers the level, time raises it again, up to `per_minute`."""

    __slots__ = ("_clock", "_level", "_seen", "per_minute")

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._seen = clock()

    def take(self, amount: float) -> None:
        self._fill()
        self._level -= amount

    def wait_s(self, least: float) -> float:
        """Seconds until the level is at least `least` (at most what the bucket holds); 0 when it is."""
        self._fill()
        missing = min(least, self.per_minute) - self._level
        return max(0.0, missing / (self.per_minute * _PER_MINUTE))

    def resize(self, per_minute: float) -> None:
        """Another limit from now on. What is owed stays owed."""
        self._fill()
        self._level = min(self._level, per_minute)
        self.per_minute = per_minute

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._seen) * self.per_minute * _PER_MINUTE)
        self._seen = now
