"""Drafts that nobody asked for are given where they pay: by what steps have taken, and how guesses have fared."""

from __future__ import annotations

import pytest
from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor, TimedExecutor, expected_tokens

from quire.engine.draft_gain import DraftGain, StepCosts, Wanted

REPETITIVE = 4  # a seed with which the fake model mostly repeats itself
PROMPT = [7, 8, 9, 10, 11]


def gain(seconds: dict[int, float], right: int, of: int) -> DraftGain:
    """Of every `of` guesses, `right` were right, evenly, whatever the trust in them."""
    made = DraftGain()
    for size, each in seconds.items():
        for has_drafts in (False, True) * 2:
            made.learn_step(size, each, has_drafts=has_drafts)
    for trust in range(17):
        for index in range(3 * of):
            made.learn(trust, was_right=(index + 1) * right // of > index * right // of)
    return made


def test_what_steps_take_is_a_mean_that_forgets() -> None:
    costs = StepCosts()
    for seconds in (40.0, 2.0, 2.0, 6.0):  # the first one had something else to do
        costs.learn(4, seconds)
    assert costs.seconds(4) == pytest.approx(2.125)  # the last one was held up
    costs.learn(4, 0.0)  # by a clock that has not moved
    for _ in range(300):
        costs.learn(4, 5.0)
    assert costs.seconds(4) == pytest.approx(5.0, abs=1e-4)


def test_a_size_that_was_not_seen_of_late_is_as_fast_as_it_could_be() -> None:
    costs = StepCosts()
    assert costs.seconds(3) == costs.seconds(8) > 0
    for _ in range(2):
        costs.learn(8, 20.0)
    assert costs.seconds(2) == 5.0
    for _ in range(2):
        costs.learn(2, 6.0)
    assert [costs.seconds(size) for size in (1, 2, 3, 7, 8)] == [3.0, 6.0, 6.0, 6.0, 20.0]
    for _ in range(253):
        costs.learn(4, 9.0)
    assert [round(costs.seconds(size), 6) for size in (2, 4, 7, 8)] == [6.0, 9.0, 9.0, 20.0]
    costs.learn(4, 9.0)
    assert [round(costs.seconds(size), 6) for size in (2, 4, 7, 8)] == [6.0, 9.0, 9.0, 9.0]
    costs.learn(8, 30.0)  # nothing is left of the 20, and one step says nothing
    assert round(costs.seconds(8), 6) == 9.0
    costs.learn(8, 31.0)
    assert costs.seconds(8) == 30.0


def test_a_step_without_drafts_is_tried_as_well() -> None:
    """Else steps whose requests always have a guess would never find out."""
    made = gain({}, 20, of=100)
    for size, seconds in ((5, 11.0), (6, 11.2)) * 2:
        made.learn_step(size, seconds, has_drafts=True)
    assert made.choose(dict.fromkeys(range(4), Wanted(0, 1)), num_requests=4, num_tokens=4, room=4) == {}


@pytest.mark.parametrize(
    ("seconds", "right", "drafts"),
    [
        ({4: 8.0, 5: 11.0, 6: 11.2, 7: 13.6, 8: 14.5}, 50, 0),
        ({4: 8.0, 5: 11.0, 6: 11.2, 7: 13.6, 8: 14.5}, 99, 4),  # 8 tokens of 14.5 come sooner than 4 of 8
        ({4: 8.0, 5: 11.0, 6: 11.2, 7: 13.6, 8: 16.5}, 99, 2),  # and here 6 of 11.2, though 5 of 11 do not
        ({4: 8.0, 5: 8.1, 6: 8.2, 7: 8.3, 8: 8.4}, 50, 4),
        ({4: 8.0, 5: 8.1, 6: 8.2, 7: 8.3, 8: 8.4}, 4, 0),  # four requests wait for a guess that is hardly ever right
        ({4: 8.0}, 10, 4),  # it is not known what more tokens cost
        ({}, 10, 4),
    ],
)
def test_drafts_are_given_where_tokens_come_sooner(seconds: dict[int, float], right: int, drafts: int) -> None:
    chosen = gain(seconds, right, of=100).choose(
        dict.fromkeys(range(4), Wanted(0, 1)), num_requests=4, num_tokens=4, room=4
    )
    assert sum(chosen.values()) == drafts
    assert set(chosen.values()) <= {1}


def test_what_steps_without_drafts_take_is_asked_again() -> None:
    made = gain({}, 50, of=100)
    for _ in range(2):
        made.learn_step(1, 0.01, has_drafts=False)
        made.learn_step(5, 0.04, has_drafts=True)
    wanted = {0: Wanted(0, 4)}
    assert made.choose(wanted, num_requests=1, num_tokens=1, room=7) == {}
    for _ in range(300):
        made.learn_step(5, 0.04, has_drafts=True)
    assert made.choose(wanted, num_requests=1, num_tokens=1, room=7) == {}


def test_the_likeliest_come_first_and_none_behind_one_that_is_left_out() -> None:
    chosen = gain({1: 1.0}, 80, of=100)
    for _ in range(60):
        chosen.learn(0, was_right=False)
    # A second draft counts 0.8 times what the first one does: 0.8, 0.64, 0.51 of row 5 and far less of row 3.
    assert chosen.choose({3: Wanted(0, 3), 5: Wanted(1, 3)}, num_requests=2, num_tokens=2, room=3) == {5: 3}
    assert chosen.choose({3: Wanted(0, 3), 5: Wanted(1, 3)}, num_requests=2, num_tokens=2, room=4) == {5: 3, 3: 1}
    assert chosen.choose({}, num_requests=2, num_tokens=2, room=3) == {}


def test_a_draft_is_lost_behind_a_wrong_one() -> None:
    made = gain({1: 1.0, 2: 1.5, 3: 2.0}, 60, of=100)
    # 1.6 tokens of 1.5 come sooner than one of 1.0 and than 1.6 + 0.36 of 2.0.
    assert made.choose({0: Wanted(0, 2)}, num_requests=1, num_tokens=1, room=7) == {0: 1}


def test_what_was_seen_of_guesses_fades() -> None:
    made = gain({}, 90, of=100)
    for _ in range(200):
        made.learn(3, was_right=False)
    # What steps take is not known: what might pay is tried, and what is hopeless is not.
    assert made.choose({0: Wanted(3, 1)}, num_requests=1, num_tokens=1, room=1) == {}
    assert made.choose({0: Wanted(4, 1)}, num_requests=1, num_tokens=1, room=1) == {0: 1}
    for _ in range(2):
        made.learn_step(1, 1.0, has_drafts=False)
        made.learn_step(2, 1.1, has_drafts=True)
    assert made.choose({0: Wanted(3, 1)}, num_requests=1, num_tokens=1, room=1) == {}
    assert made.choose({0: Wanted(4, 1)}, num_requests=1, num_tokens=1, room=1) == {0: 1}


@pytest.mark.parametrize(("extra", "share_with_drafts"), [(0.0, (0.3, 1.0)), (1.0, (0.0, 0.1))])
def test_an_engine_finds_out(extra: float, share_with_drafts: tuple[float, float]) -> None:
    """By a clock of the test: each token of a step takes `extra` of the time of the first."""
    executor = FakeExecutor(block_size=16)

    def clock() -> float:
        return sum(1.0 + extra * (step.total_num_scheduled_tokens - 1) for step in executor.steps)

    core = make_core(executor, clock=clock, num_speculative_tokens=None)
    requests = [make_request(str(i), [*PROMPT, i], 150, REPETITIVE) for i in range(2)]
    collector = run(core, requests)
    for i, request in enumerate(requests):
        assert collector.tokens[str(i)] == expected_tokens(request.prompt_token_ids, 150, REPETITIVE)
    assert core.scheduler.schedule(clock()) is None  # and what is not there costs nothing
    least, most = share_with_drafts
    assert least <= sum(step.drafts is not None for step in executor.steps) / len(executor.steps) <= most
    assert core.stats().num_accepted_tokens > 0  # what is not known is tried


def test_prompts_say_nothing_of_what_decodes_take() -> None:
    executor = FakeExecutor(block_size=16)

    def clock() -> float:
        return sum(100.0 if step.new_rows else 1.0 for step in executor.steps)

    core = make_core(executor, clock=clock, num_speculative_tokens=None)
    run(core, [make_request("a", PROMPT, 100, REPETITIVE)])
    gain = core.scheduler._speculation._policy
    assert isinstance(gain, DraftGain)
    for costs in (gain.costs, gain.draft_costs):
        assert {costs.seconds(size) for size in range(min(costs._seen), 9)} == {1.0}


def test_who_asks_for_drafts_gets_them() -> None:
    executor = FakeExecutor(block_size=16)

    def clock() -> float:
        return float(sum(step.total_num_scheduled_tokens for step in executor.steps))

    run(make_core(executor, clock=clock, num_speculative_tokens=4), [make_request("a", PROMPT, 150, REPETITIVE)])
    assert sum(step.drafts is not None for step in executor.steps) > 20


def test_a_guess_for_a_token_under_way_comes_before_the_drafts() -> None:
    """It has to be right as well, and is no draft itself."""
    made = gain({1: 1.0, 2: 1.5, 3: 2.0}, 60, of=100)
    # 1.36 tokens of 1.5 come no sooner than one of 1.0, where 1.6 of 1.5 did.
    assert made.choose({0: Wanted(0, 2, num_pending=1)}, num_requests=1, num_tokens=1, room=7) == {}
    likely = gain({1: 1.0, 2: 1.5, 3: 2.0}, 90, of=100)
    assert likely.choose({0: Wanted(0, 1, num_pending=1)}, num_requests=1, num_tokens=1, room=7) == {0: 1}


@pytest.mark.parametrize(("num_requests", "asked", "has_drafts"), [(3, None, True), (4, None, False), (4, 2, True)])
def test_few_requests_are_looked_at(num_requests: int, asked: int | None, has_drafts: bool) -> None:
    """Of many, the search takes what it brings; who asks for drafts has them all the same."""
    executor = FakeExecutor(block_size=16)
    core = make_core(executor, clock=lambda: float(len(executor.steps)), num_speculative_tokens=asked)
    run(core, [make_request(str(i), [*PROMPT, i], 60, REPETITIVE) for i in range(num_requests)])
    of_all = [step.drafts is not None for step in executor.steps if len(step.rows) == num_requests]
    assert any(of_all) is has_drafts


def test_steps_without_drafts_are_timed_where_they_are_planned_ahead() -> None:
    """Each takes a second, and who takes in its results another one until the next is planned, unless that is."""
    executor = TimedExecutor(block_size=16)
    core = make_core(executor, clock=executor.clock, num_speculative_tokens=None, max_inflight_steps=2)
    core.add_request(make_request("a", PROMPT, 150, REPETITIVE))
    while core.has_work:
        core.step()
        if not core._inflight:
            executor.now += 1.0
    gain = core.scheduler._speculation._policy
    assert isinstance(gain, DraftGain)
    assert {mean for mean, _, _ in gain.costs._seen.values()} == {1.0}
    # With drafts it is planned alone, and so is the one behind it.
    assert {mean for mean, _, _ in gain.draft_costs._seen.values()} == {3.0}


def test_the_time_when_nothing_was_to_do_is_no_steps() -> None:
    """A prompt of one token is computed as a decode is."""
    executor = FakeExecutor(block_size=16)
    waited = 0.0
    core = make_core(executor, clock=lambda: waited + len(executor.steps), num_speculative_tokens=None)
    for i in range(4):
        run(core, [make_request(str(i), [i + 1], 20)])
        waited += 100.0
    gain = core.scheduler._speculation._policy
    assert isinstance(gain, DraftGain)
    assert gain.costs.seconds(1) == 1.0
