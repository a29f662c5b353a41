"""Exact block ids and eviction order of the pool."""

from __future__ import annotations

import pytest

from quire.engine.block_pool import BlockPool
from quire.engine.cache_history import CacheHistory


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, CacheHistory(num_blocks - 1))


def free_list(pool: BlockPool) -> list[int]:
    """Ids from the one that is evicted first."""
    ids, block_id = [], pool._next[0]
    while block_id:
        ids.append(block_id)
        block_id = pool._next[block_id]
    return ids


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = make_pool(6)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)


def test_empty_blocks_are_reused_before_cached_ones() -> None:
    pool = make_pool(6)
    blocks = pool.allocate(4)
    for block_id in blocks[:3]:
        pool.cache(block_id, bytes([block_id]))
    pool.release(reversed(blocks))
    # 4 was empty: first to go. 5 was never used. Of the cached ones the tail of the sequence goes first.
    assert free_list(pool) == [4, 5, 3, 2, 1]
    pool.check_integrity([])


def test_eviction_is_least_recently_used_and_forgets_the_content() -> None:
    pool = make_pool(4)
    first = pool.allocate(2)
    pool.cache(first[0], b"a")
    pool.cache(first[1], b"b")
    pool.release(reversed(first))
    pool.acquire([first[0]])
    pool.release([first[0]])
    assert free_list(pool) == [3, 2, 1]
    assert pool.allocate(2) == [3, 2]
    assert (pool.lookup(b"a"), pool.lookup(b"b"), pool.num_evictions) == (1, None, 1)


def test_a_cached_block_is_shared_and_freed_with_its_last_reference() -> None:
    pool = make_pool(4)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, b"a")
    pool.acquire([block_id])
    pool.release([block_id])
    assert pool.num_used == 1
    pool.check_integrity([[block_id]])
    pool.release([block_id])
    assert (pool.num_used, pool.lookup(b"a")) == (0, block_id)
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block_id])


def test_equal_content_is_cached_once() -> None:
    pool = make_pool(4)
    first, second = pool.allocate(2)
    assert pool.cache(first, b"a")
    assert not pool.cache(second, b"a")
    pool.release([second])
    assert free_list(pool) == [2, 3]
    pool.release([first])
    assert free_list(pool) == [2, 3, 1]


def test_reset_forgets_the_content_but_not_the_references() -> None:
    pool = make_pool(4)
    held, freed = pool.allocate(2)
    pool.cache(held, b"a")
    pool.cache(freed, b"b")
    pool.release([freed])
    pool.reset()
    assert (pool.lookup(b"a"), pool.lookup(b"b"), pool.num_used, pool.num_cached) == (None, None, 1, 0)
    pool.check_integrity([[held]])


@pytest.mark.parametrize("break_it", ["leak", "count", "key"])
def test_the_integrity_check_finds_faults(break_it: str) -> None:
    pool = make_pool(4)
    (block_id,) = pool.allocate(1)
    pool.cache(block_id, b"a")
    if break_it == "leak":
        tables: list[list[int]] = []
    elif break_it == "count":
        tables = [[block_id], [block_id]]
    else:
        tables = [[block_id]]
        pool._cached.clear()
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
