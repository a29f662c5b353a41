"""Sampled answers of a real model, with every parameter that looks at earlier tokens, are the same in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from core_driver import Driver
from tiny_llama import VOCAB_SIZE, make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams
from quire.workers.local_executor import LocalExecutor

NUM_TOKENS = 40
PAIRS = tuple((a, b) for a in range(VOCAB_SIZE) for b in range(a % 5, VOCAB_SIZE, 7))
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **fields)  # type: ignore[arg-type]
    for fields in (
        {"temperature": 1.5, "bad_words_token_ids": PAIRS},
        {"temperature": 0.0, "bad_words_token_ids": PAIRS},
        {"temperature": 2.0, "allowed_token_ids": tuple(range(40, 80)), "bad_words_token_ids": PAIRS},
        {"temperature": 1.5, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logit_bias": {5: 2.0}},
    )
]


def requests(resumed: list[list[int]] | None = None) -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(1)
    return [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist(),
            sampling_params=params,
            seed=i,
            resume_token_ids=resumed[i] if resumed else [],
        )
        for i, (params, length) in enumerate(zip(PARAMS, (14, 14, 14, 14, 14), strict=True))
    ]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalExecutor]:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, initializer_range=0.12)  # flatter than usual: sampling has a choice
    info = load_model_info(ModelConfig(model=str(directory)))
    executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), info)
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def alone(executor: LocalExecutor) -> list[list[int]]:
    return [Driver(executor, 256).run([request])[0].token_ids for request in requests()]


def test_constraints_hold(alone: list[list[int]]) -> None:
    for tokens in alone[:3]:
        assert not set(PAIRS).intersection(pairwise(tokens))
    assert all(40 <= token < 80 for token in alone[2])
    assert [len(tokens) for tokens in alone] == [NUM_TOKENS] * 5
    assert all(len(set(tokens)) > 8 for tokens in alone), "the answers repeat themselves: they prove little"


@pytest.mark.parametrize("budget", [1000, 6])
def test_batched_and_chunked(executor: LocalExecutor, alone: list[list[int]], budget: int) -> None:
    driver = Driver(executor, 256, scheduler={"max_num_batched_tokens": budget})
    assert [answer.token_ids for answer in driver.run(requests())] == alone


def test_preempted(executor: LocalExecutor, alone: list[list[int]]) -> None:
    driver = Driver(executor, 256, cache={"num_kv_blocks": 11, "enable_prefix_caching": False})
    assert [answer.token_ids for answer in driver.run(requests())] == alone
    assert driver.stats().num_preemptions > 0


@pytest.mark.parametrize("known", [1, 13, 39])
def test_resumed_by_another_engine(executor: LocalExecutor, alone: list[list[int]], known: int) -> None:
    driver = Driver(executor, 256)
    answers = driver.run(requests([tokens[:known] for tokens in alone]))
    assert [answer.token_ids for answer in answers] == alone
