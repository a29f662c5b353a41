"""Several models in one configuration: what each of them gets, what they are called, what is refused."""

# ruff: noqa: E501 (a table of messages is read by the row)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cluster.app import bind
from quire.cluster.config import QuireConfig, override, validate
from quire.cluster.config_file import load_service
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError

SEVERAL = """\
applications:
  - name: quire
    import_path: quire.cluster.app:build
    args:
      model: {device: cpu}
      scheduler: {max_num_seqs: 16, max_num_batched_tokens: 512}
      models:
        - smollm2-135m-instruct
        - model: {model: /models/llama, served_model_name: org/llama}
          scheduler: {max_num_seqs: 4}
          parallel: {tensor_parallel_size: 2}
    deployments:
      - name: Gateway
        num_replicas: 1
      - name: Engine-smollm2-135m-instruct
        num_replicas: 2
      - name: Engine-org-llama
        autoscaling_config: {min_replicas: 0, max_replicas: 3}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.yaml"


def test_each_model_has_what_stands_next_to_the_list_and_its_own(path: Path) -> None:
    path.write_text(SEVERAL)
    service = load_service(path)
    engines = service.quire.engines()
    assert list(engines) == ["Engine-smollm2-135m-instruct", "Engine-org-llama"]
    small, large = engines.values()
    assert (small.model.model, small.model.name) == ("smollm2-135m-instruct", "smollm2-135m-instruct")
    assert (large.model.model, large.model.name) == ("/models/llama", "org/llama")
    assert [engine.model.device for engine in (small, large)] == ["cpu", "cpu"]
    assert [engine.scheduler.max_num_seqs for engine in (small, large)] == [16, 4]
    assert [engine.scheduler.max_num_batched_tokens for engine in (small, large)] == [512, 512]
    assert [engine.parallel.tensor_parallel_size for engine in (small, large)] == [1, 2]


def test_each_engine_deployment_has_its_options(path: Path) -> None:
    path.write_text(SEVERAL)
    service = load_service(path)
    gateway = bind(service.quire, service.deployments)._bound_deployment
    config, *engines = gateway.init_args
    assert config == service.quire
    deployments = {engine._bound_deployment.name: engine._bound_deployment for engine in engines}
    assert list(deployments) == ["Engine-smollm2-135m-instruct", "Engine-org-llama"]
    small, large = deployments.values()
    assert small.num_replicas == 2
    assert large._deployment_config.autoscaling_config.max_replicas == 3
    assert [each.init_args[0].model.model for each in (small, large)] == ["smollm2-135m-instruct", "/models/llama"]
    assert [each.ray_actor_options["num_cpus"] for each in (small, large)] == [0.5, 0.1]  # its ranks compute


def test_one_model_is_the_engine_itself() -> None:
    config = validate({"model": "smollm2-135m-instruct"})
    assert config.engines() == {"Engine": config}
    (engine,) = bind(config, {})._bound_deployment.init_args[1:]
    assert engine._bound_deployment.name == "Engine"
    listed = validate({"models": ["smollm2-135m-instruct"]})
    assert listed.engines() == {"Engine-smollm2-135m-instruct": EngineConfig()}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("max_num_seqs: 4", "max_num_seq: 4", "10: there is no key 'args.models.scheduler.max_num_seq'. Did you mean 'max_num_seqs'?"),
        ("max_num_seqs: 4", "max_num_seqs: 0", "10: args.models.1.scheduler.max_num_seqs: Input should be greater than or equal to 1, got 0."),
        ("max_num_seqs: 16", "max_num_seqs: 0", "6: args.scheduler.max_num_seqs: Input should be greater than or equal to 1, got 0."),
        ("org/llama", "smollm2-135m-instruct", "8: args.models: two models are called 'smollm2-135m-instruct': give one of them another served_model_name."),
        ("org/llama", "smollm2 135m-instruct", "8: args.models: 'smollm2 135m-instruct' and 'smollm2-135m-instruct' are too alike: both would be 'Engine-smollm2-135m-instruct'."),
        ("model: {device: cpu}", "model: other", "8: args.models: names the models; model next to it names another one."),
        ("name: Engine-org-llama", "name: Engine-llama", "17: there is no deployment 'Engine-llama'. Did you mean 'Engine-org-llama'?"),
        ("name: Engine-org-llama", "name: Gatway", "17: there is no deployment 'Gatway'. Did you mean 'Gateway'?"),
    ],
)  # fmt: skip
def test_a_mistake_has_its_line(path: Path, right: str, wrong: str, said: str) -> None:
    assert SEVERAL.count(right) == 1
    path.write_text(SEVERAL.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        load_service(path)
    assert caught.value.message == f"{path}:{said}"


@pytest.mark.parametrize("models", [[], None, "smollm2-135m-instruct", [1], {"a": "b"}])
def test_what_is_no_list_of_models(models: Any) -> None:
    with pytest.raises(ConfigError, match="models"):
        validate({"models": models})


def test_options_of_the_command_line_hold_for_every_model() -> None:
    config = validate({"models": ["a", {"model": "b", "scheduler": {"max_num_seqs": 4}}]})
    changed = override(config, {"scheduler": {"max_num_seqs": 8}, "model": {"dtype": "bfloat16"}})
    engines = list(changed.engines().values())
    assert [engine.scheduler.max_num_seqs for engine in engines] == [8, 8]
    assert [(engine.model.model, engine.model.dtype) for engine in engines] == [("a", "bfloat16"), ("b", "bfloat16")]
    with pytest.raises(ConfigError, match="names several models, of which none can be replaced"):
        override(config, {"model": {"model": "c"}})


def test_the_name_of_a_model_is_the_last_part_of_its_path() -> None:
    names = {"a": "a", "/models/a/": "a", "models/a.gguf": "a.gguf", "~/a": "a"}
    assert {model: QuireConfig(model={"model": model}).model.name for model in names} == names
