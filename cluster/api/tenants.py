"""Who a request is for: the tenant of its API key; where nobody needs a key, the tenant without a name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.engine.input_processor import RequestOptions

from .errors import RateLimitError
from .rate_limits import Bucket

_STATE_KEY = "quire.tenant"  # of an ASGI scope


class Tenant:
    """One tenant at one gateway: its weight in the engines, and what it may still ask for.

    `num_gateways` tells among how many gateways the limits are divided now.
    """

    def __init__(
        self,
        name: str = "",
        weight: float = 1.0,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        *,
        num_gateways: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.weight = weight
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._num_gateways = num_gateways
        self._buckets = {
            what: Bucket(self._share(limit), clock) for what, limit in self._limits.items() if limit is not None
        }

    def changed(self, weight: float, requests_per_minute: float | None, tokens_per_minute: float | None) -> bool:
        """Whether these are other terms than the tenant's."""
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        return (weight, limits) != (self.weight, self._limits)

    def admit(self) -> None:
        """One more request. Raises `RateLimitError`, and then it is not counted."""
        for what, bucket in self._buckets.items():
            share = self._share(self._limits[what])
            if share != bucket.per_minute:
                bucket.resize(share)
            wait_s = bucket.wait_s(1.0)
            if wait_s > 0:
                raise RateLimitError(self.name, what, self._limits[what] or 0.0, wait_s)
        if "requests" in self._buckets:
            self._buckets["requests"].take(1.0)

    def used(self, num_tokens: int) -> None:
        """Tokens were computed for it: of a prompt, or generated."""
        bucket = self._buckets.get("tokens")
        if bucket is not None:
            bucket.take(num_tokens)

    def options(self, options: RequestOptions) -> RequestOptions:
        """The options of a request, with whose it is."""
        if not self.name:
            return options
        return msgspec.structs.replace(options, tenant=self.name, tenant_weight=self.weight)

    def _share(self, limit: float | None) -> float:
        return max(1.0, (limit or 0.0) / max(1, self._num_gateways()))


NOBODY = Tenant()


def set_tenant(scope: Any, tenant: Tenant) -> None:
    scope[_STATE_KEY] = tenant


def tenant_of(scope: Mapping[str, Any]) -> Tenant:
    """Whose request this is. Its key was checked before (`keys.KeyMiddleware`)."""
    found: Tenant = scope.get(_STATE_KEY, NOBODY)
    return found
