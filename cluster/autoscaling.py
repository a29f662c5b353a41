"""How many engines there should be, from what they report about themselves. Used in Serve's `autoscaling_config`:

    autoscaling_config:
      min_replicas: 1
      max_replicas: 4
      policy:
        policy_function: quire.cluster.autoscaling:EngineLoadPolicy
        policy_kwargs: {target_requests_per_engine: 32}

A class and not a function, because Serve passes `policy_kwargs` to a constructor only. Serve applies `min_replicas`,
`max_replicas` and the up- and downscale delays to what the policy returns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class EngineLoadPolicy:
    """As many engines as keep each at its targets, whichever of them asks for more.

    `target_requests_per_engine` counts running and waiting requests, `target_queued_tokens_per_engine` the tokens that
    are to be computed before a new request gets its turn (what that is in seconds depends on the hardware), and
    `target_kv_cache_usage` is from 0 to 1. A cache can be full of few long requests, a queue can be long with an empty
    cache, and one request can be all that an engine computes for a minute: none of them tells enough alone.

    With `min_replicas: 0` engines go when nobody has anything to do, and come back when a gateway asks for one
    (`waking.py`); until it has its answer, at least one stays.
    """

    def __init__(
        self,
        target_requests_per_engine: float = 32.0,
        target_kv_cache_usage: float = 0.8,
        target_queued_tokens_per_engine: float = 16_384.0,
    ) -> None:
        if not 0 < target_kv_cache_usage <= 1:
            raise ValueError(f"target_kv_cache_usage: must be > 0 and <= 1, got {target_kv_cache_usage}")
        if target_requests_per_engine <= 0:
            raise ValueError(f"target_requests_per_engine: must be > 0, got {target_requests_per_engine}")
        if target_queued_tokens_per_engine <= 0:
            raise ValueError(f"target_queued_tokens_per_engine: must be > 0, got {target_queued_tokens_per_engine}")
        self._target_requests = target_requests_per_engine
        self._target_usage = target_kv_cache_usage
        self._target_tokens = target_queued_tokens_per_engine

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = ctx.aggregated_metrics or {}

        def total(name: str) -> float:
            return sum(reported.get(name, {}).values())

        wanted = max(
            _engines_for(total("num_running") + total("num_waiting"), self._target_requests),
            _engines_for(total("num_queued_tokens"), self._target_tokens),
            _engines_for(total("kv_cache_usage"), self._target_usage),
            1 if ctx.total_num_requests > 0 else 0,
        )
        return wanted, {}


def _engines_for(load: float, target: float) -> int:
    return math.ceil(round(load / target, 6))  # rounded first: 0.8 / 0.8 must not become two engines
