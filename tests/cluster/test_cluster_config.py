"""Configuration files: what is right is loaded, what is wrong is named with its line and the nearest right key."""

# ruff: noqa: E501 (a table of messages is read by the row)

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from quire.cluster import placement
from quire.cluster.app import CPU_STEP_TOKENS, bind, settled
from quire.cluster.autoscaling import EngineLoadPolicy
from quire.cluster.config import QuireConfig, override
from quire.cluster.config_file import ServiceConfig, load_service
from quire.cluster.config_template import config_template
from quire.cluster.ray_executor import _with_device
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
http_options:
  port: 9000
applications:
  - name: quire
    import_path: quire.cluster.app:build
    args:
      model: {model: smollm2-135m-instruct, device: cpu}
      scheduler:
        max_num_seqs: 16
      api:
        failover_timeout_s: 5
    deployments:
      - name: Gateway
        autoscaling_config:
          min_replicas: 2
          max_replicas: 4
      - name: Engine
        num_replicas: 1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.yaml"


def test_a_good_file(path: Path) -> None:
    path.write_text(GOOD)
    service = load_service(path)
    assert (service.host, service.port, service.application) == ("127.0.0.1", 9000, "quire")
    assert service.quire.scheduler.max_num_seqs == 16
    assert service.quire.api.failover_timeout_s == 5
    assert service.deployments == {
        "Gateway": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 4}},
        "Engine": {"num_replicas": 1},
    }


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("max_num_seqs:", "max_num_seq:", "9: there is no key 'args.scheduler.max_num_seq'. Did you mean 'max_num_seqs'?"),
        ("scheduler:", "shceduler:", "8: there is no key 'args.shceduler'. Did you mean 'scheduler'?"),
        ("device: cpu", "devise: cpu", "7: there is no key 'args.model.devise'. Did you mean 'device'?"),
        ("device: cpu", "device: tpu", "7: args.model.device: Input should be 'auto', 'cpu' or 'cuda', got 'tpu'."),
        ("min_replicas:", "min_replica:", "15: there is no key 'applications.deployments.autoscaling_config.min_replica'. Did you mean 'min_replicas'?"),
        ("max_replicas: 4", "max_replicas: 1", "15: autoscaling_config: max_replicas (1) must be greater than or equal to min_replicas (2)."),
        ("min_replicas: 2", "min_replicas: -1", "15: autoscaling_config.min_replicas: Input should be greater than or equal to 0, got -1."),
        ("num_replicas:", "num_replica:", "18: there is no key 'applications.deployments.num_replica'. Did you mean 'num_replicas'?"),
        ("http_options:", "http_option:", "1: there is no key 'http_option'. Did you mean 'http_options'?"),
        ("name: Engine", "name: Engines", "17: there is no deployment 'Engines'. Did you mean 'Engine'?"),
        ("max_num_seqs: 16", "max_num_seqs: 0", "9: args.scheduler.max_num_seqs: Input should be greater than or equal to 1, got 0."),
        ("max_num_seqs: 16", "max_num_seqs: many", "9: args.scheduler.max_num_seqs: Input should be a valid integer, unable to parse string as an integer, got 'many'."),
        ("port: 9000", "port: x", "2: http_options.port: Input should be a valid integer, unable to parse string as an integer, got 'x'."),
    ],
)  # fmt: skip
def test_a_mistake_has_its_line_and_the_right_key(path: Path, right: str, wrong: str, said: str) -> None:
    assert GOOD.count(right) == 1
    path.write_text(GOOD.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        load_service(path)
    assert caught.value.message == f"{path}:{said}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", ":1: not YAML"),
        ("- 1", ": must hold a mapping"),
        ("applications: []", ": needs exactly one application with import_path: quire.cluster.app:build, has 0."),
    ],
)
def test_what_is_no_service(path: Path, text: str, said: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_service(path)
    assert f"{path}{said}" in caught.value.message


def test_a_missing_file(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        load_service(path)


def test_the_default_service_is_that_of_the_file(repo_root: Path) -> None:
    """`quire serve` and `serve run configs/smollm2-cpu.yaml` do the same (on a machine without GPU)."""
    in_file = load_service(repo_root / "configs/smollm2-cpu.yaml")
    default = ServiceConfig()
    on_cpu = override(
        default.quire, {"model": {"device": "cpu"}, "scheduler": {"max_num_batched_tokens": CPU_STEP_TOKENS}}
    )
    assert in_file == ServiceConfig(quire=on_cpu)


SHAPES = {  # of one engine of each model: device, ranks of a stage, stages
    "llama-3.1-70b-tp8": [("cuda", 8, 1)],
    "llama-3.1-8b": [("cuda", 1, 1)],
    "multi-model": [("cpu", 1, 1), ("cpu", 1, 1)],
    "multi-node-pp": [("cuda", 4, 2)],
    "qwen3-30b-a3b-ep": [("cuda", 4, 1)],
    "smollm2-cpu": [("cpu", 1, 1)],
    "smollm2-cpu-autoscale": [("cpu", 1, 1)],
    "smollm2-cpu-tp2": [("cpu", 2, 1)],
}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_in_configs_is_good(path: Path) -> None:
    """By Serve's schema of the file, by Quire's of its `args:`, and by Serve's of each deployment's options."""
    ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    service = load_service(path)
    engines = service.quire.engines()
    sizes = [(e.parallel.tensor_parallel_size, e.parallel.pipeline_parallel_size) for e in engines.values()]
    devices = [engine.model.device for engine in engines.values()]
    assert [(device, *size) for device, size in zip(devices, sizes, strict=True)] == SHAPES[path.stem]
    assert all(engine.parallel.expert_parallel == ("-ep" in path.stem) for engine in engines.values())
    assert set(service.deployments) == {"Gateway", *engines}  # each is there to be changed
    gateway = bind(service.quire, service.deployments)._bound_deployment
    for engine, name in zip(gateway.init_args[1:], engines, strict=True):
        deployment = engine._bound_deployment
        gpus = deployment.ray_actor_options.get("num_gpus", 0)
        config = deployment.init_args[0]
        assert gpus == (config.model.device == "cuda" and config.parallel.world_size == 1)
        policy = (service.deployments[name].get("autoscaling_config") or {}).get("policy")
        if policy:
            assert policy["policy_function"] == "quire.cluster.autoscaling:EngineLoadPolicy"
            EngineLoadPolicy(**policy["policy_kwargs"])
    assert f"configs/{path.name}" in path.read_text().split("proxy_location")[0]  # how to run it stands at its top


def test_every_file_in_configs_is_listed_in_the_readme() -> None:
    listed = set(re.findall(r"\| \[`([\w.-]+)\.yaml`\]\(configs/", (ROOT / "README.md").read_text()))
    assert listed == set(SHAPES) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def test_overrides_are_judged_like_the_file() -> None:
    config = override(QuireConfig(), {"cache": {"block_size": 32}, "model": {"model": "x"}})
    assert (config.cache.block_size, config.model.model) == (32, "x")
    with pytest.raises(ConfigError, match=r"cache.block_size: Input should be less than or equal to 256, got 1000"):
        override(config, {"cache": {"block_size": 1000}})


@pytest.mark.parametrize(
    ("running", "waiting", "usage", "engines"),
    [
        ([0], [0], [0.0], 0),
        ([10], [0], [0.1], 1),
        ([32], [1], [0.1], 2),
        ([32, 32], [0, 64], [0.5, 0.5], 4),
        ([4], [0], [0.8], 1),
        ([4], [0], [0.81], 2),  # few requests, but the cache is full
    ],
)
def test_engines_for_a_load(running: list[int], waiting: list[int], usage: list[float], engines: int) -> None:
    reported = {
        name: {f"replica-{i}": value for i, value in enumerate(values)}
        for name, values in (("num_running", running), ("num_waiting", waiting), ("kv_cache_usage", usage))
    }
    policy = EngineLoadPolicy(target_requests_per_engine=32, target_kv_cache_usage=0.8)
    assert policy(context(reported)) == (engines, {})
    assert policy(context(None)) == (0, {})


def context(reported: dict[str, dict[str, float]] | None, total_num_requests: float = 0.0) -> Any:
    """What the policies read of Serve's `AutoscalingContext`."""
    return SimpleNamespace(aggregated_metrics=reported, total_num_requests=total_num_requests)


def test_queued_tokens_ask_for_engines() -> None:
    policy = EngineLoadPolicy(target_queued_tokens_per_engine=1000)
    assert policy(context({"num_running": {"a": 1, "b": 1}, "num_queued_tokens": {"a": 2000, "b": 500}})) == (3, {})
    assert policy(context({"num_running": {"a": 1}, "num_queued_tokens": {"a": 1000}})) == (1, {})


def test_a_gateway_that_asks_keeps_one_engine() -> None:
    assert EngineLoadPolicy()(context({"num_running": {"a": 0}}, total_num_requests=1.0)) == (1, {})


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"target_requests_per_engine": 0}, "target_requests_per_engine"),
        ({"target_kv_cache_usage": 1.1}, "target_kv_cache_usage"),
        ({"target_queued_tokens_per_engine": -1}, "target_queued_tokens_per_engine"),
    ],
)
def test_a_target_that_cannot_be_is_named(kwargs: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be > 0"):
        EngineLoadPolicy(**kwargs)


@pytest.mark.parametrize(
    ("options", "seconds"), [({}, 600.0), ({"Gateway": {"graceful_shutdown_timeout_s": 30}}, 30.0)]
)
def test_a_gateway_that_is_not_needed_has_the_time_of_a_long_stream(
    options: dict[str, dict[str, object]], seconds: float
) -> None:
    application = bind(QuireConfig(), options)
    assert application._bound_deployment._deployment_config.graceful_shutdown_timeout_s == seconds


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({}, CPU_STEP_TOKENS),
        ({"model": {"device": "cuda"}}, 2048),
        ({"model": {"device": "cpu"}, "scheduler": {"max_num_batched_tokens": 2048}}, 2048),
    ],
)
def test_a_step_on_cpu_is_short_unless_somebody_chose_its_size(given: dict[str, object], tokens: int) -> None:
    assert settled(EngineConfig.model_validate(given)).scheduler.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "cuda", "num_nodes", "device", "said"),
    [
        (0.0, 1, "13.0", 1, "cpu", ""),
        (1.0, 1, "13.0", 1, "cuda", "device: auto takes the GPU: Ray has 1, and torch here is a build for 13.0."),
        (1.0, 1, None, 1, "cpu", "device: auto takes the CPU: Ray has 1 GPU, but torch is a build for CPUs."),
        (1.0, 1, None, 2, "cuda", "device: auto takes the GPU: Ray has 1, and torch here is a build for CPUs."),
        (1.0, 2, "13.0", 1, "cpu", "device: auto takes the CPU: 2 ranks need a GPU each, and Ray has 1."),
        (2.0, 2, "13.0", 2, "cuda", "device: auto takes the GPU: Ray has 2, and torch here is a build for 13.0."),
    ],
)
def test_auto_takes_gpus_that_are_enough_and_that_torch_can_use(
    num_gpus: float,
    num_ranks: int,
    cuda: str | None,
    num_nodes: int,
    device: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And says once which they are, or why it does not."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, **({"GPU": num_gpus} if num_gpus else {})})
    monkeypatch.setattr(placement, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(placement, "live_nodes", lambda: [{}] * num_nodes)
    placement._device_for.cache_clear()
    config = EngineConfig.model_validate({"parallel": {"tensor_parallel_size": num_ranks}})
    with caplog.at_level("INFO"):
        assert [settled(config).model.device, _with_device(config).model.device] == [device] * 2
    placement._device_for.cache_clear()
    assert [record.message for record in caplog.records] == ([said] if said else [])


def test_torch_says_what_it_is_built_for_without_being_imported() -> None:
    import torch

    assert placement.torch_cuda() == (torch.version.cuda or torch.version.hip)
    asked = "import sys; from quire.cluster.placement import torch_cuda; torch_cuda(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_template_is_a_service_without_a_file(path: Path) -> None:
    path.write_text(config_template())
    service = load_service(path)
    assert service == ServiceConfig()


def test_the_template_has_every_setting_with_its_default(path: Path) -> None:
    lines = config_template().splitlines()
    set_all = [re.sub(r"^( +)#(?! )", r"\1", line) for line in lines if "#models:" not in line]
    path.write_text("\n".join(set_all))
    quire = load_service(path).quire
    assert quire == QuireConfig()
    sections = {
        name: getattr(quire, name) for name in ("model", "parallel", "cache", "scheduler", "grammar", "api", "routing")
    }
    assert quire.model_fields_set == {*sections, "allow_faults"}
    for section in sections.values():
        assert section.model_fields_set == set(type(section).model_fields)
    models = yaml.safe_load(next(line for line in lines if "#models:" in line).replace("#", ""))
    assert list(QuireConfig(**models).engines()) == ["Engine-smollm2-135m-instruct", "Engine-llama"]


@pytest.mark.parametrize("content", [b"a: \xff\xfe", b"a: b\x07", b"a: 2026-13-45", b"\x00"])
def test_a_file_that_is_no_yaml_is_one_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_service(path)
    assert caught.value.message.startswith(f"{path}: not YAML: ")
    assert "\n" not in caught.value.message
