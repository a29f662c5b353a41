"""Drafts: how they are found, who gets them, and that they change nothing but the number of steps."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import pairwise

import pytest
from engine_helpers import Collector, make_core, make_request, run
from fake_executor import FakeExecutor, TimedExecutor, expected_tokens

from quire.engine.config import EngineConfig
from quire.engine.draft_gain import DraftGain, EveryDraft
from quire.engine.errors import ConfigError
from quire.engine.outputs import DraftTokens, ModelRunnerOutput, SchedulerOutput
from quire.engine.speculation import NgramDrafter, num_speculative_tokens

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
    assert NgramDrafter(known, EveryDraft()).draft(4) == drafts


def test_a_drafter_that_learns_is_as_one_that_knew() -> None:
    tokens = expected_tokens(PROMPT, 20_000, REPETITIVE)
    learning = NgramDrafter(tokens[:3], EveryDraft())
    for start in range(3, len(tokens), 7):
        learning.learn(tokens[start : start + 7])
        if start < 8192 and start % 91 == 3:
            assert learning.draft(5) == NgramDrafter(tokens[: start + 7], EveryDraft()).draft(5)
    assert len(learning._tokens) <= 2 * 4 * 8192  # what lies far behind is forgotten


def test_trust_is_the_number_of_right_guesses_in_a_row() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 5, 1, 2, 3], EveryDraft())
    assert drafter.draft(2) == [4, 5]
    drafter.learn([4, 5, 1])  # both, and the token behind them, of which it said nothing
    assert drafter.trust == 2
    assert drafter.draft(2) == [2, 3]
    drafter.learn([2, 9])  # a checked guess was right, and the next one wrong
    assert drafter.trust == 0
    drafter.trust = 5
    assert drafter.draft(2) == []
    drafter.learn([7])
    assert drafter.trust == 4


@pytest.mark.parametrize("num_requests", range(1, 10))
def test_steps_with_drafts_have_up_to_8_tokens(num_requests: int) -> None:
    executor = FakeExecutor(block_size=16)
    core = make_core(executor, num_speculative_tokens=7, max_num_seqs=16)
    requests = [make_request(str(i), [*PROMPT, i], 90 - 5 * i, REPETITIVE) for i in range(num_requests)]
    collector = run(core, requests)
    for i, request in enumerate(requests):
        assert collector.tokens[str(i)] == expected_tokens(request.prompt_token_ids, 90 - 5 * i, REPETITIVE)
    drafted = [step for step in executor.steps if step.drafts is not None]
    assert drafted
    assert max(step.total_num_scheduled_tokens for step in drafted) == 8
    assert all(len(step.rows) < 8 for step in drafted)


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


STEPS_DRAFTS_ACCEPTED = (70, 47, 30)


class Ahead(FakeExecutor):
    """Notes of each step how many are in flight when it is planned, and what is known of the first request then."""

    def __init__(self) -> None:
        super().__init__(block_size=16)
        self.planned: list[tuple[int, list[int], DraftTokens | None]] = []

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        known = self.core.scheduler.requests["0"].all_token_ids
        self.planned.append((len(self.core._inflight), known, step.drafts))
        return super().execute(step)

    def run(self, num_requests: int, num_drafts: int | None = 4, **scheduler: object) -> None:
        self.core = make_core(self, num_speculative_tokens=num_drafts, **scheduler)
        requests = [make_request(str(i), [*PROMPT, i], 90, REPETITIVE) for i in range(num_requests)]
        collector = run(self.core, requests)
        for i, request in enumerate(requests):
            assert collector.tokens[str(i)] == expected_tokens(request.prompt_token_ids, 90, REPETITIVE)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_is_planned_beside_another_unless_there_is_a_guess(depth: int) -> None:
    executor = Ahead()
    executor.run(1, max_inflight_steps=depth)
    num_beside = 0
    for (num_before, _, drafts_before), (num_inflight, known, drafts) in pairwise(executor.planned):
        if num_inflight:
            num_beside += 1
            assert drafts_before is drafts is None
            # The token under way is the last of a block, or of the answer: there is no room for a draft behind it.
            assert NgramDrafter(known, EveryDraft()).draft(4) == [] or len(known) % 16 == 15 or len(known) >= 94
        elif num_before:  # one was planned beside another, and then none
            assert NgramDrafter(known[:-1], EveryDraft()).draft(4) != []
    assert num_beside > 5
    assert sum(drafts is not None for _, _, drafts in executor.planned) > 5


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(8, 4), (4, None)])
def test_a_step_for_which_no_drafts_are_looked_for_is_planned_beside_another(
    num_requests: int, num_drafts: int | None
) -> None:
    executor = Ahead()
    executor.run(num_requests, num_drafts, max_inflight_steps=2)
    assert all(num_inflight == 1 for num_inflight, _, _ in executor.planned[1:])
    assert executor.core.stats().num_draft_tokens == 0


def test_nobody_waits_for_drafts_that_a_prompt_leaves_no_room_for() -> None:
    """It comes in parts, or is still to come."""
    executor = Ahead()
    executor.core = core = make_core(executor, num_speculative_tokens=4, max_inflight_steps=2, max_num_batched_tokens=9)
    known = [*PROMPT, 0, *expected_tokens([*PROMPT, 0], 40, REPETITIVE)]
    core.add_request(make_request("0", known[:40], 40, REPETITIVE))
    collector = Collector()
    collector.start(make_request("0", known[:40], 40, REPETITIVE))
    while not (
        core._inflight
        and executor.planned[-1][2] is None
        and NgramDrafter(known[: 40 + len(collector.tokens["0"])], EveryDraft()).draft(1)
        and len(collector.tokens["0"]) > 10
    ):
        collector.take(core.step())
    num_before = len(executor.planned)
    late = make_request("1", list(range(60, 120)), 2)
    core.add_request(late)
    collector.start(late)
    while not collector.tokens["1"]:
        collector.take(core.step())
    *of_prompt, _ = executor.planned[num_before:]
    assert len(of_prompt) >= 60 // 9
    assert {(num_inflight, drafts) for num_inflight, _, drafts in of_prompt} == {(1, None)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_a_step_takes_is_not_counted_for_the_next_one(depth: int) -> None:
    """Each takes a second here, from when the one before is back, or from its own plan."""
    executor = TimedExecutor()
    core = make_core(executor, clock=executor.clock, num_speculative_tokens=None, max_inflight_steps=depth)
    run(core, [make_request("a", PROMPT, 100, REPETITIVE)])
    gain = core.scheduler._speculation._policy
    assert isinstance(gain, DraftGain)
    for costs in (gain.costs, gain.draft_costs):
        assert {mean for mean, _, _ in costs._seen.values()} == {1.0}


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


def test_nothing_follows_the_token_that_ends_an_answer_amid_right_drafts() -> None:
    num_behind = 0  # right drafts that nobody wants
    for length in range(20, 60):
        known = PROMPT + expected_tokens(PROMPT, length, REPETITIVE)
        expected = expected_tokens(known, 6, REPETITIVE)
        for stop in set(expected):
            executor = FakeExecutor(num_blocks=64)
            core = make_core(executor, num_speculative_tokens=7)
            collector = run(core, [make_request("a", known, 60, REPETITIVE, stop_token_ids=(stop,))])
            assert collector.tokens["a"] == expected[: expected.index(stop) + 1]
            assert collector.ends["a"].finish_reason == "stop"
            (tokens,) = executor._tokens.values()
            num_behind += len(tokens) - len(known) - len(collector.tokens["a"])
    assert num_behind > 0


def test_no_draft_stands_where_the_answer_has_ended() -> None:
    num_drafted_to_the_end = 0
    for max_tokens in range(40, 60):
        executor, last = FakeExecutor(num_blocks=64), len(PROMPT) + max_tokens - 1  # it is sampled, not computed
        run(make_core(executor, num_speculative_tokens=7), [make_request("a", PROMPT, max_tokens, REPETITIVE)])
        ends = [int(step.num_computed_tokens[0] + step.num_scheduled_tokens[0]) for step in executor.steps]
        assert ends[-1] == max(ends) == last
        num_drafted_to_the_end += executor.steps[-1].drafts is not None
    assert num_drafted_to_the_end > 0


def test_a_draft_takes_no_block() -> None:
    """Blocks are asked for as without drafts: when the last known token needs one."""
    executor = FakeExecutor(num_blocks=64)
    core = make_core(executor, num_speculative_tokens=7)
    core.add_request(make_request("a", PROMPT, 60, REPETITIVE))
    num_drafted = 0
    while core.has_work:
        core.step()
        step = executor.steps[-1]
        num_blocks = core.scheduler.running.num_blocks[step.rows[0]]
        end = step.num_computed_tokens[0] + step.num_scheduled_tokens[0]
        assert end <= num_blocks * 4
        if step.drafts is not None:
            num_drafted += 1
            assert num_blocks == -(-(step.num_computed_tokens[0] + 1) // 4)
    assert num_drafted > 5


def test_preemption_and_drafts() -> None:
    requests = [make_request(name, [*PROMPT, i], 30, REPETITIVE) for i, name in enumerate("abc")]
    for count in (0, 7):
        core = make_core(FakeExecutor(num_blocks=20), num_speculative_tokens=count, caching=False)
        collector = run(core, requests)
        for request in requests:
            assert collector.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, 30, REPETITIVE)
        assert core.stats().num_preemptions > 0
        assert (core.stats().num_accepted_tokens > 0) is (count > 0)


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

    for preferred in (0, 4):
        assert num_speculative_tokens(config(), preferred) == preferred
        assert num_speculative_tokens(config(scheduler={"num_speculative_tokens": 7}), preferred) == 7
        assert num_speculative_tokens(config(scheduler={"num_speculative_tokens": 0}), preferred) == 0
    pipeline = {"pipeline_parallel_size": 2}
    assert num_speculative_tokens(config(parallel=pipeline), 4) == 0
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        num_speculative_tokens(config(parallel=pipeline, scheduler={"num_speculative_tokens": 1}), 4)
