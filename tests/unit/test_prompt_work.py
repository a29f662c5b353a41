"""What requests ask of their prompts: logprobs of its tokens, an embedding, or only that it be computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor, expected_tokens, pooled, prompt_logprobs_of, states_of

from quire.engine.errors import EngineError, InvalidRequestError
from quire.engine.outputs import EngineRequest, PromptLogprobs
from quire.engine.pooling import POOLING_TYPES, PoolingParams
from quire.engine.prompt_logprobs import PromptLogprobsBuffer, by_token
from quire.engine.sampling_params import SamplingParams

PROMPT = [7, 1, 4, 9, 9, 2, 30, 31, 5, 6]


def embedding_of(prompt: list[int], kind: Any) -> list[float]:
    return pooled(PoolingParams(type=kind), dict(enumerate(states_of(prompt))), len(prompt)).tolist()


def scores_of(prompt: list[int]) -> list[float]:
    return prompt_logprobs_of(prompt, range(1, len(prompt)), states_of(prompt)[:-1]).logprobs[:, 0].tolist()


@pytest.mark.parametrize("kind", POOLING_TYPES)
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("inflight", [1, 3])
def test_an_embedding_ends_its_request(kind: Any, budget: int, inflight: int) -> None:
    core = make_core(max_num_batched_tokens=budget, max_inflight_steps=inflight)
    requests = [
        make_request("e", PROMPT, pooling=PoolingParams(type=kind)),
        make_request("a", PROMPT[:5], 4),
        make_request("one", [3], pooling=PoolingParams(type=kind)),
    ]
    done = run(core, requests)
    for request in (requests[0], requests[2]):
        end = done.ends[request.request_id]
        assert (end.finish_reason, end.new_token_ids, end.first_index) == ("stop", [], 0)
        assert end.embedding is not None
        assert end.embedding.tolist() == embedding_of(request.prompt_token_ids, kind)
    assert done.tokens["a"] == expected_tokens(PROMPT[:5], 4)
    stats = core.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (16, 4)


@pytest.mark.parametrize(("kind", "cached"), [("last", 8), ("mean", 0), ("cls", 0)])
def test_only_the_last_token_needs_no_more_than_what_is_not_cached(kind: Any, cached: int) -> None:
    core = make_core()
    run(core, [make_request("before", PROMPT, 1)])
    queried = core.stats().prefix_cache_queries
    done = run(core, [make_request("e", PROMPT, pooling=PoolingParams(type=kind))])
    end = done.ends["e"]
    assert end.embedding is not None
    assert end.embedding.tolist() == embedding_of(PROMPT, kind)
    assert end.num_cached_tokens == cached
    assert end.report is not None
    assert end.report.first_miss == ("too_short" if cached else "not_read")
    assert core.stats().prefix_cache_queries - queried == (10 if cached else 0), "what is not asked is no miss"


def test_an_embedded_prompt_is_a_prefix_for_others() -> None:
    core = make_core()
    run(core, [make_request("e", PROMPT, pooling=PoolingParams(type="mean"))])
    assert run(core, [make_request("a", PROMPT, 2)]).ends["a"].num_cached_tokens == 8


def test_an_embedded_prompt_may_fill_the_context() -> None:
    core = make_core(max_model_len=10)
    end = run(core, [make_request("e", PROMPT, pooling=PoolingParams())]).ends["e"]
    assert end.embedding is not None
    assert end.embedding.tolist() == embedding_of(PROMPT, "last")
    with pytest.raises(InvalidRequestError, match="11 tokens given, at most 10 are allowed"):
        core.add_request(make_request("f", [*PROMPT, 1], pooling=PoolingParams()))
    with pytest.raises(InvalidRequestError, match="leave no room for an answer"):
        core.add_request(make_request("g", PROMPT))


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("inflight", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompt_logprobs_come_with_the_first_output(budget: int, inflight: int, max_tokens: int) -> None:
    core = make_core(max_num_batched_tokens=budget, max_inflight_steps=inflight)
    run(core, [make_request("before", PROMPT, 1)])  # its blocks are cached, and must not be read
    requests = [make_request("s", PROMPT, max_tokens, prompt_logprobs=0), make_request("a", PROMPT[:6], 3)]
    done = run(core, requests)
    told = done.prompt_logprobs["s"]
    assert (told.first_position, told.token_ids[:, 0].tolist()) == (1, PROMPT[1:])
    assert told.logprobs[:, 0].tolist() == scores_of(PROMPT)
    assert done.tokens["s"] == expected_tokens(PROMPT, max_tokens)
    assert (done.ends["s"].finish_reason, done.ends["s"].num_cached_tokens) == ("length", 0)
    assert list(done.prompt_logprobs) == ["s"]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    for max_tokens in (0, 2):
        told = run(make_core(), [make_request("s", [4], max_tokens, prompt_logprobs=0)]).prompt_logprobs["s"]
        assert len(told.ranks) == 0
        assert by_token(told) == [None]


def test_a_failed_step_brings_no_logprobs_twice() -> None:
    """Chunks of 3: the steps of the second chunk and of the first token fail, and what was told before is kept."""
    executor = FakeExecutor(fail_steps=(1, 5))
    core = make_core(executor, max_num_batched_tokens=3)
    done = run(core, [make_request("s", PROMPT, 3, prompt_logprobs=0)])
    assert executor.num_restarts == 2
    assert done.prompt_logprobs["s"].logprobs[:, 0].tolist() == scores_of(PROMPT)
    asked = [new.first_prompt_logprob for step in executor.steps for new in step.new_rows]
    assert asked == [1, 4, 10], "it goes on where it was, and nothing is asked when all was told"


def test_resumed_requests_have_their_prompts_logprobs() -> None:
    known = expected_tokens(PROMPT, 2)
    done = run(make_core(), [make_request("s", PROMPT, 4, prompt_logprobs=0, resume_token_ids=known)])
    assert done.tokens["s"] == expected_tokens(PROMPT, 4)
    assert done.prompt_logprobs == {}


def test_nothing_but_the_prompt() -> None:
    core = make_core()
    done = run(core, [make_request("w", PROMPT, 0)])
    end = done.ends["w"]
    assert (end.finish_reason, end.new_token_ids, end.prompt_logprobs, end.embedding) == ("length", [], None, None)
    assert run(core, [make_request("a", PROMPT, 1)]).ends["a"].num_cached_tokens == 8, "the cache is warm"
    assert core.stats().num_generation_tokens == 1


def test_abort_of_what_has_no_answer() -> None:
    core = make_core(max_num_batched_tokens=3)
    requests = [
        make_request("e", PROMPT, pooling=PoolingParams()),
        make_request("w", PROMPT, 0, prompt_logprobs=0),
    ]
    done = run(core, requests, abort_at={1: ["e", "w"]})
    assert {end.finish_reason for end in done.ends.values()} == {"abort"}
    assert done.prompt_logprobs == {}
    assert core.stats().num_used_blocks == 0


def test_an_executor_that_loses_an_embedding_is_found_out() -> None:
    class Forgetful(FakeExecutor):
        def _embedding(self, *_: int) -> list[Any]:
            return []

    core = make_core(Forgetful())
    core.add_request(make_request("e", PROMPT, pooling=PoolingParams()))
    with pytest.raises(EngineError, match="brought no embedding for e"):
        core.step()


def test_the_buffer_refuses_gaps_and_repeats() -> None:
    def part(first: int, count: int) -> PromptLogprobs:
        return PromptLogprobs(
            first, np.zeros((count, 2), np.int32), np.zeros((count, 2), np.float32), np.ones(count, np.int32)
        )

    buffer = PromptLogprobsBuffer()
    buffer.add(part(1, 3))
    for first in (1, 3, 5):
        with pytest.raises(EngineError, match=f"position {first} came where those of 4 are next"):
            buffer.add(part(first, 2))
    with pytest.raises(EngineError, match="of 7 prompt tokens end before 4"):
        buffer.take(7)
    buffer.add(part(4, 3))
    assert buffer.take(7).token_ids.shape == (6, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"type": "max"}, "pooling"), ({"dimensions": 0}, "dimensions"), ({"normalize": 1}, "normalize")],
)
def test_pooling_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        PoolingParams(**fields)
    assert caught.value.param == param


def test_positions_that_a_request_needs() -> None:
    def needs(max_tokens: int, pooling: PoolingParams | None = None) -> int:
        params = SamplingParams(max_tokens=max_tokens)
        return EngineRequest(
            request_id="r", prompt_token_ids=PROMPT, sampling_params=params, seed=0, pooling=pooling
        ).max_num_tokens

    assert (needs(5), needs(0), needs(5, PoolingParams())) == (15, 11, 10)
