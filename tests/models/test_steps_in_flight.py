"""Steps launched before anybody has read the last one, and decode steps as graphs: the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from core_driver import Driver
from graph_checks import CASES, NUM_STEPS, GraphCase, run_graph_checks
from inflight_executor import CountedBackend, InflightExecutor, RepeatedCalls
from test_sampling import NUM_TOKENS, requests
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest, TokenLogprobs
from quire.engine.pooling import PoolingParams
from quire.engine.sampling_params import SamplingParams
from quire.workers.decode_graphs import graph_sizes

MAX_LEN = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, initializer_range=0.12)
    return directory


def make_executor(directory: Path, max_inflight_steps: int) -> InflightExecutor:
    limits = {"max_num_seqs": 12, "max_inflight_steps": max_inflight_steps}
    config = EngineConfig.model_validate({"model": {"num_threads": 1}, "scheduler": limits})
    return InflightExecutor(config, load_model_info(ModelConfig(model=str(directory))))


@pytest.fixture(scope="module")
def executor(directory: Path) -> InflightExecutor:
    return make_executor(directory, max_inflight_steps=3)


def all_kinds() -> list[EngineRequest]:
    """Those with every parameter that reads earlier tokens, greedy ones with logprobs, and an embedding."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    vector = EngineRequest(
        request_id="vector",
        prompt_token_ids=list(range(3, 30)),
        sampling_params=SamplingParams(max_tokens=1),
        seed=0,
        pooling=PoolingParams(type="mean"),
    )
    scored = [
        EngineRequest(request_id=f"greedy{i}", prompt_token_ids=list(range(1, 20 + i)), sampling_params=greedy, seed=0)
        for i in range(3)
    ]
    return [*requests(), *scored, vector]


def flat(scores: list[TokenLogprobs | None]) -> np.ndarray:
    return np.array([[s.logprob, *(value for _, value in s.top)] for s in scores if s is not None], np.float64)


def compare(answers: list, expected: list) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.token_ids == wanted.token_ids
        np.testing.assert_allclose(flat(answer.logprobs), flat(wanted.logprobs), atol=1e-5)
        np.testing.assert_allclose(flat(answer.prompt_logprobs or []), flat(wanted.prompt_logprobs or []), atol=1e-5)
        if wanted.embedding is not None:
            np.testing.assert_allclose(answer.embedding, wanted.embedding, atol=1e-5)


@pytest.fixture(scope="module")
def expected(executor: InflightExecutor) -> list:
    executor.graphs = None
    return Driver(executor, MAX_LEN, scheduler={"max_inflight_steps": 1}).run(all_kinds())


@pytest.mark.parametrize("graphs", [lambda: None, RepeatedCalls, CountedBackend], ids=["eager", "graphs", "recorded"])
@pytest.mark.parametrize(
    "sections",
    [
        {"scheduler": {"max_inflight_steps": 1}},
        {"scheduler": {"max_inflight_steps": 2}},
        {"scheduler": {"max_inflight_steps": 3, "max_num_batched_tokens": 9}},
        {"scheduler": {"max_inflight_steps": 2}, "cache": {"num_kv_blocks": 16, "enable_prefix_caching": False}},
        {"scheduler": {"max_inflight_steps": 2, "max_num_seqs": 3}},
    ],
    ids=["depth1", "depth2", "depth3-chunked", "depth2-preempted", "depth2-few-rows"],
)
def test_answers_are_the_same(
    executor: InflightExecutor, expected: list, sections: dict, graphs: Callable[[], Any]
) -> None:
    executor.graphs = graphs()
    executor.num_unread = 0
    driver = Driver(executor, MAX_LEN, **sections)
    answers = driver.run(all_kinds())
    assert executor.num_unread == sections["scheduler"]["max_inflight_steps"]
    compare(answers, expected)
    if "num_kv_blocks" in sections.get("cache", {}):
        assert driver.stats().num_preemptions > 0
    if executor.graphs is not None:
        assert graphs is CountedBackend or executor.graphs.num_captured == 3 * len(graph_sizes(12))
        assert executor.graphs.num_replays >= NUM_TOKENS // 2


@pytest.mark.parametrize("graphs", [RepeatedCalls, CountedBackend], ids=["graphs", "recorded"])
def test_a_rank_of_one_step_at_a_time_has_tokens_at_once(
    directory: Path, expected: list, graphs: Callable[[], Any]
) -> None:
    """Its graphs read no references, and none comes, even where the engine plans ahead of what it knows itself."""
    executor = make_executor(directory, max_inflight_steps=1)
    for depth in (2, 1):
        executor.graphs = graphs()
        compare(Driver(executor, MAX_LEN, scheduler={"max_inflight_steps": depth}).run(all_kinds()), expected)
        assert executor.graphs.num_replays >= NUM_TOKENS // 2


def test_a_row_changes_hands_while_its_token_is_unread(executor: InflightExecutor) -> None:
    """The late token of an aborted request is not written into the prompt of the next one, which is longer."""
    executor.graphs = None
    leaving, shorter = all_kinds()[6], all_kinds()[3]
    staying = msgspec.structs.replace(shorter, prompt_token_ids=list(range(1, 90)))  # with a repetition penalty
    alone = Driver(executor, MAX_LEN).run([staying])
    driver = Driver(executor, MAX_LEN, scheduler={"max_inflight_steps": 3, "max_num_seqs": 1})
    driver.core.add_request(leaving)
    for _ in range(20):
        driver.core.step()
    driver.core.abort([leaving.request_id])
    assert driver.run([staying])[0].token_ids == alone[0].token_ids


@pytest.mark.parametrize("case", [GraphCase(18), *CASES[1:]], ids=lambda case: case.name)
def test_every_size_of_batch(case: GraphCase) -> None:
    """What `python -m tests.gpu` checks with CUDA graphs, and that a graph was used for each decode step."""
    backend = RepeatedCalls()
    results = run_graph_checks(case, torch.device("cpu"), lambda: backend)
    padded = (3, 7, 15, 17) if case.dtype == torch.float32 else ()
    assert results == dict.fromkeys((f"{case.name}-{n}-requests" for n in sorted((1, 2, 4, 8, 16, 18, *padded))), None)
    assert backend.num_replays == len(results) * (NUM_STEPS - 1) + 1  # and for a prompt of one token, alone


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graph_sizes(300)[-5:] == [224, 240, 256, 288, 300]
    assert graph_sizes(10_000)[-1] == 512
