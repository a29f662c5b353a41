"""Drafts: how they are found, who gets them, and that they change nothing but the number of steps."""

from __future__ import annotations

import pytest
from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor, expected_tokens

from quire.engine.config import EngineConfig
from quire.engine.core import num_speculative_tokens
from quire.engine.errors import ConfigError
from quire.engine.speculation import NgramDrafter, _reach

REPETITIVE = 4  # a seed with which the fake model mostly repeats itself
PROMPT = [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3], [4, 9, 2, 3]),  # three tokens say more than the two that were later
        ([9, 2, 3, 4, 8, 2, 3, 5, 6, 7, 2, 3], [5, 6, 7, 2]),  # of two of the same length the later one
        ([5, 1, 1, 1], [1, 1, 1, 1]),  # beyond the end it goes on with its own guesses
        ([4, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1, 2, 1], []),  # one token says nothing
        ([3], []),
        ([256, 1, 65536, 256, 0, 0, 1], []),  # 0, 0, 1 stands there as bytes, but not as tokens
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_what_followed_the_last_tokens_before(known: list[int], drafts: list[int]) -> None:
    assert NgramDrafter(known).draft(4) == drafts


def test_a_drafter_that_learns_is_as_one_that_knew() -> None:
    tokens = expected_tokens(PROMPT, 20_000, REPETITIVE)
    learning = NgramDrafter(tokens[:3])
    for start in range(3, len(tokens), 7):
        learning.learn(tokens[start : start + 7])
        if start < 8192 and start % 91 == 3:
            assert learning.draft(5) == NgramDrafter(tokens[: start + 7]).draft(5)
    assert len(learning._tokens) <= 2 * 4 * 8192  # what lies far behind is forgotten


def test_trust_is_the_number_of_right_guesses_in_a_row() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 5, 1, 2, 3])
    assert drafter.draft(3) == [4, 5, 1]
    drafter.learn([4, 5, 1])
    assert drafter.trust == 3
    assert drafter.draft(2) == [2, 3]
    drafter.learn([2, 9])  # a checked guess was right, and the next one wrong
    assert drafter.trust == 0
    drafter.trust = 5
    assert drafter.draft(2) == []
    drafter.learn([7])
    assert drafter.trust == 4


def test_drafts_are_given_while_they_are_nearly_free() -> None:
    assert [_reach(trust, 1) for trust in (0, 1, 2, 6, 7, 16)] == [1, 2, 3, 7, 7, 7]
    assert [_reach(16, entries) for entries in (6, 7, 8, 40)] == [2, 1, 0, 0]
    assert [_reach(0, entries) for entries in (7, 8)] == [1, 0]


def test_the_answer_is_the_same_in_fewer_steps() -> None:
    """Exact numbers: of a model that says 10, 11, 10, 11, ... but for one token in eight."""
    executor = FakeExecutor(num_blocks=64)
    core = make_core(executor, num_speculative_tokens=4)
    expected = expected_tokens(PROMPT, 100, REPETITIVE)
    collector = run(core, [make_request("a", PROMPT, 100, REPETITIVE)])
    assert collector.tokens["a"] == expected
    stats = core.stats()
    assert stats.num_generation_tokens == 100
    assert stats.num_steps == 100 - stats.num_accepted_tokens
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    assert (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens) == STEPS_DRAFTS_ACCEPTED
    # Every token is computed once, but for the drafts that were wrong.
    computed = sum(step.total_num_scheduled_tokens for step in executor.steps)
    assert computed == len(PROMPT) + 99 + stats.num_draft_tokens - stats.num_accepted_tokens


STEPS_DRAFTS_ACCEPTED = (67, 56, 33)


@pytest.mark.parametrize("max_inflight_steps", [1, 2, 3])
@pytest.mark.parametrize("end", ["length", "stop", "min_tokens"])
def test_an_answer_ends_where_it_would_end_without(max_inflight_steps: int, end: str) -> None:
    expected = expected_tokens(PROMPT, 60, REPETITIVE)
    stop = {"length": (), "stop": (expected[40],), "min_tokens": (expected[40],)}[end]
    fields: dict[str, object] = {"stop_token_ids": stop, "logprobs": 1}
    if end == "min_tokens":
        fields["min_tokens"] = 45
    answers = []
    for count in (0, 1, 4, 7):
        core = make_core(num_speculative_tokens=count, max_inflight_steps=max_inflight_steps)
        collector = run(core, [make_request("a", PROMPT, 60, REPETITIVE, **fields)])
        answers.append((collector.tokens["a"], collector.ends["a"].finish_reason, collector.ends["a"].stop_reason))
        assert (core.stats().num_accepted_tokens > 0) is (count > 0)
        assert core.stats().num_used_blocks == 0
    assert answers[1:] == answers[:1] * 3
    if end == "length":
        assert answers[0][0] == expected


def test_a_draft_takes_no_block_that_another_needs() -> None:
    """With a cache that just holds what is known, requests with and without drafts preempt each other alike."""
    requests = [make_request(name, [*PROMPT, i], 30, REPETITIVE) for i, name in enumerate("abc")]
    preemptions = []
    for count in (0, 7):
        core = make_core(FakeExecutor(num_blocks=28), num_speculative_tokens=count, caching=False)
        collector = run(core, requests)
        for request in requests:
            assert collector.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, 30, REPETITIVE)
        preemptions.append(core.stats().num_preemptions)
    assert preemptions == [0, 0]


def test_prefixes_are_cached_as_without_drafts() -> None:
    """What was guessed wrongly is in no block that another request finds."""
    answers, hits = [], []
    for count in (0, 7):
        core = make_core(num_speculative_tokens=count)
        first = run(core, [make_request("a", PROMPT, 50, REPETITIVE)]).tokens["a"]
        second = run(core, [make_request("b", PROMPT + first, 20, REPETITIVE)])
        answers.append(second.tokens["b"])
        hits.append(core.stats().prefix_cache_hits)
    assert answers[0] == answers[1] == expected_tokens(PROMPT, 70, REPETITIVE)[50:]
    assert hits == [52, 52]


def test_who_gets_drafts() -> None:
    def config(**sections: object) -> EngineConfig:
        return EngineConfig.model_validate(sections)

    assert num_speculative_tokens(config(), 1) == 4
    assert num_speculative_tokens(config(), 2) == 0
    assert num_speculative_tokens(config(scheduler={"max_inflight_steps": 1}), 2) == 4
    assert num_speculative_tokens(config(scheduler={"num_speculative_tokens": 7}), 2) == 7
    assert num_speculative_tokens(config(scheduler={"num_speculative_tokens": 0}), 1) == 0
    pipeline = {"pipeline_parallel_size": 2}
    assert num_speculative_tokens(config(parallel=pipeline), 1) == 0
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        num_speculative_tokens(config(parallel=pipeline, scheduler={"num_speculative_tokens": 1}), 1)
