"""The blocks of the KV cache: who refers to each, which are free, which free ones still hold a known prefix.

A block is its id. Its state stands in parallel lists (`ref_count`, `_key`, the links of the free list), which makes
every operation O(1) without an object per block.

    referenced   ref_count > 0, not in the free list; may have a key (others can share it)
    cached       ref_count = 0, in the free list, has a key: usable until it is evicted
    empty        ref_count = 0, in the free list, no key

The free list is a doubly linked ring through block 0, the null block, which is never handed out: tables point to it
where a sliding window has left a block behind. Its head is evicted first. Empty blocks are put at the head; cached
ones at the tail, so that the head is the least recently used. Callers release the blocks of a request from its last
to its first, so that the tail of a sequence is evicted before the prefix that others may share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .cache_history import CacheHistory

NULL_BLOCK = 0


class BlockPool:
    """Owner of all block state. Mutated only by the KV cache manager, between steps.

    `history` is told of every key that becomes findable or stops being so.
    """

    def __init__(self, num_blocks: int, history: CacheHistory) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: must be >= 2 (block 0 is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_stored = 0  # how often a block became findable
        self.num_released = 0  # how often one became free
        self.history = history
        self.ref_count = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}  # key -> the block that holds it
        self._next = [(i + 1) % num_blocks for i in range(num_blocks)]
        self._prev = [(i - 1) % num_blocks for i in range(num_blocks)]
        self.num_free = self.num_usable = num_blocks - 1

    @property
    def num_used(self) -> int:
        """Blocks that requests refer to."""
        return self.num_usable - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a lookup can find, referenced or not."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list, forgetting what they cached. `count` <= `num_free`."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        next_free, key, ref_count = self._next, self._key, self.ref_count
        block_ids = []
        block_id = next_free[NULL_BLOCK]
        for _ in range(count):
            block_ids.append(block_id)
            ref_count[block_id] = 1
            old = key[block_id]
            if old is not None:
                del self._cached[old]
                key[block_id] = None
                self.num_evictions += 1
                self.history.removed(old)
            block_id = next_free[block_id]
        next_free[NULL_BLOCK] = block_id
        self._prev[block_id] = NULL_BLOCK
        self.num_free -= count
        return block_ids

    def lookup(self, key: bytes) -> int | None:
        """The block that caches `key`. It stays evictable until `acquire`."""
        return self._cached.get(key)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Refer to blocks that `lookup` found, one reference each."""
        for block_id in block_ids:
            if self.ref_count[block_id] == 0:
                self._unlink(block_id)
            self.ref_count[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back one reference each, in the order in which the blocks should be evicted. Skips the null block."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            count = self.ref_count[block_id] - 1
            if count < 0:
                raise ValueError(f"block {block_id} released more often than acquired")
            self.ref_count[block_id] = count
            if count == 0:
                # Between the last block and the null block is the tail, between the null block and the first the head.
                after = NULL_BLOCK if self._key[block_id] is not None else self._next[NULL_BLOCK]
                self._link_before(block_id, after)

    def cache(self, block_id: int, key: bytes) -> bool:
        """Make a referenced, full block findable under `key`. False if another block holds that content already."""
        if self._key[block_id] is not None or key in self._cached:
            return False
        self._key[block_id] = key
        self._cached[key] = block_id
        self.num_stored += 1
        self.history.stored(key)
        return True

    def reset(self) -> None:
        """Forget every cached block. What requests refer to stays theirs, but is no longer found."""
        for block_id in self._cached.values():
            self._key[block_id] = None
        self._cached.clear()
        self.history.cleared()

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the pool agrees with itself and with the block tables in use. For tests."""
        uses = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
        free = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            free.append(block_id)
            assert self._prev[self._next[block_id]] == block_id, f"broken link at block {block_id}"
            assert len(free) <= self.num_usable, "the free list is a cycle"
            block_id = self._next[block_id]
        assert len(free) == self.num_free, f"free list has {len(free)} blocks, num_free is {self.num_free}"
        assert len(free) + len(uses) == self.num_usable, f"{len(free)} free + {len(uses)} used != {self.num_usable}"
        for block_id in range(1, self.num_blocks):
            count = self.ref_count[block_id]
            assert count == uses[block_id], f"block {block_id}: ref_count {count}, table uses {uses[block_id]}"
        assert not set(free) & set(uses), "a block is free and in use"
        keys = {key: block_id for block_id, key in enumerate(self._key) if key is not None}
        assert keys == self._cached, "keys and the lookup table disagree"

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link_before(self, block_id: int, after: int) -> None:
        before = self._prev[after]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id] = before
        self._next[block_id] = after
        self.num_free += 1
        self.num_released += 1
