"""Models over a cache in 8 bits: as exact as ever, about a model whose keys and values are rounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from core_driver import Driver
from family_parity import FamilyUnderTest
from hf_reference import Reference
from safetensors.torch import load_file, save_file
from tiny_fallbacks import TINY_FALLBACKS
from tiny_families import TINY_FAMILIES
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo, load_model_info
from quire.kernels import fp8
from quire.workers.layers.attention import KVScales
from quire.workers.loader.kv_scales import kv_scales
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model
from quire.workers.parallel import ParallelContext
from quire.workers.worker import Worker

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
SCALES = [KVScales(0.02, 0.05), KVScales(3.0, 0.01), KVScales(), KVScales(0.5, 1.0)]

# Rounding hides differences of the order of float32's own errors, until one of them moves a number across the middle
# between two of its 8-bit neighbours: that changes one of some thousand numbers by a part in 16, and logprobs by this.
FLIP = 0.02

models = {"llama": TINY_FAMILIES["llama"], "gemma3": TINY_FAMILIES["gemma3"], "exaone4": TINY_FALLBACKS["exaone4"]}


class Fp8Model(FamilyUnderTest):
    """A tiny model over a cache in 8 bits. The first layers of its checkpoint have scales."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(models[name], directory)
        self.executor.shutdown()
        file = directory / "model.safetensors"
        save_file({**load_file(file), **_scale_tensors()}, file)
        config = EngineConfig.model_validate({"model": {"num_threads": 1}, "cache": FP8})
        self.executor = LocalExecutor(config, self.info)
        model = getattr(transformers, models[name].architecture).from_pretrained
        self.reference = Reference(model(directory, attn_implementation="rounded"))


def _scale_tensors() -> dict[str, Tensor]:
    """In the shapes that tools write: no dimensions, or one."""
    tensors = {}
    for layer, (key, value) in enumerate(SCALES):
        if (key, value) != (1.0, 1.0):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(key)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([value])
    return tensors


def _rounded_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    scales = [*SCALES, *[KVScales()] * 10][module.layer_idx]
    key = fp8.quantize(key, scales.key).float() * scales.key
    value = fp8.quantize(value, scales.value).float() * scales.value
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register("rounded", _rounded_attention)
transformers.AttentionMaskInterface.register("rounded", transformers.masking_utils.sdpa_mask)


@pytest.fixture(scope="module", params=list(models))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fp8Model]:
    under_test = Fp8Model(request.param, tmp_path_factory.mktemp(request.param))
    yield under_test
    under_test.executor.shutdown()


def test_one_answer_in_all_ways_of_running(model: Fp8Model) -> None:
    answers = model.modes()
    tokens = {mode: [answer.token_ids for answer in given] for mode, given in answers.items()}
    assert tokens["batched"] == tokens["alone"]
    assert tokens["chunked"] == tokens["alone"]
    assert tokens["hit"] == tokens["alone"]
    for given in answers.values():
        parity = model.compare(given)
        assert parity.mismatches == []
        assert parity.max_logprob_difference < FLIP


def test_preempted(model: Fp8Model) -> None:
    parity = model.preempted()
    assert parity.num_preemptions > 0
    assert parity.mismatches == []
    assert parity.max_logprob_difference < FLIP


def test_logprobs_stay_near_those_of_the_unrounded_model(
    smollm2: ModelInfo, smollm2_executor: LocalExecutor, prompts: list[list[int]]
) -> None:
    """Each number is off by 1/16 of itself at most, 1/40 on average, in either direction. Scores and outputs average
    over 64 and more of them, and 30 layers add up what is left: some percent of the spread of the logits, which is
    about 3. (Tiny random models are no measure of this: their softmax is so sharp that it amplifies any error.)"""
    texts = prompts[-8:]
    config = EngineConfig.model_validate({"cache": FP8})
    rounding = LocalExecutor(config, smollm2)
    exact, rounded = (
        Driver(executor, smollm2.max_model_len, cache={"num_kv_blocks": 200}).greedy(texts, 1, 20)
        for executor in (smollm2_executor, rounding)
    )
    rounding.shutdown()
    differences = []
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.token_ids == theirs.token_ids
        found = dict(ours.logprobs[0].top)
        differences += [abs(found[token] - logprob) for token, logprob in theirs.logprobs[0].top[:4]]
    assert 0.01 < sum(differences) / len(differences) < 0.2
    assert max(differences) < 0.8


def test_half_or_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    TINY_FAMILIES["llama"].make(tmp_path)

    def bytes_per_token(**model: str) -> int:
        sections = {"model": {"model": str(tmp_path), "device": "cpu", **model}, "cache": FP8}
        config = EngineConfig.model_validate(sections)
        result = check_model(config, load_model_info(config.model))
        assert result.cache_dtype == "float8_e4m3fn"
        assert "bytes per token and rank, float8_e4m3fn" in str(result)
        worker = Worker(config, load_model_info(config.model), ParallelContext())
        worker.load_model()
        assert [spec.dtype_bytes for spec in worker.kv_cache_specs()] == [1] * 4
        return result.kv_bytes_per_token

    assert bytes_per_token() == bytes_per_token(dtype="bfloat16") == 4 * 2 * 2 * 16


def test_scales_of_a_checkpoint(tmp_path: Path) -> None:
    TINY_FAMILIES["llama"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **_scale_tensors()}, file)
    config = EngineConfig.model_validate({"model": str(tmp_path), "cache": FP8})
    info = load_model_info(config.model)
    assert kv_scales(config, info, 4) == [pytest.approx(scales) for scales in SCALES]
    assert kv_scales(EngineConfig(), info, 4) == [KVScales()] * 4  # of no use to a cache of the model's own type
    worker = Worker(EngineConfig.model_validate({"model": {"num_threads": 1}}), info, ParallelContext())
    worker.load_model()

    name = "model.layers.1.self_attn.k_scale"
    for wrong, message in (
        (torch.tensor(0.0), f"{name} in .* is 0.0; a scale is positive"),
        (torch.tensor(torch.inf), "is inf"),
        (torch.ones(2), r"it has shape \[2\]; one number per layer"),
    ):
        save_file({**tensors, name: wrong}, file)
        with pytest.raises(ConfigError, match=message):
            kv_scales(config, info, 4)
        with pytest.raises(ConfigError, match=message):
            check_model(config, info)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        EngineConfig.model_validate({"cache": {"kv_cache_dtype": "fp8_e5m2"}})
