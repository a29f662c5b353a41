"""The router's benchmark runs, and what it is there to show holds: more hits, and no longer queues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cluster.bench.commands import app
from quire.cluster.bench.fleet import Fleet, Trace
from quire.cluster.bench.latency import Distribution
from quire.cluster.bench.router import COMPARED, cost
from quire.cluster.router import POLICIES, PolicyName


@pytest.mark.parametrize(
    ("trace", "margin"),
    [
        (Trace(duration_s=4.0, requests_per_s=40.0, turns=2), 0.1),
        # The first of 4 prefixes is used by half of all: every policy finds nearly everything.
        (Trace(duration_s=4.0, requests_per_s=40.0, groups_per_replica=1, turns=1), 0.005),
    ],
    ids=["many prefixes", "a hot prefix"],
)
def test_affinity_finds_more_and_nobody_waits_longer(trace: Trace, margin: float) -> None:
    arrivals = trace.arrivals(4, seed=1)
    fleets = {name: Fleet(4, POLICIES[name](), trace).play(arrivals) for name in COMPARED}
    queues = {name: Distribution.of_seconds(served.queue_s) for name, served in fleets.items()}
    affinity = fleets["prefix_affinity"]
    assert all(len(served.queue_s) == len(served.ttft_s) == len(arrivals) for served in fleets.values())
    others: list[PolicyName] = ["round_robin", "power_of_two"]
    for name in others:
        assert affinity.hit_rate > fleets[name].hit_rate + margin
        assert queues["prefix_affinity"].p99 <= queues[name].p99
    assert max(affinity.requests_by_replica) < 1.5 * len(arrivals) / 4


def test_a_trace_is_the_same_each_time_and_grows_with_the_fleet() -> None:
    trace = Trace(duration_s=5.0)
    assert trace.arrivals(3, seed=4) == trace.arrivals(3, seed=4)
    assert len(trace.arrivals(6, seed=4)) > 1.7 * len(trace.arrivals(3, seed=4))
    times = [when for when, _ in trace.arrivals(3, seed=4)]
    assert times == sorted(times)
    assert times[-1] < 5.0


def test_a_decision_is_a_matter_of_microseconds() -> None:
    """Bounds with a wide margin: what is measured goes into RESULTS.md."""
    found = cost(num_engines=64, num_prompt_tokens=4096, repeats=20)
    assert 0 < found.choose_unknown_us < 2000
    assert 0 < found.choose_known_us < 3000
    assert 0 < found.hash_us < 5000
    assert 0 < found.update_us < 50


def test_it_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = ["router", "--replicas", "1,2", "--duration-s", "1", "--rate", "10", "--json", str(path)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    result = json.loads(path.read_text())["result"]
    assert [(f["num_replicas"], f["policy"]) for f in result["fleets"]] == [(n, p) for n in (1, 2) for p in COMPARED]
    assert result["cost"]["num_engines"] == 64
    assert "prefix_affinity" in printed.output
