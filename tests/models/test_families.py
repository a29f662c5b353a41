"""Random models of every family: greedy tokens are those of `transformers`, and logprobs agree within 1e-4.

In every way of running them: alone, batched, in chunks, with prefixes from the cache, preempted, on two ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_parity import TOP, FamilyUnderTest, Parity
from safetensors.torch import load_file, save_file
from tiny_families import TINY_FAMILIES

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import SUPPORTED_ARCHITECTURES, load_model_info
from quire.workers.local_executor import LocalExecutor
from quire.workers.parallel import ParallelContext
from quire.workers.worker import Worker


@pytest.fixture(scope="module", params=list(TINY_FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyUnderTest]:
    under_test = FamilyUnderTest(TINY_FAMILIES[request.param], tmp_path_factory.mktemp(request.param))
    yield under_test
    under_test.executor.shutdown()


def check(parity: Parity) -> None:
    assert parity.mismatches == []
    assert parity.max_logprob_difference < 1e-4


def test_every_architecture_is_tested() -> None:
    assert {family.architecture for family in TINY_FAMILIES.values()} == set(SUPPORTED_ARCHITECTURES)


def test_one_rank(model: FamilyUnderTest) -> None:
    for answers in model.modes().values():
        check(model.compare(answers))


def test_preempted(model: FamilyUnderTest) -> None:
    parity = model.preempted()
    check(parity)
    assert parity.num_preemptions > 0


def test_two_ranks(model: FamilyUnderTest) -> None:
    """Fused tensors, biases, norms over all heads and experts are cut as heads and columns are."""
    with model.on_ranks(tensor_parallel_size=2):
        check(model.batched())


@pytest.mark.parametrize("family", ["olmo2", "olmoe", "cohere", "stablelm-parallel", "phi3", "falcon-40b", "qwen3-moe"])
def test_more_ranks_than_kv_heads(tmp_path: Path, family: str) -> None:
    """6 heads and 2 KV heads on 4 ranks: KV heads are on two ranks each, and count once in norms over all heads."""
    model = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    with model.on_ranks(tensor_parallel_size=4):
        check(model.batched())
    model.executor.shutdown()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types(model: FamilyUnderTest, dtype: str) -> None:
    """Every layer keeps to the model's dtype, and the likeliest tokens stay close to the reference's in float32.

    On average over the prompts: where two experts are about as likely, rounding may choose the other one.
    """
    sections = {"model": {"num_threads": 1, "dtype": dtype}, "cache": {"num_kv_blocks": 100}}
    executor = LocalExecutor(EngineConfig.model_validate(sections), model.info)
    answers = model.driver(executor, cache={"num_kv_blocks": 100}).greedy(model.prompts, 1, TOP)
    executor.shutdown()
    differences = []
    for prompt, answer in zip(model.prompts, answers, strict=True):
        expected = model.reference.logits(prompt, answer.token_ids).log_softmax(dim=-1)[0]
        ours = torch.tensor([logprob for _, logprob in answer.logprobs[0].top])
        differences.append((ours - expected.topk(TOP).values).abs().max().item())
    assert sum(differences) / len(differences) < 0.35


def test_dummy_weights(model: FamilyUnderTest) -> None:
    sections = {"model": {"num_threads": 1, "load_format": "dummy"}, "cache": {"num_kv_blocks": 100}}
    executor = LocalExecutor(EngineConfig.model_validate(sections), model.info)
    answers = model.driver(executor, cache={"num_kv_blocks": 100}).greedy(model.prompts, 2, TOP)
    executor.shutdown()
    assert all(math.isfinite(token.logprob) for answer in answers for token in answer.logprobs)


def test_names_without_the_head(tmp_path: Path) -> None:
    """Checkpoints saved without the head lack the prefix, and old ones carry buffers."""
    TINY_FAMILIES["gpt2"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    worker = _worker(tmp_path)
    worker.load_model()
    save_file({**tensors, "h.0.attn.bias": torch.ones(1)}, file)
    bare = _worker(tmp_path)
    bare.load_model()
    for mine, other in zip(bare.model.parameters(), worker.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_wrong_shape_of_a_fused_tensor(tmp_path: Path) -> None:
    TINY_FAMILIES["phi3"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file({**load_file(file), name: torch.zeros(150, 96)}, file)
    with pytest.raises(ConfigError, match=r"wrong shape: .*qkv_proj.weight \[150, 96\] instead of \[160, 96\]"):
        _worker(tmp_path).load_model()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("falcon-7b", {"alibi": True}, "alibi"),
        ("opt", {"word_embed_proj_dim": 48}, "word_embed_proj_dim 48 is not supported for OPT; 96 is"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gemma2", {"use_bidirectional_attention": True}, "from left to right"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; silu"),
        (
            "qwen2-windows",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types .*chunked_attention.* not supported",
        ),
    ],
)
def test_refused_configurations(tmp_path: Path, family: str, settings: dict[str, object], message: str) -> None:
    TINY_FAMILIES[family].make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(ConfigError, match=message):
        _worker(tmp_path).load_model()


def _worker(path: Path) -> Worker:
    config = EngineConfig.model_validate({"model": {"model": str(path), "num_threads": 1}})
    return Worker(config, load_model_info(config.model), ParallelContext())
