"""Why a prefix missed, what a larger cache would have kept, and what a router is told."""

from __future__ import annotations

from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor

from quire.engine.cache_history import BlockRemoved, BlockStored, CacheCleared
from quire.engine.outputs import RequestReport


def told(collector: object, request_id: str) -> RequestReport:
    return collector.ends[request_id].report  # type: ignore[attr-defined,no-any-return]


def test_first_misses_are_explained() -> None:
    now = [0.0]
    core = make_core(FakeExecutor(num_blocks=6), max_model_len=20, clock=lambda: now[0])
    prompt = list(range(12))
    assert told(run(core, [make_request("new", prompt, 1)]), "new").first_miss == "never_seen"
    assert told(run(core, [make_request("again", prompt, 1)]), "again").first_miss is None
    longer = told(run(core, [make_request("longer", [*prompt, 49], 1)]), "longer")
    assert (longer.first_miss, longer.num_cached_tokens) == ("too_short", 12)
    salted = told(run(core, [make_request("salted", prompt, 1, cache_salt="s")]), "salted")
    assert (salted.first_miss, salted.num_cached_tokens) == ("salt_differs", 0)
    now[0] = 10.0
    run(core, [make_request("evicts", [40] * 19, 1)])  # all 5 blocks
    now[0] = 25.0
    missed = told(run(core, [make_request("late", prompt, 1)]), "late")
    assert (missed.first_miss, missed.first_miss_evicted_s) == ("evicted", 15.0)


def test_ghost_hits_tell_what_twice_the_cache_would_have_kept() -> None:
    core = make_core(FakeExecutor(num_blocks=6), max_model_len=20)
    prompts = [[i] * 17 for i in range(2)]  # each fills the pool
    for i in range(6):
        run(core, [make_request(f"r{i}", prompts[i % 2], 1)])
    stats = core.stats()
    assert stats.prefix_cache_hits == 0
    # Each finds the 4 full blocks of its turn before last among the ghosts, from its second turn on.
    assert stats.prefix_cache_ghost_hits == 4 * 16
    assert stats.prefix_cache_queries == 6 * 17


def test_events_say_what_can_be_reused() -> None:
    core = make_core(FakeExecutor(num_blocks=6), max_model_len=20)
    run(core, [make_request("before", [9] * 8, 1)])
    core.subscribe_kv_events()
    assert core.take_kv_events() == []
    run(core, [make_request("a", list(range(8)), 1)])
    events = core.take_kv_events()
    assert [type(event) for event in events] == [BlockStored, BlockStored]
    stored = [event.key for event in events if isinstance(event, BlockStored)]
    run(core, [make_request("b", [40] * 19, 1)])
    later = core.take_kv_events()
    assert {event.key for event in later if isinstance(event, BlockRemoved)} >= set(stored)
    core.reset_prefix_cache()
    assert core.take_kv_events() == [CacheCleared()]
