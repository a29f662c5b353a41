"""Exact tables, prefix hits and hashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor

from quire.engine.block_hash import ROOT, group_scope, hash_block, hash_scope
from quire.engine.kv_cache_groups import FullAttention, SlidingWindow, common_hit_length
from quire.engine.kv_cache_manager import KVCacheManager
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec, block_bytes, group_layers, shared_layers
from quire.engine.outputs import MediaSpan
from quire.engine.request import Request


def manager(windows: tuple[int | None, ...] = (None,), num_blocks: int = 20) -> KVCacheManager:
    specs = [KVCacheSpec(4, 1, 1, 1, window) for window in windows]
    return KVCacheManager(KVCacheConfig(num_blocks, 4, group_layers(specs)), 4, True)


def admit(kv: KVCacheManager, row: int, prompt: list[int]) -> Request:
    request = Request(make_request(f"r{row}", prompt), row, 0, 1000)
    request.row = row
    hit = kv.find_prefix(request)
    kv.admit(row, hit)
    kv.grow(row, hit.num_blocks * 4, kv.num_blocks_for(len(prompt)))
    kv.commit(request, len(prompt))
    return request


def test_a_prefix_is_shared_block_by_block() -> None:
    kv = manager()
    admit(kv, 0, list(range(10)))
    admit(kv, 1, [*range(8), 99, 98])
    assert kv.tables(0) == ([1, 2, 3],)
    assert kv.tables(1) == ([1, 2, 4],)
    kv.free(0)
    kv.check_integrity()
    # The partly filled block 3 holds nothing that could be found: it goes to the head of the free list.
    assert kv.pool.allocate(1) == [3]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    kv = manager(num_blocks=4)
    admit(kv, 0, list(range(12)))
    kv.free(0)
    assert kv.pool.allocate(2) == [3, 2]
    assert kv.find_prefix(Request(make_request("r", list(range(12))), 1, 0, 1000)).block_ids == ([1],)


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    kv = manager()
    admit(kv, 0, list(range(8)))
    same = Request(make_request("s", list(range(8))), 1, 0, 1000)
    assert kv.find_prefix(same).block_ids == ([1],)
    longer = Request(make_request("l", list(range(9))), 1, 0, 1000)
    assert kv.find_prefix(longer).block_ids == ([1, 2],)


def test_a_block_is_found_only_behind_the_same_prefix() -> None:
    kv = manager()
    admit(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    other = Request(make_request("o", [9, 2, 3, 4, 5, 6, 7, 8, 0]), 1, 0, 1000)
    assert kv.find_prefix(other).num_blocks == 0


def test_only_requests_that_agree_in_lora_and_media_share_blocks() -> None:
    prompt = list(range(13))
    image = (MediaSpan(5, 2, b"image"),)
    variants: dict[str, dict[str, object]] = {
        "plain": {},
        "lora": {"lora_id": "a"},
        "image": {"media": image},
        "other image": {"media": (MediaSpan(5, 2, b"other"),)},
        "moved image": {"media": (MediaSpan(6, 2, b"image"),)},
        "both": {"lora_id": "a", "media": image},
    }
    cached = {}
    core = make_core()
    for name, fields in variants.items():
        first = run(core, [make_request(name, prompt, 1, **fields)]).ends[name]
        again = run(core, [make_request(f"{name} again", prompt, 1, **fields)]).ends[f"{name} again"]
        cached[name] = (first.num_cached_tokens, again.num_cached_tokens)
    # The block before the image is the same with and without it.
    assert cached == {
        "plain": (0, 12),
        "lora": (0, 12),
        "image": (4, 12),
        "other image": (4, 12),
        "moved image": (4, 12),
        "both": (4, 12),
    }


def test_growth_is_all_or_nothing() -> None:
    kv = manager((None, 6), num_blocks=8)
    admit(kv, 0, list(range(8)))  # 2 blocks in each of 2 groups
    assert kv.grow(0, 8, 4) is None
    assert kv.tables(0) == ([1, 2], [3, 4])
    updates = kv.grow(0, 8, 3)
    assert updates is not None
    assert [(u.group, u.offset, u.block_ids) for u in updates] == [(0, 2, [5]), (1, 2, [6])]


def test_a_window_leaves_blocks_behind() -> None:
    kv = manager((6,))
    admit(kv, 0, list(range(12)))
    kv.grow(0, 12, 4)  # position 12 attends to 7 and later: block 0 (positions 0 to 3) is not needed any more
    assert kv.tables(0) == ([0, 2, 3, 4],)
    kv.grow(0, 17, 5)  # position 17 attends to 12 and later
    assert kv.tables(0) == ([0, 0, 0, 4, 5],)
    kv.check_integrity()
    kv.free(0)
    assert kv.pool.num_used == 0


def test_a_prefix_hit_for_a_window_needs_only_the_window() -> None:
    kv = manager((6,))
    admit(kv, 0, list(range(20)))
    for block_id in (1, 2):
        kv.pool._cached.pop(kv.pool._key[block_id])  # type: ignore[arg-type]
        kv.pool._key[block_id] = None
    longer = Request(make_request("l", list(range(18))), 1, 0, 1000)
    hit = kv.find_prefix(longer)
    # 4 blocks are 16 tokens; token 16 attends to 11 .. 15, which lie in blocks 2 and 3.
    assert (hit.num_blocks, hit.block_ids) == (4, ([0, 0, 3, 4],))


@pytest.mark.parametrize(
    ("cached", "expected"),
    [({0, 1, 2, 3}, 4), ({0, 1, 2}, 3), ({2, 3}, 4), ({1, 3}, 0), ({1, 2}, 3), ({3}, 0), (set(), 0), ({0}, 1)],
)
def test_window_hit_lengths(cached: set[int], expected: int) -> None:
    # block_size 4, window 6: a prefix of n blocks needs blocks n - 2 and n - 1 (or block 0 alone for n = 1).
    assert SlidingWindow(4, 6).hit_length(4, cached.__contains__) == expected


def test_groups_agree_on_the_longest_common_hit() -> None:
    policies = (FullAttention(4), SlidingWindow(4, 6))
    cached = [{0, 1, 2, 3, 4}, {0, 1, 3}]
    # Full attention allows 5; the window allows 2 below that (blocks 0 and 1), because 2 and 4 are missing.
    assert common_hit_length(policies, 6, lambda group, index: index in cached[group]) == 2


def test_hashes_are_the_same_in_every_process() -> None:
    code = (
        "from quire.engine.block_hash import ROOT, group_scope, hash_block, hash_scope;"
        "print(hash_block(ROOT, [1, 2, 3]).hex(), group_scope(hash_scope('salt'), 3).hex())"
    )
    printed = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert printed == {f"{hash_block(ROOT, [1, 2, 3]).hex()} {group_scope(hash_scope('salt'), 3).hex()}\n"}


def test_hashes_depend_on_everything_that_matters() -> None:
    hashes = {
        hash_block(ROOT, [1, 2]),
        hash_block(ROOT, [2, 1]),
        hash_block(ROOT, [1, 2], b"image"),
        hash_block(hash_block(ROOT, [1, 2]), [1, 2]),
    }
    assert len(hashes) == 4
    scopes = {hash_scope(), hash_scope("a"), hash_scope(None, "a"), hash_scope(""), hash_scope("a", "a")}
    assert len(scopes) == 5
    assert {len(group_scope(scope, 1)) for scope in scopes} == {17}


def test_windowed_layers_are_grouped_by_the_number_of_full_ones() -> None:
    """5 windowed layers for each full one: a block is as large as two layers, not ten."""
    window, full = KVCacheSpec(4, 1, 8, 4, sliding_window=6), KVCacheSpec(4, 1, 8, 4)
    specs = [full if layer % 6 == 5 else window for layer in range(12)]
    groups = group_layers(specs)
    assert [group.layer_indices for group in groups] == [(0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11)]
    assert shared_layers(groups, range(12)) == [[0, 2, 4, 7, 9, 5], [1, 3, 6, 8, 10, 11]]
    assert block_bytes(specs) == 2 * full.block_bytes


def test_stages_share_tables_but_no_memory() -> None:
    """On two stages a block is as large as one layer on each, with as many groups as on one stage."""
    window, full = KVCacheSpec(4, 1, 8, 4, sliding_window=6), KVCacheSpec(4, 1, 8, 4)
    specs = [full if layer % 6 == 5 else window for layer in range(12)]
    groups = group_layers(specs, num_stages=2)
    assert [group.layer_indices for group in groups] == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]
    assert shared_layers(groups, range(6)) == [[0, 1, 2, 3, 4, 5]]
    assert shared_layers(groups, range(6, 12)) == [[6, 7, 8, 9, 10, 11]]
    assert [block_bytes(specs, 2, stage) for stage in range(2)] == [full.block_bytes] * 2


def test_stages_of_different_layers() -> None:
    """3 + 2 + 2 layers; the last stage has no full one, so its windowed layers are dealt to the groups there are."""
    window, full = KVCacheSpec(4, 1, 8, 4, sliding_window=6), KVCacheSpec(4, 1, 8, 4)
    specs = [window, window, full, full, window, window, window]
    groups = group_layers(specs, num_stages=3)
    assert [group.layer_indices for group in groups] == [(0, 4, 5), (1, 6), (2, 3)]
    assert [shared_layers(groups, layers) for layers in (range(3), range(3, 5), range(5, 7))] == [
        [[0, 1, 2]],
        [[4, 3]],
        [[5, 6]],
    ]
    assert [group.layer_indices for group in group_layers([full] * 5, 2)] == [(0, 1, 2, 3, 4)]
    assert [block_bytes([full] * 5, 2, stage) for stage in range(2)] == [3 * full.block_bytes, 2 * full.block_bytes]


def test_windowed_layers_fewer_than_full_ones_are_one_group() -> None:
    window, full = KVCacheSpec(4, 1, 8, 4, sliding_window=6), KVCacheSpec(4, 1, 8, 4)
    assert [group.layer_indices for group in group_layers([full, full, window])] == [(0, 1), (2,)]
    assert [group.layer_indices for group in group_layers([window] * 3)] == [(0, 1, 2)]


def test_a_windowed_prefix_can_be_found_at_every_block_of_a_chunked_prompt() -> None:
    """Blocks are made findable before the window leaves them behind."""
    for shared in range(8, 64, 4):
        core = make_core(FakeExecutor(windows=(8,), num_blocks=100), max_num_batched_tokens=24)
        prompt = list(range(49)) * 2
        run(core, [make_request("a", prompt[:90], 1)])
        collector = run(core, [make_request("b", [*prompt[:shared], 49, 49, 49], 1)])
        assert collector.ends["b"].num_cached_tokens == shared
