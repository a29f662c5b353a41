"""The default model gives the tokens of `transformers` on the same GGUF, however its work is cut up.

On one rank the bits of float32 are the same, too: nothing is left to ties.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_driver import Answer, Driver
from hf_reference import Reference
from rank_executors import ProcessExecutor
from smollm2_prompts import NUM_TOKENS

from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo
from quire.engine.tokenizer import load_tokenizer
from quire.workers.local_executor import LocalExecutor

MAX_MODEL_LEN = 512

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def alone(smollm2_executor: LocalExecutor, prompts: Prompts) -> list[Answer]:
    """Every prompt by itself, with nothing cached."""
    driver = Driver(smollm2_executor, MAX_MODEL_LEN, cache={"enable_prefix_caching": False})
    return driver.one_by_one(prompts, NUM_TOKENS, logprobs=2)


def check(answers: list[Answer], alone: list[Answer]) -> None:
    """The same tokens, and logprobs bit for bit."""
    for answer, known in zip(answers, alone, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        assert answer.token_ids == known.token_ids
        assert [len(logprobs.top) for logprobs in answer.logprobs] == [2] * NUM_TOKENS
        assert answer.logprobs == known.logprobs


def test_one_by_one(alone: list[Answer], prompts: Prompts, smollm2_reference: Reference) -> None:
    assert len(prompts) == 20
    for prompt, answer in zip(prompts, alone, strict=True):
        smollm2_reference.check_greedy(prompt, answer.token_ids)
    assert smollm2_reference.generate(prompts[1], 16) == alone[1].token_ids[:16]


def test_batched(smollm2_executor: LocalExecutor, alone: list[Answer], prompts: Prompts) -> None:
    driver = Driver(smollm2_executor, MAX_MODEL_LEN)
    check(driver.greedy(prompts, NUM_TOKENS, logprobs=2), alone)
    assert driver.stats().num_steps < 100


def test_chunked_prefill(smollm2_executor: LocalExecutor, alone: list[Answer], prompts: Prompts) -> None:
    driver = Driver(smollm2_executor, MAX_MODEL_LEN, scheduler={"max_num_batched_tokens": 16})
    check(driver.greedy(prompts, NUM_TOKENS, logprobs=2), alone)


def test_preemption(smollm2_executor: LocalExecutor, alone: list[Answer], prompts: Prompts) -> None:
    """22 blocks hold the longest prompt and its answer, and about three others."""
    driver = Driver(smollm2_executor, 340, cache={"num_kv_blocks": 23}, scheduler={"max_num_batched_tokens": 64})
    check(driver.greedy(prompts, NUM_TOKENS, logprobs=2), alone)
    assert driver.stats().num_preemptions > 0


def test_prefix_hits(smollm2_executor: LocalExecutor, alone: list[Answer], prompts: Prompts) -> None:
    driver = Driver(smollm2_executor, MAX_MODEL_LEN)
    driver.greedy(prompts, 1)
    answers = driver.greedy(prompts, NUM_TOKENS, logprobs=2)
    check(answers, alone)
    # The whole blocks of each prompt, but for the token that is always computed.
    assert [answer.num_cached_tokens for answer in answers] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]


def test_two_ranks(
    smollm2_two_ranks: ProcessExecutor, alone: list[Answer], prompts: Prompts, smollm2_reference: Reference
) -> None:
    """9 heads and 3 KV heads over 2 ranks: 6 and 2 on the first, 3 and 1 on the second."""
    specs = smollm2_two_ranks.call("kv_cache_specs")
    assert [rank[0].num_kv_heads for rank in specs] == [2, 1]
    driver = Driver(smollm2_two_ranks, MAX_MODEL_LEN, scheduler={"max_num_batched_tokens": 128})
    for answer, known, prompt in zip(driver.greedy(prompts, NUM_TOKENS), alone, prompts, strict=True):
        if answer.token_ids != known.token_ids:  # sums over ranks have another order, so the reference decides
            smollm2_reference.check_greedy(prompt, answer.token_ids)


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    ids = tokenizer.encode("year 2024 and 1,234")
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "year", "Ġ", "2", "0", "2", "4", "Ġand", "Ġ", "1", ",", "2", "3", "4",
    ]  # fmt: skip
    assert ids == [3610, 216, 34, 32, 34, 36, 284, 216, 33, 28, 34, 35, 36]


@pytest.mark.parametrize(
    "text", ["Hello, world!\n\n  two  spaces\t", "漢字 🙂 naïve e\u0301", "a" * 300, "<|im_start|>user\n"]
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: Any, smollm2: ModelInfo) -> None:
    assert smollm2.eos_token_ids == (2, 0)  # the file's own, and <|endoftext|>
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, 81, 2]
    assert tokenizer.decode([1, 81, 2, 3], skip_special_tokens=True) == "a"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )


def test_chat_template(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_of_a_directory(tokenizer: Any, smollm2: ModelInfo, tmp_path: Path) -> None:
    """What is saved as a Hugging Face directory is read back as it was; a directory without one is refused."""
    info = replace(smollm2, path=tmp_path, format="safetensors")
    with pytest.raises(ConfigError, match=f"the tokenizer of {tmp_path} cannot be loaded"):
        load_tokenizer(info)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(info)
    assert loaded.encode("year 2024 and 1,234<|im_end|>") == tokenizer.encode("year 2024 and 1,234<|im_end|>")
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.eos_token == "<|im_end|>"
