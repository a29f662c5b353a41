"""`quire check` says what loading would find, without loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import TINY_FAMILIES, WINDOW
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig
from quire.engine.core import plan_kv_cache
from quire.engine.errors import ConfigError
from quire.engine.model_source import load_model_info
from quire.workers.model_check import ModelCheck, check_model
from quire.workers.parallel import ParallelContext
from quire.workers.worker import Worker


def check(path: Path, **sections: dict[str, object]) -> ModelCheck:
    config = EngineConfig.model_validate({**sections, "model": {"model": str(path), **sections.get("model", {})}})
    return check_model(config, load_model_info(config.model))


def test_counts(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    result = check(tmp_path, model={"device": "cpu"})
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (result.architecture, result.num_parameters) == ("LlamaForCausalLM", num_parameters)
    assert result.weight_bytes == (4 * num_parameters,)
    assert result.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, float32
    assert result.capacity is not None
    assert str(result).splitlines()[2] == f"parameters   {num_parameters:,}"


@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere2"])
def test_capacity_is_that_of_a_loaded_engine(tmp_path: Path, family: str) -> None:
    TINY_FAMILIES[family].make(tmp_path)
    sections = {"cache": {"memory_bytes": 1 << 20}, "scheduler": {"max_num_batched_tokens": 64}}
    config = EngineConfig.model_validate({**sections, "model": {"model": str(tmp_path), "device": "cpu"}})
    worker = Worker(config, load_model_info(config.model), ParallelContext())
    worker.load_model()
    plan = plan_kv_cache(config, worker.kv_cache_specs(), [worker.available_kv_cache_bytes()])
    capacity = check(tmp_path, model={"device": "cpu"}, **sections).capacity
    assert capacity is not None
    assert capacity.num_tokens == (plan.num_blocks - 1) // len(plan.groups) * 16
    windows = [group.spec.sliding_window for group in plan.groups]
    # 256 tokens are 16 blocks; a window of 20 and a chunk of 64 tokens touch at most 7.
    assert capacity.num_full_requests == (plan.num_blocks - 1) // sum(7 if w == WINDOW else 16 for w in windows)


def test_ranks(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (whole,) = check(tmp_path).weight_bytes
    halves = check(tmp_path, parallel={"tensor_parallel_size": 2}).weight_bytes
    padding = 2 * 48 * 4  # 199 rows of the vocabulary as 2 x 100, in embedding and head
    twice = 7 * 48 * 4  # norms are on both ranks
    assert halves == ((whole + padding + twice) // 2,) * 2
    with pytest.raises(ConfigError, match="7 ranks cannot share 6 attention heads"):
        check(tmp_path, parallel={"tensor_parallel_size": 7})


def test_stages(tmp_path: Path) -> None:
    """3 layers of 2 KV heads of 16 on 2 stages: two layers and the embedding on one, one layer and the head on both."""
    make_tiny_llama(tmp_path)
    sections = {"model": {"device": "cpu"}, "cache": {"memory_bytes": 1 << 20}}
    (whole,) = check(tmp_path).weight_bytes
    result = check(tmp_path, parallel={"pipeline_parallel_size": 2}, **sections)
    first, last = result.weight_bytes
    vocabulary, norm = 199 * 48 * 4, 48 * 4
    assert first + last == whole
    assert first - vocabulary == 2 * (last - vocabulary - norm)
    assert result.kv_bytes_per_token == 2 * (2 * 2 * 16 * 4)
    block = 16 * result.kv_bytes_per_token
    assert result.capacity is not None
    assert result.capacity.num_tokens == 16 * ((1 << 20) // block - 1)  # the first stage holds fewer
    assert f"{first:,} | {last:,} bytes (ranks; stages by |), {first + last:,} together" in str(result)
    both = check(tmp_path, parallel={"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, **sections)
    assert len(both.weight_bytes) == 4
    assert both.kv_bytes_per_token == 2 * (2 * 1 * 16 * 4)


def test_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_llama(tmp_path)
    monkeypatch.setattr("quire.workers.model_check.free_bytes", lambda device: 1000)
    result = check(tmp_path, model={"device": "cpu"})
    assert result.capacity is None
    assert "more than are free. A shorter dtype" in str(result).splitlines()[-1]
    monkeypatch.undo()
    little = check(tmp_path, model={"device": "cpu"}, cache={"num_kv_blocks": 3})  # one is the null block
    assert str(little).splitlines()[-1].startswith("fits         yes, but no request of the whole context: ")
    assert "hold 32 tokens, and longer requests are refused" in str(little)
    assert "are missing" in check(tmp_path, cache={"memory_bytes": 1 << 60}).advice


def test_wrong_tensors_are_found_without_loading(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    with pytest.raises(ConfigError, match=r"unexpected: model.layers.2"):
        check(tmp_path)
    assert check(tmp_path, model={"load_format": "dummy"}).num_parameters > 0
    assert torch.get_default_dtype() == torch.float32
