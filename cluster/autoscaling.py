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
    """As many engines as keep each at `target_requests_per_engine` (running and waiting) and its cache below
    `target_kv_cache_usage` (0 to 1), whichever asks for more.

    A cache can be full of few long requests, and a queue can be long with an empty cache: neither tells enough alone.
    """

    def __init__(self, target_requests_per_engine: float = 32.0, target_kv_cache_usage: float = 0.8) -> None:
        if target_requests_per_engine <= 0 or not 0 < target_kv_cache_usage <= 1:
            raise ValueError("target_requests_per_engine must be > 0, target_kv_cache_usage > 0 and <= 1")
        self._target_requests = target_requests_per_engine
        self._target_usage = target_kv_cache_usage

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = ctx.aggregated_metrics or {}
        requests = sum(reported.get("num_running", {}).values()) + sum(reported.get("num_waiting", {}).values())
        usage = sum(reported.get("kv_cache_usage", {}).values())
        return max(_engines_for(requests, self._target_requests), _engines_for(usage, self._target_usage)), {}


def _engines_for(load: float, target: float) -> int:
    return math.ceil(round(load / target, 6))  # rounded first: 0.8 / 0.8 must not become two engines
