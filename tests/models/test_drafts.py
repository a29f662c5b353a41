"""Drafts on a real model: tokens and logprobs are those without; alone, batched, preempted, over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from core_driver import Answer, Driver
from inflight_executor import InflightExecutor
from rank_executors import ThreadExecutor
from tiny_llama import VOCAB_SIZE, make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.outputs import DraftTokens, EngineRequest, SchedulerOutput
from quire.engine.sampling_params import SamplingParams
from quire.workers.drafts import Entries
from quire.workers.local_executor import LocalExecutor

MAX_LEN, LONG_LEN = 256, 1024
NUM_TOKENS = 60
FEW = (11, 12, 13)  # with so few tokens allowed, pairs of them come again and again


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})  # type: ignore[arg-type]


PARAMS = [
    params(temperature=0.0, logprobs=3, allowed_token_ids=FEW),
    params(temperature=1.0, stop_token_ids=FEW[:1], min_tokens=40, logit_bias=dict.fromkeys(FEW, 9.0)),
    params(temperature=1.0, allowed_token_ids=FEW, logprobs=0),
    params(temperature=1.0, allowed_token_ids=FEW, bad_words_token_ids=((11, 12, 13), (13, 13))),
    params(temperature=0.7, allowed_token_ids=FEW, top_k=2, repetition_penalty=1.3),  # gets no drafts
]


def requests() -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=[(7 * i + j) % VOCAB_SIZE for j in range(9 + i)],
            sampling_params=each,
            seed=i,
        )
        for i, each in enumerate(PARAMS)
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def executor(directory: Path) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(config(), load_model_info(ModelConfig(model=str(directory))))
    yield executor
    executor.shutdown()


def config(**sections: dict[str, object]) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"num_threads": 1}, **sections})


@pytest.fixture(scope="module")
def expected(executor: LocalExecutor) -> list[Answer]:
    answers = [Driver(executor, MAX_LEN, scheduler={"num_speculative_tokens": 0}).run([each])[0] for each in requests()]
    assert [len(answer.token_ids) for answer in answers[2:]] == [NUM_TOKENS] * 3
    assert 40 < len(answers[1].token_ids) < NUM_TOKENS  # it stops, amid what may have been guessed
    return answers


def check(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        for found, score in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert (found.token_id, found.rank) == (score.token_id, score.rank)
            values = ([each.logprob, *(value for _, value in each.top)] for each in (found, score))
            np.testing.assert_allclose(*values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_alone(executor: LocalExecutor, expected: list[Answer], count: int) -> None:
    num_steps, accepted = 0, 0
    for request, wanted in zip(requests(), expected, strict=True):
        driver = Driver(executor, MAX_LEN, scheduler={"num_speculative_tokens": count})
        check(driver.run([request]), [wanted])
        stats = driver.stats()
        assert (stats.num_draft_tokens > 0) is not request.sampling_params.has_penalties
        assert stats.num_steps == len(wanted.token_ids) - stats.num_accepted_tokens
        num_steps += stats.num_steps
        accepted += stats.num_accepted_tokens
    assert accepted > num_steps / 4


@pytest.mark.parametrize("scheduler", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 3}], ids=str)
def test_batched_and_chunked(executor: LocalExecutor, expected: list[Answer], scheduler: dict[str, object]) -> None:
    driver = Driver(executor, MAX_LEN, scheduler={"num_speculative_tokens": 7, **scheduler})
    check(driver.run(requests()), expected)
    assert driver.stats().num_accepted_tokens > 0


def test_preempted(executor: LocalExecutor, expected: list[Answer]) -> None:
    cache = {"num_kv_blocks": 14, "enable_prefix_caching": False}
    driver = Driver(executor, MAX_LEN, cache=cache, scheduler={"num_speculative_tokens": 7})
    check(driver.run(requests()), expected)
    stats = driver.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.num_preemptions > 0


def test_contexts_of_several_chunks(tmp_path: Path) -> None:
    """In graphs: what a step reads of the cache is what its own rows have, which are others' in the next one."""
    make_tiny_llama(tmp_path, max_position_embeddings=LONG_LEN)
    executor = LocalExecutor(config(), load_model_info(ModelConfig(model=str(tmp_path))))
    prompts = [[(j * j + i) % VOCAB_SIZE for j in range(560)] for i in range(len(PARAMS))]
    given = [
        EngineRequest(request_id=str(i), prompt_token_ids=prompts[i], sampling_params=each, seed=i)
        for i, each in enumerate(PARAMS)
    ]
    alone = [Driver(executor, LONG_LEN, scheduler={"num_speculative_tokens": 0}).run([each])[0] for each in given]
    driver = Driver(executor, LONG_LEN, scheduler={"num_speculative_tokens": 4})
    check(driver.run(given), alone)
    assert driver.stats().num_accepted_tokens > 0
    executor.shutdown()


