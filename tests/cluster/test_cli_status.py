"""`quire status` and `quire top` against a service and a dashboard that are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cluster import APPLICATIONS, FakeServer, deployment, details, fake_server

from quire.cluster import cli
from quire.cluster.cli_top import METRICS, EngineRow, frame_of
from quire.cluster.metrics import EngineStats, GatewayMetrics, metric_names
from quire.cluster.service_http import Service
from quire.engine.outputs import RequestReport, SchedulerStats

ENGINE = {"id": "e1", "status": "ok", "problem": None, "num_running": 3, "num_waiting": 1}
MODEL = {"id": "m", "status": "ok", "problem": None, "engines": [ENGINE]}
WELL = {"status": "ok", "models": [MODEL]}
LAME = {"id": "n", "status": "unhealthy", "problem": "No engine is connected.", "engines": []}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `quire ARGS...` in this process: status, stdout, stderr."""

    def run_command(*args: str) -> tuple[int, str, str]:
        monkeypatch.delenv("RAY_DASHBOARD_ADDRESS", raising=False)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["quire", *args])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, captured.out, captured.err

    return run_command


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()]


def test_a_healthy_service(server: FakeServer, run: Any) -> None:
    server.answers["/health"] = (200, WELL)
    status, out, err = run("status", "--url", f"{server.url}/v1")
    assert (status, err) == (0, "")
    assert rows(out) == [
        ["service", f"{server.url}:", "ok"],
        ["model", "engine", "status", "running", "waiting", "problem"],
        ["m", "e1", "ok", "3", "1"],
    ]


def test_a_service_that_is_scaled_to_zero_is_well(server: FakeServer, run: Any) -> None:
    asleep = {"id": "m", "status": "asleep", "problem": None, "engines": []}
    server.answers["/health"] = (200, {"status": "asleep", "models": [asleep]})
    server.answers["/metrics"] = [(200, metrics())] * 2
    code, out, _ = run("status", "--url", server.url)
    assert code == 0
    assert rows(out)[0] == ["service", f"{server.url}:", "asleep"]
    assert ["m", "asleep"] in rows(out)
    code, out, _ = run("top", "--once", "--interval", "0.2", "--url", server.url)
    assert (code, rows(out)[0]) == (0, [server.url, "asleep", "asleep:", "m"])


@pytest.mark.parametrize(("http_status", "status"), [(200, "degraded"), (503, "unhealthy")])
def test_a_service_that_is_not_all_well(server: FakeServer, run: Any, http_status: int, status: str) -> None:
    server.answers["/health"] = (http_status, {"status": status, "models": [MODEL, LAME]})
    code, out, _ = run("status", "--url", server.url)
    assert code == 1
    assert ["n", "unhealthy", "No", "engine", "is", "connected."] in rows(out)


def test_no_service_is_said_in_one_line(run: Any) -> None:
    code, out, err = run("status", "--url", "127.0.0.1:1")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "service http://127.0.0.1:1: unreachable"
    assert "no service answers at http://127.0.0.1:1" in out


def test_what_is_not_quire(server: FakeServer, run: Any) -> None:
    server.answers["/health"] = (200, "ok")
    code, out, _ = run("status", "--url", server.url)
    assert code == 1
    assert f"what answers at {server.url}/health (200) is not Quire" in out


def test_cluster_and_service_as_json(server: FakeServer, run: Any) -> None:
    server.answers["/health"] = (200, WELL)
    server.answers[APPLICATIONS] = (200, details("RUNNING", deployment("Engine", running=2, target=2)))
    code, out, _ = run("status", "--url", server.url, "--address", server.url, "--json", "--api-key", "k")
    assert code == 0
    report = json.loads(out)
    assert report["healthy"]
    assert report["service"]["models"] == [MODEL]
    engine = {"name": "Engine", "status": "HEALTHY", "replicas": 2, "target_replicas": 2, "problem": None}
    assert report["cluster"]["applications"] == [{"name": "quire", "status": "RUNNING", "deployments": [engine]}]
    assert server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (details("DEPLOYING", deployment("Engine", "UPDATING", running=0)), "quire DEPLOYING Engine UPDATING 0/1"),
        (details("UNHEALTHY", deployment("Engine", "UNHEALTHY", message="died")), "UNHEALTHY 1/1 died"),
        (
            details("RUNNING", deployment("Engine"), proxy="UNHEALTHY"),
            "No HTTP proxy is healthy (UNHEALTHY on 10.0.0.1).",
        ),
        ({"applications": {}}, "Nothing is deployed."),
    ],
)
def test_a_cluster_that_is_not_well(server: FakeServer, run: Any, answer: dict[str, Any], said: str) -> None:
    server.answers[APPLICATIONS] = (200, answer)
    code, out, _ = run("status", "--address", server.url)
    assert code == 1
    assert said in " ".join(out.split())
    assert "service" not in out  # only what was asked
    assert run("status", "--address", "127.0.0.1:1")[0] == 1


