"""Who a request is for: the tenant of its API key; where nobody needs a key, the tenant without a name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.errors import InvalidRequestError
from quire.engine.input_processor import RequestOptions

from .errors import DeadlineError, RateLimitError
from .rate_limits import Bucket

_STATE_KEY = "quire.tenant"  # of an ASGI scope


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tenant may have: None is no limit."""

    weight: float = 1.0  # of the engines' time, where tenants compete
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    min_priority: int | None = None  # smaller numbers go first
    shares_cache: bool = True  # finds the prefixes of other tenants in the engines' caches, and they find its own
    is_admin: bool = False  # may do what touches every tenant: faults on purpose


class Tenant:
    """One tenant at one gateway: its weight in the engines, and what it may still ask for.

    `num_gateways` tells among how many gateways the limits are divided now.
    """

    def __init__(
        self,
        name: str = "",
        terms: Terms = Terms(),
        *,
        num_gateways: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._num_gateways = num_gateways
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self.agree(terms)

    def agree(self, terms: Terms) -> None:
        """Other terms from now on. What the tenant has used under the old ones stays used, and what it owes, owed."""
        self.terms = terms
        self._limits = {"requests": terms.requests_per_minute, "tokens": terms.tokens_per_minute}
        self._buckets = {
            what: self._buckets.get(what) or Bucket(self._share(limit), self._clock)
            for what, limit in self._limits.items()
            if limit is not None
        }

    @property
    def default_priority(self) -> int:
        """Of requests that do not say."""
        return max(0, self.terms.min_priority or 0)

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
        """The options of a request, with whose it is. Raises `InvalidRequestError` on those it may not have."""
        if not self.name:
            return options
        least = self.terms.min_priority
        if least is not None and options.priority < least:
            raise InvalidRequestError(
                f"priority: must be at least {least} with this API key (smaller numbers go first), "
                f"got {options.priority}.",
                "priority",
            )
        salt = options.cache_salt
        if not self.terms.shares_cache:  # the length tells where the name ends, whatever is in it
            salt = f"{len(self.name)}:{self.name}:{salt or ''}"
        return msgspec.structs.replace(options, tenant=self.name, tenant_weight=self.terms.weight, cache_salt=salt)

    def _share(self, limit: float | None) -> float:
        return max(1.0, (limit or 0.0) / max(1, self._num_gateways()))


class PromptBill:
    """Prompts that engines work on, each charged once: by `pay` when something came of it, or at the end of the `with`
    when the user gave it up before, by leaving or by a deadline. Those of requests that are refused or fail are free.
    """

    def __init__(self, tenant: Tenant, num_tokens: Mapping[Any, int]) -> None:
        self._tenant = tenant
        self._owed = dict(num_tokens)

    def pay(self, prompt: Hashable) -> None:
        self._tenant.used(self._owed.pop(prompt, 0))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit | DeadlineError):
            self._tenant.used(sum(self._owed.values()))


NOBODY = Tenant(terms=Terms(is_admin=True))  # where there are no keys, nobody is kept from anything


def set_tenant(scope: Any, tenant: Tenant) -> None:
    scope[_STATE_KEY] = tenant


def tenant_of(scope: Mapping[str, Any]) -> Tenant:
    """Whose request this is. Its key was checked before (`keys.KeyMiddleware`)."""
    found: Tenant = scope.get(_STATE_KEY, NOBODY)
    return found
