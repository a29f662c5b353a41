"""The service as `serve run` starts it from a configuration file: two gateways, one engine, and what survives its end.

Every test leaves the engines idle: running = waiting = 0 and no block in use.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from cluster_processes import processes, wait_for

ENGINE, GATEWAY = "ray::ServeReplica:quire:Engine", "ray::ServeReplica:quire:Gateway"
MODEL = "smollm2-135m-instruct"


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^quire:{name}{{.*}} (\S+)$", text, re.MULTILINE))


def is_idle(url: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "num_used_kv_blocks")
    return not any(metric(url, name) for name in names)


@pytest.fixture(autouse=True)
def leaves_engines_idle(service: str) -> Iterator[None]:
    yield
    wait_for(lambda: is_idle(service), 30, lambda: httpx.get(f"{service}/metrics").text)


def body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 48, "ignore_eos": True, **fields}


def stream(url: str, on_piece: object = None, **fields: object) -> str:
    """The text of a streamed completion, whole."""
    text = ""
    timeout = httpx.Timeout(120)
    with httpx.stream("POST", f"{url}/v1/completions", json=body(stream=True, **fields), timeout=timeout) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                if callable(on_piece):
                    on_piece()
    return text


def test_min_replicas_of_the_file_are_honoured(service: str) -> None:
    wait_for(lambda: len(processes(GATEWAY)) == 2, 30, lambda: processes("ray::"))
    assert len(processes(ENGINE)) == 1


def test_both_gateways_answer_alike(service: str) -> None:
    """The proxy spreads connections; whichever gateway takes one, the tokens are the same."""
    texts, gateways = set(), set()

    def both_answered() -> bool:
        texts.add(
            httpx.post(f"{service}/v1/completions", json=body(temperature=0), timeout=60).json()["choices"][0]["text"]
        )
        gateways.update(re.findall(r'gateway="(\w+)"', httpx.get(f"{service}/metrics").text))
        return len(gateways) == 2

    wait_for(both_answered, 60, lambda: gateways)
    assert len(texts) == 1


def test_fifty_streams_opened_and_closed_leave_nothing(service: str) -> None:
    for i in range(50):
        with httpx.stream(
            "POST", f"{service}/v1/completions", json=body(stream=True, max_tokens=500, seed=i), timeout=60
        ) as response:
            assert response.status_code == 200
            next(response.iter_lines())
    wait_for(lambda: is_idle(service), 30)


def test_streams_go_on_when_their_engine_is_killed(service: str) -> None:
    """kill -9 of the engine replica: Serve starts another one, and every stream ends as it would have."""
    kinds = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}]
    expected = [stream(service, **kind) for kind in kinds]
    (engine,) = processes(ENGINE)
    begun = threading.Barrier(len(kinds), action=engine.kill)
    results: dict[int, str] = {}

    def run(index: int) -> None:
        pieces = iter(range(10_000))

        def at_the_tenth_piece() -> None:
            if next(pieces) == 10:
                begun.wait(60)

        results[index] = stream(service, at_the_tenth_piece, **kinds[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [results.get(index) for index in range(len(kinds))] == expected
    assert engine.pid not in [process.pid for process in processes(ENGINE)]
    assert httpx.get(f"{service}/health").status_code == 200
