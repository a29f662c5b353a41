"""The numbers that a scheduler tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .kv_cache_manager import KVCacheManager
from .outputs import SchedulerStats
from .running_table import RunningTable
from .speculation import Speculation
from .waiting_room import WaitingRoom


@dataclass(slots=True)
class Counts:
    """What a scheduler counts; they only grow. Meaning as in `SchedulerStats`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_deadlines_missed: int = 0
    num_resumed_requests: int = 0
    num_recomputed_tokens: int = 0


def stats_of(
    counts: Counts, kv_cache: KVCacheManager, running: RunningTable, waiting: WaitingRoom, speculation: Speculation
) -> SchedulerStats:
    """As of now."""
    pool, rows = kv_cache.pool, running.rows()
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(waiting),
        num_waiting_by_cause=waiting.num_by_cause(),
        num_waiting_tokens=waiting.num_tokens,
        num_uncomputed_tokens=int(np.maximum(running.num_tokens[rows] - running.num_computed[rows], 0).sum()),
        num_blocks=pool.num_usable,
        num_used_blocks=pool.num_used,
        num_steps=counts.num_steps,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_generation_tokens=counts.num_generation_tokens,
        num_preemptions=counts.num_preemptions,
        num_deadlines_missed=counts.num_deadlines_missed,
        num_resumed_requests=counts.num_resumed_requests,
        num_recomputed_tokens=counts.num_recomputed_tokens,
        num_draft_tokens=speculation.num_drafts,
        num_accepted_tokens=speculation.num_accepted,
        num_evictions=pool.num_evictions,
        prefix_cache_queries=kv_cache.num_queried_tokens,
        prefix_cache_hits=kv_cache.num_hit_tokens,
        prefix_cache_ghost_hits=kv_cache.num_ghost_hit_tokens,
    )
