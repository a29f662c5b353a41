"""Metrics of a service with two gateways: through any of them, and through Ray."""

from __future__ import annotations

import re

import httpx
import ray
from cluster_processes import wait_for
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster import ray_metrics
from quire.cluster.metrics import metric_names

MODEL = "smollm2-135m-instruct"
Series = dict[tuple[str, str], float]  # value by name and by the gateway or engine that has counted


def series(text: str, prefix: str, model: str | None = None) -> Series:
    return {
        (
            sample.name.removeprefix(prefix),
            sample.labels.get("gateway") or sample.labels.get("engine", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix) and model in (None, sample.labels.get("model_name"))
    }


def scrape(service: str) -> Series:
    return series(httpx.get(f"{service}/metrics").text, "quire:")


def total(values: Series, name: str) -> float:
    return sum(value for (each, _), value in values.items() if each == name)


def through_ray() -> Series:
    [node] = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
    # Ray writes labels that no parser of Prometheus' format minds, and lines of its own that ours does.
    ours = [line for line in text.splitlines() if re.match(r"ray_quire_|# (HELP|TYPE) ray_quire_", line)]
    # It also remembers the services of other tests, whose model is another one.
    return series("\n".join(ours) + "\n", "ray_quire_", MODEL)


def test_any_gateway_and_ray_tell_the_same(service: str) -> None:
    """Requests go to both gateways; whichever is asked knows of all, once, and so does Ray."""
    before = total(scrape(service), "generation_tokens_total")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 5, "ignore_eos": True}

    def ask() -> None:
        assert httpx.post(f"{service}/v1/completions", json=body, timeout=60).status_code == 200

    for _ in range(8):
        ask()

    def all_is_told() -> bool:
        told = [scrape(service) for _ in range(6)]
        found = all(
            len({whose for name, whose in values if name == "request_generation_tokens_count"}) == 2
            and total(values, "request_generation_tokens_sum") >= 40
            for values in told
        )
        if not found:  # the proxy chooses: one gateway may have had all eight
            ask()
        return found

    wait_for(all_is_told, 30, lambda: str(scrape(service)))
    values = scrape(service)
    engines = {whose for name, whose in values if name == "generation_tokens_total"}
    assert len(engines) == 1
    assert total(values, "generation_tokens_total") >= before + 40
    assert {f"quire:{name}" for name, _ in values} <= metric_names()

    names = ("generation_tokens_total", "request_generation_tokens_sum", "time_to_first_token_seconds_count")
    wait_for(lambda: all(total(through_ray(), n) == total(scrape(service), n) for n in names), 40, lambda: "")
    assert {whose for name, whose in through_ray() if name == "generation_tokens_total"} == engines
    assert ray_metrics.ray_name("quire:num_requests_running") == "quire_num_requests_running"
    assert ("num_requests_running", next(iter(engines))) in through_ray()
