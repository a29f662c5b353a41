"""Which engine gets a request: the policies, on numbers alone."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_helpers import make_request

from quire.cluster.router import (
    FULL_CACHE_TOKENS,
    TIE_TOKENS,
    EngineSnapshot,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
)
from quire.engine.outputs import EngineRequest, SchedulerStats


def request(name: str = "r", session_id: str | None = None) -> EngineRequest:
    return make_request(name, [1] * 1000, session_id=session_id)


def engine(
    name: str,
    running: int = 0,
    queued_tokens: int = 0,
    hit_tokens: int = 0,
    *,
    usage: float = 0.0,
    recent: int = 0,
    recent_tokens: int = 0,
    uncomputed: int = 0,
) -> EngineSnapshot:
    stats = SchedulerStats(
        num_running=running,
        num_waiting_tokens=queued_tokens,
        num_uncomputed_tokens=uncomputed,
        num_blocks=100,
        num_used_blocks=round(100 * usage),
    )
    return EngineSnapshot(name, stats, num_recent=recent, num_recent_tokens=recent_tokens, num_hit_tokens=hit_tokens)


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([engine("a"), engine("b", hit_tokens=16)], "b"),
        ([engine("a", hit_tokens=512), engine("b", hit_tokens=528)], "b"),
        # A hit is worth twice what it saves, and not more.
        ([engine("a", queued_tokens=500), engine("b", queued_tokens=900, hit_tokens=208)], "b"),
        ([engine("a", queued_tokens=500), engine("b", queued_tokens=900, hit_tokens=192)], "a"),
        ([engine("a"), engine("b", uncomputed=600, hit_tokens=256)], "a"),
        ([engine("a"), engine("b", recent=1, recent_tokens=600, hit_tokens=256)], "a"),
        # Beyond 1.5 times the average and 4 requests, no hit counts: 17 > 16.75, 16 <= 16.
        ([engine("a"), engine("b", running=17, hit_tokens=960)], "a"),
        ([engine("a"), engine("b", running=16, hit_tokens=960)], "b"),
        ([engine("a", running=30), engine("b", running=40, hit_tokens=960)], "b"),
        # An engine without free blocks makes requests wait, whatever it holds.
        ([engine("a", usage=0.9), engine("b", usage=0.96, hit_tokens=960)], "a"),
        ([engine("a", usage=0.97), engine("b", usage=0.99, queued_tokens=1)], "a"),
        ([engine("a", queued_tokens=FULL_CACHE_TOKENS + 1), engine("b", usage=1.0)], "b"),
        # Without hits it is the load that counts.
        ([engine("a", running=3), engine("b", running=2), engine("c", running=4)], "b"),
    ],
)
def test_a_hit_counts_for_what_it_saves(engines: list[EngineSnapshot], chosen: str) -> None:
    assert PrefixAffinity().choose(request(), engines) == chosen


def test_a_prefix_that_all_requests_share_does_not_make_a_hot_spot() -> None:
    """One engine holds it, and whoever computes it holds it too: requests stay in balance, far beyond one engine."""
    held, running = {"e0"}, Counter({f"e{i}": 0 for i in range(8)})
    policy = PrefixAffinity()
    for i in range(800):
        snapshots = [
            engine(name, running=count, hit_tokens=960 if name in held else 0) for name, count in running.items()
        ]
        chosen = policy.choose(request(f"r{i}"), snapshots)
        held.add(chosen)
        running[chosen] += 1
        assert max(running.values()) <= 1.5 * (i + 1) / 8 + 5
    assert held == set(running)


def test_a_session_comes_back_to_its_engine_among_equals() -> None:
    policy, engines = PrefixAffinity(), [engine(f"e{i}") for i in range(8)]
    homes = {s: policy.choose(request("a", f"session {s}"), engines) for s in range(200)}
    assert homes == {s: policy.choose(request("b", f"session {s}"), engines) for s in range(200)}
    assert min(Counter(homes.values()).values()) > 10
    # Also where others are better by less than a session is worth, and when an engine that is not its own has left.
    busy = [engine(f"e{i}", queued_tokens=i * TIE_TOKENS // 8) for i in range(8)]
    assert homes == {s: policy.choose(request("c", f"session {s}"), busy) for s in range(200)}
    fewer = {s: policy.choose(request("d", f"session {s}"), engines[:-1]) for s in range(200)}
    assert all(fewer[s] == home for s, home in homes.items() if home != "e7")


def test_a_session_is_a_tie_break_and_no_more() -> None:
    policy = PrefixAffinity()
    for s in range(50):
        asked = request("r", f"session {s}")
        assert policy.choose(asked, [engine("a", queued_tokens=TIE_TOKENS + 1), engine("b")]) == "b"
        assert policy.choose(asked, [engine("a"), engine("b", hit_tokens=TIE_TOKENS // 2 + 1)]) == "b"


def test_without_a_session_requests_spread_over_equals() -> None:
    engines = [engine(f"e{i}") for i in range(4)]
    chosen = Counter(PrefixAffinity().choose(request(f"r{i}"), engines) for i in range(400))
    assert min(chosen.values()) > 60


def test_power_of_two_takes_the_less_loaded_of_a_pair() -> None:
    engines = [engine(f"e{i}", running=i) for i in range(6)]
    chosen = Counter(PowerOfTwo().choose(request(f"r{i}"), engines) for i in range(600))
    assert chosen["e5"] == 0  # it is never the better one
    assert chosen["e0"] > chosen["e2"] > chosen["e4"] > 0


def test_round_robin_goes_round() -> None:
    policy, engines = RoundRobin(), [engine("a", running=50), engine("b"), engine("c")]
    assert Counter(policy.choose(request(), engines) for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ([("a", 4, 0, 0, 0), ("b", 3, 0, 0, 0)], "b"),
        ([("a", 0, 2, 0, 0), ("b", 3, 0, 0, 0)], "b"),  # a waiting request weighs two
        ([("a", 1, 0, 2, 2), ("b", 2, 0, 0, 0)], "b"),  # what was sent since the report counts
        ([("a", 1, 0, 0, 1), ("b", 1, 0, 0, 0)], "b"),
        ([("b", 1, 0, 0, 0), ("a", 1, 0, 0, 0)], "a"),
    ],
)
def test_the_least_loaded_engine_is_chosen(engines: list[tuple[str, int, int, int, int]], chosen: str) -> None:
    snapshots = [
        EngineSnapshot(name, SchedulerStats(num_running=running, num_waiting=waiting), recent, own)
        for name, running, waiting, recent, own in engines
    ]
    assert LeastLoaded().choose(request(), snapshots) == chosen
