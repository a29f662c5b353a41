"""Prompt logprobs and embeddings are those of `transformers` within 1e-4, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from core_driver import Answer, Driver
from hf_reference import Reference
from rank_executors import ThreadExecutor
from tiny_llama import VOCAB_SIZE, make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.executor import Executor
from quire.engine.model_source import ModelInfo, load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.pooling import POOLING_TYPES, PoolingParams
from quire.engine.sampling_params import SamplingParams
from quire.workers import prompt_logprobs
from quire.workers.local_executor import LocalExecutor

TOP = 4
MAX_LEN = 256
LENGTHS = [1, 5, 16, 17, 40, 90, 255]
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelInfo, Reference]:
    directory = tmp_path_factory.mktemp("tiny")
    model = make_tiny_llama(directory)
    return load_model_info(ModelConfig(model=str(directory))), Reference(model)


@pytest.fixture(scope="module")
def executor(tiny: tuple[ModelInfo, Reference]) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), tiny[0])
    yield executor
    executor.shutdown()


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def scored(prompt: list[int], index: int, max_tokens: int = 1) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=TOP)
    return EngineRequest(request_id=f"s{index}", prompt_token_ids=prompt, sampling_params=params, seed=0)


def embedded(prompt: list[int], index: int, pooling: PoolingParams) -> EngineRequest:
    return EngineRequest(
        request_id=f"e{index}", prompt_token_ids=prompt, sampling_params=SamplingParams(), seed=0, pooling=pooling
    )


def check_scores(reference: Reference, prompt: list[int], answer: Answer) -> None:
    told = answer.prompt_logprobs
    assert told is not None
    assert (len(told), told[0]) == (len(prompt), None)
    if len(prompt) == 1:
        return
    expected = reference.logits(prompt[:1], prompt[1:]).log_softmax(dim=-1)
    rest = [entry for entry in told[1:] if entry is not None]
    assert [entry.token_id for entry in rest] == prompt[1:]
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])
    torch.testing.assert_close(torch.tensor([[entry.logprob] for entry in rest]), own, **TOLERANCE)
    top = torch.tensor([[logprob for _, logprob in entry.top] for entry in rest])
    torch.testing.assert_close(top, expected.topk(TOP).values, **TOLERANCE)
    of_ids = expected.gather(1, torch.tensor([[token_id for token_id, _ in entry.top] for entry in rest]))
    torch.testing.assert_close(of_ids, expected.topk(TOP).values, **TOLERANCE)
    ranks = torch.tensor([entry.rank for entry in rest])
    # Within the tolerance: what is clearly likelier comes before, what is clearly less likely after.
    assert (ranks > (expected > own + 1e-4).sum(dim=-1)).all()
    assert (ranks <= (expected > own - 1e-4).sum(dim=-1)).all()


def expected_embedding(reference: Reference, prompt: list[int], pooling: PoolingParams) -> torch.Tensor:
    hidden = reference.hidden_states(prompt)
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(dim=0)}[pooling.type]
    vector = vector[: pooling.dimensions]
    return vector / vector.norm() if pooling.normalize else vector


def check_embedding(reference: Reference, request: EngineRequest, answer: Answer) -> None:
    assert request.pooling is not None
    assert answer.embedding is not None
    assert answer.token_ids == []
    expected = expected_embedding(reference, request.prompt_token_ids, request.pooling)
    torch.testing.assert_close(answer.embedding, expected, **TOLERANCE)


Mode = Callable[[Executor, list[EngineRequest]], list[Answer]]


def alone(executor: Executor, requests: list[EngineRequest]) -> list[Answer]:
    return [Driver(executor, MAX_LEN).run([request])[0] for request in requests]


def batched(executor: Executor, requests: list[EngineRequest]) -> list[Answer]:
    return Driver(executor, MAX_LEN).run(requests)


def chunked(executor: Executor, requests: list[EngineRequest]) -> list[Answer]:
    return Driver(executor, MAX_LEN, scheduler={"max_num_batched_tokens": 7}).run(requests)


def two_steps_in_flight(executor: Executor, requests: list[EngineRequest]) -> list[Answer]:
    return Driver(executor, MAX_LEN, scheduler={"max_num_batched_tokens": 30, "max_inflight_steps": 2}).run(requests)


def with_cached_prefixes(executor: Executor, requests: list[EngineRequest]) -> list[Answer]:
    driver = Driver(executor, MAX_LEN)
    driver.greedy([request.prompt_token_ids[: MAX_LEN - 1] for request in requests], 1)
    answers = driver.run(requests)
    for request, answer in zip(requests, answers, strict=True):
        reads = request.pooling is not None and not request.pooling.needs_whole_prompt
        cached = (len(request.prompt_token_ids) - 1) // 16 * 16 if reads else 0
        assert answer.num_cached_tokens == cached
    return answers


MODES = [alone, batched, chunked, two_steps_in_flight, with_cached_prefixes]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_prompt_logprobs(tiny: tuple[ModelInfo, Reference], executor: LocalExecutor, mode: Mode) -> None:
    requests = [scored(prompt, i, max_tokens=i % 2) for i, prompt in enumerate(prompts())]
    for request, answer in zip(requests, mode(executor, requests), strict=True):
        check_scores(tiny[1], request.prompt_token_ids, answer)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("kind", POOLING_TYPES)
def test_embeddings(tiny: tuple[ModelInfo, Reference], executor: LocalExecutor, mode: Mode, kind: str) -> None:
    poolings = [
        PoolingParams(type=kind),  # type: ignore[arg-type]
        PoolingParams(type=kind, normalize=False),  # type: ignore[arg-type]
        PoolingParams(type=kind, dimensions=11),  # type: ignore[arg-type]
    ]
    whole = prompts([*LENGTHS, MAX_LEN])
    requests = [embedded(prompt, i, poolings[i % 3]) for i, prompt in enumerate(whole)]
    for request, answer in zip(requests, mode(executor, requests), strict=True):
        check_embedding(tiny[1], request, answer)


@pytest.mark.parametrize("kind", ["scored", *POOLING_TYPES])
def test_preempted(tiny: tuple[ModelInfo, Reference], executor: LocalExecutor, kind: str) -> None:
    """Prompts that are computed two tokens at a time, next to answers that grow until these give way."""
    generator = torch.Generator().manual_seed(5)
    fresh = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (14, 14, 60)]
    grow = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    requests = [
        EngineRequest(request_id=f"g{i}", prompt_token_ids=prompt, sampling_params=grow, seed=0)
        for i, prompt in enumerate(fresh[:2])
    ]
    last = scored(fresh[2], 0, 30) if kind == "scored" else embedded(fresh[2], 0, PoolingParams(type=kind))  # type: ignore[arg-type]
    driver = Driver(executor, MAX_LEN, scheduler={"long_prefill_token_threshold": 2}, cache={"num_kv_blocks": 9})
    answers = driver.run([*requests, last])
    assert answers[2].num_preemptions > 0
    if kind == "scored":
        check_scores(tiny[1], fresh[2], answers[2])
        tiny[1].check_greedy(fresh[2], answers[2].token_ids)
    else:
        check_embedding(tiny[1], last, answers[2])
    for i in (0, 1):
        tiny[1].check_greedy(fresh[i], answers[i].token_ids)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)])
def test_ranks(tiny: tuple[ModelInfo, Reference], grid: tuple[int, int]) -> None:
    """Tensor-parallel ranks and pipeline stages."""
    info, reference = tiny
    sections = {
        "model": {"num_threads": 1},
        "parallel": {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]},
        "cache": {"num_kv_blocks": 200},
        "scheduler": {"max_num_batched_tokens": 50},
    }
    executor = ThreadExecutor(EngineConfig.model_validate(sections), info)
    scores = [scored(prompt, i) for i, prompt in enumerate(prompts())]
    vectors = [embedded(prompt, i, PoolingParams(type="mean")) for i, prompt in enumerate(prompts())]
    answers = Driver(executor, MAX_LEN, **sections).run([*scores, *vectors])
    executor.shutdown()
    for request, answer in zip(scores, answers, strict=False):
        check_scores(reference, request.prompt_token_ids, answer)
    for request, answer in zip(vectors, answers[len(scores) :], strict=True):
        check_embedding(reference, request, answer)


def test_logits_are_computed_in_slices(
    tiny: tuple[ModelInfo, Reference], executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the prompt, never more logits at a time than fit the slice."""
    sizes: list[int] = []
    original = prompt_logprobs.logprobs_of

    def spy(logits: torch.Tensor, *rest: object) -> object:
        sizes.append(len(logits))
        return original(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt_logprobs, "_SLICE_ELEMENTS", 20 * VOCAB_SIZE)
    monkeypatch.setattr(prompt_logprobs, "logprobs_of", spy)
    requests = [scored(prompt, i) for i, prompt in enumerate(prompts())]
    for request, answer in zip(requests, batched(executor, requests), strict=True):
        check_scores(tiny[1], request.prompt_token_ids, answer)
    assert max(sizes) == 20
    assert sum(sizes) == sum(LENGTHS) - len(LENGTHS)