def test_steps_in_flight(directory: Path, expected: list[Answer]) -> None:
    limits: dict[str, object] = {"max_num_seqs": 2, "max_inflight_steps": 2, "num_speculative_tokens": 4}
    executor = InflightExecutor(config(scheduler=limits), load_model_info(ModelConfig(model=str(directory))))
    driver = Driver(executor, MAX_LEN, scheduler=limits)
    check(driver.run(requests()), expected)
    assert driver.stats().num_accepted_tokens > 0
    executor.shutdown()


def test_two_ranks(directory: Path, expected: list[Answer]) -> None:
    grid: dict[str, object] = {"tensor_parallel_size": 2}
    executor = ThreadExecutor(config(parallel=grid), load_model_info(ModelConfig(model=str(directory))))
    driver = Driver(executor, MAX_LEN, parallel=grid, scheduler={"num_speculative_tokens": 4})
    check(driver.run(requests()), expected)
    assert driver.stats().num_accepted_tokens > 0
    executor.shutdown()


def step_of(num_scheduled: list[int], drafts: DraftTokens | None) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=3,
        rows=np.array([5, 2, 8], np.int32),
        num_scheduled_tokens=np.array(num_scheduled, np.int32),
        num_computed_tokens=np.array([40, 7, 20], np.int32),
        drafts=drafts,
    )


DRAFTS = DraftTokens(indices=np.array([0, 2], np.int32), token_ids=np.array([[3, 4, 5], [6, -1, -1]], np.int32))


def test_drafts_are_entries() -> None:
    entries = Entries.of(step_of([4, 9, 2], DRAFTS))
    assert entries.rows.tolist() == [5, 5, 5, 5, 2, 8, 8]
    assert entries.num_scheduled.tolist() == [1, 1, 1, 1, 9, 1, 1]
    assert entries.start.tolist() == [40, 41, 42, 43, 7, 20, 21]
    assert entries.indices.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert entries.depths.tolist() == [0, 1, 2, 3, 0, 0, 1]
    with pytest.raises(ValueError, match="step 3"):
        Entries.of(step_of([4, 9, 3], DRAFTS))


@pytest.mark.parametrize(
    ("sampled", "accepted"),
    [
        ([3, 4, 5, 9, 6, 1], [[3, 4, 5, 9], [-1, -1, -1, -1], [6, 1, -1, -1]]),
        ([3, 4, 6, 9, 7, 1], [[3, 4, 6, -1], [-1, -1, -1, -1], [7, -1, -1, -1]]),
        ([1, 4, 5, 9, 6, 6], [[1, -1, -1, -1], [-1, -1, -1, -1], [6, 6, -1, -1]]),
    ],
)
def test_what_is_accepted(sampled: list[int], accepted: list[list[int]]) -> None:
    """Request 1 has more of its prompt to come."""
    entries = Entries.of(step_of([4, 9, 2], DRAFTS))
    sampling = np.array([0, 1, 2, 3, 5, 6], np.int32)
    assert entries.accept(sampling, np.array(sampled, np.int32)).tolist() == accepted


def test_a_step_without_drafts_is_its_own_entries() -> None:
    entries = Entries.of(step_of([4, 9, 1], None))
    assert entries.rows.tolist() == [5, 2, 8]
    assert entries.accept(np.array([0, 2], np.int32), np.array([7, 9], np.int32)).tolist() == [[7], [-1], [9]]