# top


def metrics(**stats: SchedulerStats) -> str:
    """What /metrics tells of engines, from the code that a gateway runs."""
    engines = [EngineStats(engine, "m", its) for engine, its in stats.items()]
    return GatewayMetrics("g1").render(engines).decode()


BEFORE = SchedulerStats(num_generation_tokens=100, num_prompt_tokens=10, prefix_cache_queries=10)
AFTER = SchedulerStats(
    num_running=3, num_waiting=2, num_blocks=8, num_used_blocks=2, num_generation_tokens=200, num_prompt_tokens=60,
    prefix_cache_queries=60, prefix_cache_hits=20, num_preemptions=4,
)  # fmt: skip


def samples(server: FakeServer, text: str) -> Any:
    server.answers["/metrics"] = (200, text)
    return Service(server.url).samples()


def test_a_frame_is_the_difference_of_two_scrapes(server: FakeServer) -> None:
    frame = frame_of(samples(server, metrics(e1=AFTER, e2=AFTER)), samples(server, metrics(e1=BEFORE)), 2.0)
    assert frame.rows == (
        EngineRow("m", "e1", 3, 2, AFTER.kv_cache_usage, 20 / 50, 50.0, 25.0, 4),
        EngineRow("m", "e2", 3, 2, AFTER.kv_cache_usage, 20 / 60, 0.0, 0.0, 4),  # new: its past is not its rate
    )
    assert AFTER.kv_cache_usage == 0.25


def test_a_counter_that_began_anew_is_no_negative_rate(server: FakeServer) -> None:
    frame = frame_of(samples(server, metrics(e1=BEFORE)), samples(server, metrics(e1=AFTER)), 2.0)
    (row,) = frame.rows
    assert (row.generation_rate, row.prompt_rate, row.hit_rate) == (0.0, 0.0, 0.0)
    assert frame_of(samples(server, metrics(e1=SchedulerStats())), {}, 2.0).rows[0].hit_rate is None


def test_every_metric_that_is_shown_exists() -> None:
    assert set(METRICS) <= metric_names()


def test_causes_are_told_apart(server: FakeServer) -> None:
    gateway = GatewayMetrics("g1")
    for waited in ({"KV_BLOCKS": 1.5}, {"KV_BLOCKS": 1.0, "GRAMMAR": 4.0}):
        gateway.start("m", 1).reported(RequestReport(wall_s=9.0, compute_s=0.5, wait_s=waited))
    engines = [
        EngineStats(engine, "m", SchedulerStats(num_waiting_by_cause=causes))
        for engine, causes in {"e1": {"KV_BLOCKS": 2, "GRAMMAR": 5}, "e2": {"KV_BLOCKS": 1, "LORA_SLOT": 0}}.items()
    ]
    found = samples(server, gateway.render(engines).decode())
    frame = frame_of(found, found, 1.0)
    assert list(frame.causes.items()) == [("GRAMMAR", 5), ("KV_BLOCKS", 3)]
    assert list(frame.waited.items()) == [("GRAMMAR", 4.0), ("KV_BLOCKS", 2.5)]


def test_one_frame(server: FakeServer, run: Any) -> None:
    server.answers["/health"] = (200, WELL)
    server.answers["/metrics"] = [(200, metrics(e1=BEFORE)), (200, metrics(e1=AFTER))]
    code, out, err = run("top", "--once", "--interval", "0.2", "--url", server.url)
    assert (code, err) == (0, "")
    lines = rows(out)
    assert lines[0] == [server.url, "ok"]
    assert lines[1][:6] == ["engines", "1", "running", "3", "waiting", "2"]
    assert lines[3] == ["model", "engine", "run", "wait", "KV", "cache", "hits", "out/s", "in/s", "preempt"]
    assert lines[4][:7] == ["m", "e1", "3", "2", "██········", "25%", "40%"]
    assert 0 < float(lines[4][7]) <= 500  # 100 tokens in 0.2 s and a little, or more on a busy machine


def test_top_without_a_service_is_one_line(server: FakeServer, run: Any) -> None:
    code, out, err = run("top", "--url", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("quire: url: no service answers at http://127.0.0.1:1 (")
    assert err.count("\n") == 1
    server.answers["/metrics"] = (200, "<html>")
    assert run("top", "--url", server.url)[0] == 1
