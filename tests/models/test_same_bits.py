"""In float32 on x86 a request's logits have the same bits alone and beside others, whatever the sizes of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_driver import Driver
from tiny_llama import make_tiny_llama
from transformers import MixtralConfig, MixtralForCausalLM

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.kernels.cpu.intrinsics import IS_X86
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model

pytestmark = pytest.mark.skipif(not IS_X86, reason="the library's sums")

PROMPTS = [torch.randint(1, 190, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 16, 17, 40)]
NUM_TOKENS = 12
SIZES = {
    "vocabulary": {"vocab_size": 201, "intermediate_size": 64},
    "quarters": {"vocab_size": 200, "intermediate_size": 172},
    "halves": {"vocab_size": 200, "intermediate_size": 70},
    "odd": {"vocab_size": 201, "intermediate_size": 71},
    "tied": {"vocab_size": 201, "intermediate_size": 71, "tie_word_embeddings": True},
    "hidden": {"hidden_size": 54},
}


def make_mixtral(directory: Path, num_experts: int, **overrides: int) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 64, **overrides}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    rest = {"max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": None, "eos_token_id": None}
    config = MixtralConfig(num_local_experts=num_experts, num_experts_per_tok=2, **sizes, **heads, **rest)
    model = MixtralForCausalLM(config).float().eval()
    model.save_pretrained(directory)
    return model


def differing(directory: Path) -> list[tuple[int, int]]:
    """(prompt, token) whose logprobs are others when all prompts are computed together."""
    config = EngineConfig.model_validate({"model": {"model": str(directory), "dtype": "float32", "device": "cpu"}})
    executor = LocalExecutor(config, load_model_info(config.model))

    def driver() -> Driver:
        return Driver(executor, 256)

    alone = [driver().greedy([prompt], NUM_TOKENS, logprobs=5)[0] for prompt in PROMPTS]
    together = driver().greedy(PROMPTS, NUM_TOKENS, logprobs=5)
    executor.shutdown()
    assert all(len(answer.logprobs) == NUM_TOKENS for answer in together)
    return [
        (prompt, token)
        for prompt, (one, other) in enumerate(zip(alone, together, strict=True))
        for token, (a, b) in enumerate(zip(one.logprobs, other.logprobs, strict=True))
        if (a.logprob, a.top) != (b.logprob, b.top)
    ]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_llama(tmp_path: Path, sizes: dict[str, Any]) -> None:
    make_tiny_llama(tmp_path, **sizes)
    assert differing(tmp_path) == []


@pytest.mark.parametrize(("num_experts", "sizes"), [(2, {}), (3, {}), (4, {}), (6, {}), (9, {"intermediate_size": 70})])
def test_few_experts(tmp_path: Path, num_experts: int, sizes: dict[str, int]) -> None:
    """Rows of zeros that the router is given choose no expert, and count as no parameters."""
    model = make_mixtral(tmp_path, num_experts, **sizes)
    assert differing(tmp_path) == []
    config = EngineConfig(model=ModelConfig(model=str(tmp_path), device="cpu"))
    counted = check_model(config, load_model_info(config.model)).num_parameters
    assert counted == sum(parameter.numel() for parameter in model.parameters())
