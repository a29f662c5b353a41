"""Random models of every family: greedy tokens are those of `transformers`, and logprobs agree within 1e-4.

In every way of running them: alone, batched, in chunks, with prefixes from the cache, on two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from family_parity import NUM_TOKENS, TOP, FamilyUnderTest, Parity
from rank_executors import ThreadExecutor
from tiny_families import TINY_FAMILIES

from quire.engine.config import EngineConfig
from quire.engine.model_source import SUPPORTED_ARCHITECTURES


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


def test_two_ranks(model: FamilyUnderTest) -> None:
    """Fused tensors, biases, norms over all heads and experts are cut as heads and columns are."""
    sections = {
        "model": {"num_threads": 1},
        "parallel": {"tensor_parallel_size": 2},
        "cache": {"num_kv_blocks": 100},
    }
    executor = ThreadExecutor(EngineConfig.model_validate(sections), model.info)
    answers = model.driver(executor, cache={"num_kv_blocks": 100}).greedy(model.prompts, NUM_TOKENS, TOP)
    executor.shutdown()
    check(model.compare(answers))
