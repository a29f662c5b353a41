"""API keys on a real service with two gateways, from a config file: HTTP and gRPC, limits shared, keys changed live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from live_service import run_service

from quire.cluster.config import GRPC_SERVICER
from quire.cluster.grpc import quire_inference_pb2 as pb
from quire.cluster.grpc.quire_inference_pb2_grpc import InferenceStub
from quire.cluster.ray_local import free_ports

MODEL = "smollm2-135m-instruct"
FREE, LIMITED = "sk-free-12345", "sk-limited-123"
TENANTS: list[dict[str, Any]] = [
    {"name": "free", "key": FREE, "weight": 2},
    {"name": "limited", "key": LIMITED, "requests_per_minute": 8},
]


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(json.dumps({"tenants": TENANTS}))
    return path


@pytest.fixture(scope="module")
def keyed_ports() -> list[int]:
    """For HTTP and for gRPC."""
    return free_ports(2)


@pytest.fixture(scope="module")
def keyed_url(
    keys_file: Path, keyed_ports: list[int], repo_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    config = yaml.safe_load((repo_root / "configs/smollm2-cpu.yaml").read_text())
    http, grpc_port = keyed_ports
    config["http_options"]["port"] = http
    config["grpc_options"] = {"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]}
    [application] = config["applications"]
    application["args"] |= {
        "api": {"keys_file": str(keys_file), "open_metrics": False},
        "cache": {"num_kv_blocks": 1024},  # quickly filled
    }
    application["deployments"][0]["autoscaling_config"]["min_replicas"] = 2
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    with run_service(folder / "log", str(folder / "service.yaml")):
        yield f"http://127.0.0.1:{http}"


def ask(url: str, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def test_who_gets_in(keyed_url: str, keyed_ports: list[int]) -> None:
    assert ask(keyed_url, FREE).status_code == 200
    for key, code in ((None, None), ("sk-unknown-1", "invalid_api_key")):
        for streamed in (False, True):
            refused = ask(keyed_url, key, stream=streamed)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, code)
    assert httpx.get(f"{keyed_url}/health").status_code == 200
    assert httpx.get(f"{keyed_url}/metrics").status_code == 401
    assert httpx.get(f"{keyed_url}/metrics", headers={"authorization": f"Bearer {FREE}"}).status_code == 200
    with grpc.insecure_channel(f"127.0.0.1:{keyed_ports[1]}") as channel:
        stub = InferenceStub(channel)
        request = pb.GenerateRequest(model=MODEL, prompt="a", max_tokens=1)
        assert list(stub.Generate(request, metadata=(("authorization", f"Bearer {FREE}"),)))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_two_gateways_grant_one_limit(keyed_url: str) -> None:
    """8 a minute, whichever gateway answers: each grants its half, and refills a little meanwhile."""
    answers = [ask(keyed_url, LIMITED) for _ in range(24)]
    granted = sum(answer.status_code == 200 for answer in answers)
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 6 <= granted <= 12
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert ask(keyed_url, FREE).status_code == 200


def test_keys_change_while_the_service_runs(keyed_url: str, keys_file: Path) -> None:
    keys_file.write_text(json.dumps({"tenants": [{"name": "free", "key": "sk-changed-1"}]}))
    deadline = time.monotonic() + 10
    while not all(ask(keyed_url, "sk-changed-1").status_code == 200 for _ in range(6)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [ask(keyed_url, FREE).status_code for _ in range(6)] == [401] * 6
