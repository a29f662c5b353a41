"""Random Llamas of every shape: greedy tokens are those of `transformers`, and logprobs agree within 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from core_driver import Driver
from hf_reference import Reference
from rank_executors import ThreadExecutor
from tiny_llama import LLAMA3_ROPE, VOCAB_SIZE, make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo, load_model_info
from quire.workers.local_executor import LocalExecutor

NUM_TOKENS = 24
MODELS = {
    "gqa": {},
    "mha-tied": {"num_key_value_heads": 6, "tie_word_embeddings": True},
    "mqa-sharded": {"num_key_value_heads": 1, "max_shard_size": "20KB"},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 5, 16, 17, 40, 90]
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = make_prompts()


@pytest.fixture(scope="module", params=list(MODELS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, Reference]:
    directory = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(directory, **MODELS[request.param])
    return load_model_info(ModelConfig(model=str(directory))), Reference(model)


@pytest.fixture(scope="module")
def executor(tiny: tuple[ModelInfo, Reference]) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), tiny[0])
    yield executor
    executor.shutdown()


def test_alone_and_batched(tiny: tuple[ModelInfo, Reference], executor: LocalExecutor) -> None:
    _, reference = tiny
    alone = Driver(executor, 256).one_by_one(PROMPTS, NUM_TOKENS)
    for prompt, answer in zip(PROMPTS, alone, strict=True):
        reference.check_greedy(prompt, answer.token_ids)
    batched = Driver(executor, 256).greedy(PROMPTS, NUM_TOKENS)
    assert [answer.token_ids for answer in batched] == [answer.token_ids for answer in alone]


@pytest.mark.parametrize("budget", [1000, 7])
def test_logprobs(tiny: tuple[ModelInfo, Reference], executor: LocalExecutor, budget: int) -> None:
    """In one batch, whole prompts and prompts in chunks of 7."""
    _, reference = tiny
    driver = Driver(executor, 256, scheduler={"max_num_batched_tokens": budget})
    for prompt, answer in zip(PROMPTS, driver.greedy(PROMPTS, NUM_TOKENS, logprobs=5), strict=True):
        reference.check_greedy(prompt, answer.token_ids)
        expected = reference.logits(prompt, answer.token_ids).log_softmax(dim=-1)
        top = torch.tensor([[logprob for _, logprob in token.top] for token in answer.logprobs])
        torch.testing.assert_close(top, expected.topk(5).values, atol=1e-4, rtol=0)
        chosen = torch.tensor([token.logprob for token in answer.logprobs])
        torch.testing.assert_close(chosen, expected.amax(dim=-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks(tiny: tuple[ModelInfo, Reference], size: int) -> None:
    """Heads that divide, heads that do not, and more ranks than KV heads, some of which are then replicated."""
    info, reference = tiny
    config = EngineConfig.model_validate(
        {"model": {"num_threads": 1}, "parallel": {"tensor_parallel_size": size}, "cache": {"num_kv_blocks": 200}}
    )
    executor = ThreadExecutor(config, info)
    answers = Driver(executor, 256, cache={"num_kv_blocks": 200}).greedy(PROMPTS, NUM_TOKENS)
    executor.shutdown()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        reference.check_greedy(prompt, answer.token_ids)


def test_more_ranks_than_heads(tiny: tuple[ModelInfo, Reference]) -> None:
    config = EngineConfig.model_validate({"parallel": {"tensor_parallel_size": 7}})
    with pytest.raises(ConfigError, match="7 ranks cannot share 6 attention heads; sizes 1 to 6 work"):
        ThreadExecutor(config, tiny[0])


def test_prompt_of_the_whole_context(tmp_path: Path) -> None:
    """255 known tokens of 256: one more can be sampled."""
    model = make_tiny_llama(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), info)
    prompt = torch.arange(255).remainder(VOCAB_SIZE).tolist()
    (answer,) = Driver(executor, 256).greedy([prompt], 1)
    Reference(model).check_greedy(prompt, answer.token_ids)
    executor.shutdown()
