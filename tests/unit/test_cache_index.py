"""What a gateway knows of the engines' caches, compared with what the engines' own lookup says."""

from __future__ import annotations

import random

import msgspec
import pytest
from engine_helpers import make_core, make_request
from fake_executor import FakeExecutor

from quire.cluster.cache_index import EXPECT_S, CacheIndex
from quire.cluster.prefix_keys import CacheLayout, PromptKeys, number_of, pack, unpack
from quire.engine.block_hash import group_scope, hash_prompt, hash_scope
from quire.engine.cache_history import BlockRemoved, BlockStored
from quire.engine.core import EngineCore
from quire.engine.outputs import EngineRequest, MediaSpan
from quire.engine.request import Request

LAYOUT = CacheLayout(4, (None,))


def layout_of(core: EngineCore) -> CacheLayout:
    config = core.scheduler.kv_cache.config
    return CacheLayout(config.block_size, tuple(group.spec.sliding_window for group in config.groups))


def take_events(index: CacheIndex, engine_id: str, core: EngineCore) -> None:
    stored, removed = [], []
    for event in core.take_kv_events():
        if isinstance(event, BlockStored):
            index.update(engine_id, [number_of(event.key)], [])
        elif isinstance(event, BlockRemoved):
            index.update(engine_id, [], [number_of(event.key)])
        else:
            index.clear(engine_id)
    index.update(engine_id, stored, removed)


def hit_of(core: EngineCore, request: EngineRequest) -> int:
    """Tokens that the engine itself would find."""
    kv_cache = core.scheduler.kv_cache
    return kv_cache.find_prefix(Request(request, 0, 0, 500)).num_blocks * kv_cache.block_size


@pytest.mark.parametrize("windows", [(None,), (None, 10), (7,), (None, 5, 17), (16, 4, 9)])
def test_hits_are_those_of_the_engines(windows: tuple[int | None, ...]) -> None:
    """Random prompts with common prefixes, salts and LoRAs on three small caches that evict all the time."""
    rng = random.Random(repr(windows))
    cores = {f"e{i}": make_core(FakeExecutor(windows, 4, 40), max_model_len=120) for i in range(3)}
    index = CacheIndex()
    for engine_id, core in cores.items():
        core.subscribe_kv_events()
        index.reset(engine_id, layout_of(core), [])
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    hits = 0
    for i in range(150):
        prompt = rng.choice(stems)[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        fields = {"cache_salt": rng.choice([None, None, "s"]), "lora_id": rng.choice([None, None, "l"])}
        request = make_request(f"r{i}", prompt, rng.randrange(1, 6), **fields)
        expected = {engine_id: n for engine_id, core in cores.items() if (n := hit_of(core, request))}
        assert index.hits(PromptKeys(request), cores) == expected
        hits += bool(expected)
        engine_id, core = rng.choice(list(cores.items()))
        core.add_request(request)
        while core.has_work:
            core.step()
            if rng.random() < 0.02:
                core.reset_prefix_cache()
            take_events(index, engine_id, core)
    assert hits > 20  # else the comparison says nothing
    for engine_id in cores:
        index.forget(engine_id)
    assert (index.num_entries, index._engines) == (0, {})


def test_numbers_know_scope_group_and_media() -> None:
    request = make_request("r", list(range(40)))
    groups = CacheLayout(4, (None, 8))
    seen = set()
    for fields in (
        {},
        {"cache_salt": "s"},
        {"lora_id": "s"},
        {"media": (MediaSpan(0, 3, b"x" * 32),)},
        {"media": (MediaSpan(1, 3, b"x" * 32),)},
    ):
        numbers = PromptKeys(msgspec.structs.replace(request, **fields)).of(groups)
        assert [len(group) for group in numbers] == [9, 9]  # the block of the last token does not count
        seen |= {number for group in numbers for number in group}
    assert len(seen) == 5 * 18
    # The same as from the keys that engines tell.
    scope = hash_scope("s", None)
    keys = [h + group_scope(scope, 1) for h in hash_prompt(request.prompt_token_ids, 9, 4)]
    salted = PromptKeys(msgspec.structs.replace(request, cache_salt="s"))
    assert salted.of(groups)[1] == [number_of(key) for key in keys]


def test_numbers_travel() -> None:
    numbers = [0, 1, 2**64 - 1, 77]
    assert list(unpack(pack(numbers))) == numbers
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"1234567")


def prompts(count: int, num_blocks: int = 10) -> list[PromptKeys]:
    rng = random.Random(count)
    length = 4 * num_blocks + 1
    return [PromptKeys(make_request(f"r{i}", [rng.randrange(50_000) for _ in range(length)])) for i in range(count)]


def test_memory_is_bounded_and_what_is_left_is_true() -> None:
    index, many = CacheIndex(max_entries=500), prompts(200)
    for engine_id in ("a", "b"):
        index.reset(engine_id, LAYOUT, [])
    for i, prompt in enumerate(many):
        index.update("ab"[i % 2], prompt.of(LAYOUT)[0], [])
        assert index.num_entries == sum(map(len, index._blocks.values())) <= 500
    assert 250 <= len(index._engines) <= 500  # a quarter of 2,000
    found = [index.hits(prompt, ["a", "b"]) for prompt in many]
    assert all(set(hit) <= {"ab"[i % 2]} for i, hit in enumerate(found))
    lengths = [max(hit.values(), default=0) for hit in found]
    assert 20 < sum(lengths) / len(many) < 40  # of 40 tokens: the last block that is kept
    for i, prompt in enumerate(many):
        index.update("ab"[i % 2], [], prompt.of(LAYOUT)[0])
    assert (index.num_entries, index._engines) == (0, {})


def test_bits_of_engines_that_left_are_used_again() -> None:
    index, (prompt,) = CacheIndex(), prompts(1)
    for i in range(200):
        index.reset(f"e{i}", LAYOUT, prompt.of(LAYOUT)[0])
        assert index.hits(prompt, [f"e{i}", f"e{i - 1}"]) == {f"e{i}": 40}
        index.forget(f"e{i}")
        index.forget(f"e{i}")
    assert (index._bits, index._engines) == ({}, {})


def test_engines_with_other_blocks_are_asked_in_theirs() -> None:
    index, (prompt,) = CacheIndex(), prompts(1)
    other = CacheLayout(8, (None,))
    index.reset("a", LAYOUT, prompt.of(LAYOUT)[0][:3])
    index.reset("b", other, prompt.of(other)[0][:3])
    assert index.layouts() == {LAYOUT, other}
    assert index.hits(prompt, ["a", "b", "unknown"]) == {"a": 12, "b": 24}
    assert index.hits(prompt, ["b"]) == {"b": 24}


def test_what_was_sent_is_expected_for_a_while() -> None:
    now = 0.0
    index, (prompt,) = CacheIndex(clock=lambda: now), prompts(1)
    index.reset("a", LAYOUT, [])
    index.expect("unknown", prompt)
    index.expect("a", prompt)
    assert index.hits(prompt, ["a"]) == {"a": 40}
    now = EXPECT_S + 1
    index.expect("a", prompts(2, 2)[0])  # a new generation begins; the one before still counts
    assert index.hits(prompt, ["a"]) == {"a": 40}
    now = 2 * EXPECT_S + 2
    index.expect("a", prompts(2, 2)[0])
    assert index.hits(prompt, ["a"]) == {}
    index.expect("a", prompt)
    index.forget("a")
    index.reset("b", LAYOUT, [])  # has its bit
    assert index.hits(prompt, ["b"]) == {}
