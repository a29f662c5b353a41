"""Block tables of the running requests, and the prefix cache: the scheduler's view of KV memory."""

from __future__ import annotations

from dataclasses import dataclass

from .block_hash import group_scope
from .block_pool import NULL_BLOCK, BlockPool
from .cache_history import CacheHistory
from .kv_cache_groups import common_hit_length, policy_for
from .kv_cache_spec import KVCacheConfig
from .outputs import BlockUpdate, MissReason
from .request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a request can start with. They are not referenced until `KVCacheManager.admit`."""

    num_blocks: int
    block_ids: tuple[list[int], ...]  # per group, null blocks where its window does not reach


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Why the first block after a prefix hit was not there."""

    reason: MissReason
    evicted_at: float | None = None


class KVCacheManager:
    """One pool, one table per KV cache group and row. All tables of a row have the same length.

    Token regions of a row, at a step boundary (block_size 4):

        | b0 | b1 | b2 | b3 |
        |####|####|##..|    |
         committed  |   `- allocated for tokens of the step being planned
                    `- partly filled: not findable until it is full

    `commit` makes full blocks findable. It may be called as soon as the step that fills them has been planned for good:
    steps run in order, so whoever finds the block reads it after it is written (within a step, each layer writes before
    it reads). If a step fails, `reset` forgets everything.
    """

    def __init__(self, config: KVCacheConfig, max_num_seqs: int, enable_prefix_caching: bool) -> None:
        self.config = config
        self.block_size = config.block_size
        self.history = CacheHistory(config.num_blocks - 1)
        self.pool = BlockPool(config.num_blocks, self.history)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_ghost_hit_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._policies = tuple(policy_for(group.spec) for group in config.groups)
        self._num_groups = len(config.groups)
        self.num_full_groups = sum(group.spec.sliding_window is None for group in config.groups)
        self._tables: list[list[list[int]]] = [[[] for _ in range(max_num_seqs)] for _ in config.groups]
        self._num_committed = [0] * max_num_seqs

    def tables(self, row: int) -> tuple[list[int], ...]:
        """Copies of the row's block tables, per group."""
        return tuple(list(table[row]) for table in self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Most blocks, over all groups, that a request of `num_tokens` refers to at once."""
        return sum(policy.max_blocks(num_tokens, max_chunk_tokens) for policy in self._policies)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix that the request may start with: what it must compute itself is left out."""
        if not self._enable_prefix_caching:
            return PrefixHit(0, tuple([] for _ in self._policies))
        limit = request.max_cached_tokens // self.block_size
        hashes = request.hash_blocks(limit, self.block_size)
        lookup, suffixes = self.pool.lookup, self._suffixes(request)
        length = common_hit_length(
            self._policies, limit, lambda group, index: lookup(hashes[index] + suffixes[group]) is not None
        )
        block_ids = []
        for policy, suffix in zip(self._policies, suffixes, strict=True):
            first = min(policy.first_needed(length * self.block_size), length)
            found = [lookup(hashes[index] + suffix) for index in range(first, length)]
            block_ids.append([NULL_BLOCK] * first + [block_id for block_id in found if block_id is not None])
        return PrefixHit(length, tuple(block_ids))

    def num_missing(self, num_tokens: int, chunk_tokens: int, hit: PrefixHit, reserve: int) -> int:
        """Blocks that would have to be free besides those that are, for the whole request (not only its first chunk)
        to fit with `reserve` blocks left; 0 if it fits.

        With what running requests lack of their prompts in `reserve`, two long prompts are not admitted together only
        to preempt each other.
        """
        ref_count = self.pool.ref_count
        evictable = sum(1 for table in hit.block_ids for block_id in table if block_id and ref_count[block_id] == 0)
        held = sum(1 for table in hit.block_ids for block_id in table if block_id)
        need = self.max_blocks(num_tokens, chunk_tokens) - held
        now = (self.num_blocks_for(hit.num_blocks * self.block_size + chunk_tokens) - hit.num_blocks) * len(
            self._tables
        )
        return max(max(need, now) + reserve - (self.pool.num_free - evictable), 0)

    def admit(self, row: int, hit: PrefixHit) -> None:
        """Start the row's tables with the blocks of `hit`."""
        for table, block_ids in zip(self._tables, hit.block_ids, strict=True):
            self.pool.acquire(block_id for block_id in block_ids if block_id != NULL_BLOCK)
            table[row] = list(block_ids)
        self._num_committed[row] = hit.num_blocks

    def first_admission(self, request: Request, hit: PrefixHit) -> PrefixMiss | None:
        """Book a request's first hit in the counters, and say why it was not longer. None without a cache."""
        if not self._enable_prefix_caching:
            return None
        if request.max_cached_tokens < request.num_tokens - 1:
            return PrefixMiss("not_read")  # it is no question to the cache, and counts as none
        self.num_queried_tokens += request.num_prompt_tokens
        self.num_hit_tokens += min(hit.num_blocks * self.block_size, request.num_prompt_tokens)
        limit = (request.num_tokens - 1) // self.block_size
        if hit.num_blocks == limit:
            missing = request.num_tokens - hit.num_blocks * self.block_size
            return PrefixMiss("too_short") if missing < self.block_size else None  # the last token is always computed
        suffixes = self._suffixes(request)
        hashes, history = request.block_hashes, self.history

        def in_double_cache(group: int, index: int) -> bool:
            key = hashes[index] + suffixes[group]
            return self.pool.lookup(key) is not None or history.evicted_at(key) is not None

        doubled = common_hit_length(self._policies, limit, in_double_cache)
        self.num_ghost_hit_tokens += (doubled - hit.num_blocks) * self.block_size
        missed = [hashes[hit.num_blocks] + suffix for suffix in suffixes]
        missed = [key for key in missed if self.pool.lookup(key) is None]
        evicted = [when for key in missed if (when := history.evicted_at(key)) is not None]
        if evicted:
            return PrefixMiss("evicted", max(evicted))
        return PrefixMiss("salt_differs" if any(map(history.is_elsewhere, missed)) else "never_seen")

    def grow(self, row: int, num_computed_tokens: int, num_blocks: int) -> list[BlockUpdate] | None:
        """Let the row's tables reach `num_blocks` blocks. None, and nothing allocated, if the pool has too few.

        Blocks that no token from position `num_computed_tokens` on attends to are released first, in either case.
        """
        self._leave_behind(row, num_computed_tokens)
        offset = len(self._tables[0][row])
        count = num_blocks - offset
        if count * len(self._tables) > self.pool.num_free:
            return None
        updates = []
        for group, table in enumerate(self._tables):
            block_ids = self.pool.allocate(count)
            table[row].extend(block_ids)
            updates.append(BlockUpdate(row, group, offset, block_ids))
        return updates

    def commit(self, request: Request, num_final_tokens: int) -> None:
        """Make findable the blocks of a running request that its first `num_final_tokens` tokens fill."""
        if not self._enable_prefix_caching:
            return
        row = request.row
        start, stop = self._num_committed[row], num_final_tokens // self.block_size
        if stop <= start:
            return
        hashes = request.hash_blocks(stop, self.block_size)
        for table, suffix in zip(self._tables, self._suffixes(request), strict=True):
            block_ids = table[row]
            for index in range(start, stop):
                if block_ids[index] != NULL_BLOCK:
                    self.pool.cache(block_ids[index], hashes[index] + suffix)
        self._num_committed[row] = stop

    def free(self, row: int) -> None:
        """Release the row's blocks, the last first."""
        for table in self._tables:
            self.pool.release(reversed(table[row]))
            table[row] = []
        self._num_committed[row] = 0

    def reset_prefix_cache(self) -> None:
        """Forget what is cached. Running requests keep their blocks, which are no longer found by others."""
        self.pool.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool and the tables disagree. Valid at any step boundary."""
        self.pool.check_integrity(blocks for table in self._tables for blocks in table)

    def _suffixes(self, request: Request) -> list[bytes]:
        return [group_scope(request.scope, group) for group in range(self._num_groups)]

    def _leave_behind(self, row: int, num_computed_tokens: int) -> None:
        for policy, table in zip(self._policies, self._tables, strict=True):
            blocks = table[row]
            index = min(policy.first_needed(num_computed_tokens), len(blocks)) - 1
            left = []
            while index >= 0 and blocks[index] != NULL_BLOCK:
                left.append(blocks[index])
                blocks[index] = NULL_BLOCK
                index -= 1
            self.pool.release(left)
