"""Several steps in flight in a pipeline: who is in which, exactly."""

from __future__ import annotations

import pytest
from engine_helpers import make_core, make_request, run
from fake_executor import FakeExecutor, expected_tokens

from quire.engine.core import EngineCore
from quire.engine.outputs import SchedulerOutput


def pipeline(num_stages: int = 2, **options: object) -> tuple[EngineCore, FakeExecutor]:
    executor = FakeExecutor(num_stages=num_stages, num_blocks=200)
    return make_core(executor, **{"max_num_seqs": 16, "max_num_batched_tokens": 512, **options}), executor  # type: ignore[arg-type]


def rows_and_tokens(steps: list[SchedulerOutput]) -> list[tuple[list[int], list[int]]]:
    return [(step.rows.tolist(), step.num_scheduled_tokens.tolist()) for step in steps]


def test_rows_that_decode_take_turns() -> None:
    """4 short prompts are one step; from then on two rows are on each stage."""
    core, executor = pipeline()
    run(core, [make_request(f"r{i}", [i], 6) for i in range(4)])
    first, *others = rows_and_tokens(executor.steps)
    assert first == ([0, 1, 2, 3], [1, 1, 1, 1])
    assert others == [([0, 1], [1, 1]), ([2, 3], [1, 1])] * 5


def test_a_pipeline_of_three_stages_has_three_steps_under_way() -> None:
    core, executor = pipeline(3)
    requests = [make_request(f"r{i}", [i], 5) for i in range(5)]
    run(core, requests)
    assert rows_and_tokens(executor.steps)[1:7] == [([0, 1], [1, 1]), ([2, 3], [1, 1]), ([4], [1])] * 2
    for request in requests:
        core.add_request(request)
    core.step()
    core.step()
    assert len(core._inflight) == 2  # and a third is planned before the next one is waited for
    before = len(executor.steps)
    core.step()
    assert len(executor.steps) == before + 1


def test_unequal_steps_become_equal() -> None:
    """Three of the four rows of one step end: one of the other's moves over."""
    core, executor = pipeline()
    lengths = [3, 3, 3, 12, 12, 12, 12, 12]
    run(core, [make_request(f"r{i}", [i], length) for i, length in enumerate(lengths)])
    sizes = [len(step.rows) for step in executor.steps]
    assert sizes[:5] == [8, 4, 4, 4, 4]  # rows 0-3, rows 4-7, and once more
    assert sizes[5:9] == [1, 3, 2, 3]  # row 3 alone; of rows 4-7 three may go on, the fourth goes with row 3
    assert rows_and_tokens(executor.steps)[6:9] == [([4, 5, 6], [1] * 3), ([3, 7], [1] * 2), ([4, 5, 6], [1] * 3)]


def test_a_long_prompt_is_on_all_stages_at_once() -> None:
    core, executor = pipeline(max_num_batched_tokens=512)
    run(core, [make_request("r", [1] * 150, 2)])
    assert rows_and_tokens(executor.steps) == [([0], [75]), ([0], [75]), ([0], [1])]
    core, executor = pipeline(max_num_batched_tokens=40)
    run(core, [make_request("r", [1] * 150, 2)])
    assert rows_and_tokens(executor.steps)[:4] == [([0], [40]), ([0], [40]), ([0], [40]), ([0], [30])]


def test_short_prompts_are_not_cut() -> None:
    """A step of a few tokens takes hardly longer than one of half as many."""
    core, executor = pipeline()
    run(core, [make_request("r", [1] * 60, 2)])
    assert rows_and_tokens(executor.steps) == [([0], [60]), ([0], [1])]


def test_prompts_and_rows_that_decode_share_steps() -> None:
    """Rows that decode go first in their step, and the prompt fills it: 75 = half of the 150 tokens that are left."""
    core, executor = pipeline()
    requests = [make_request(f"r{i}", [i], 8) for i in range(4)]
    for request in requests:
        core.add_request(request)
    core.step()
    core.step()
    seen = len(executor.steps)
    core.add_request(make_request("long", [7] * 150, 2))
    while core.has_work:
        core.step()
    assert rows_and_tokens(executor.steps)[seen : seen + 3] == [
        ([0, 1, 4], [1, 1, 75]),
        ([2, 3, 4], [1, 1, 75]),
        ([0, 1], [1, 1]),
    ]


def test_every_stage_is_told_the_last_tokens() -> None:
    """Of rows that sample; a prompt in chunks has none until its end."""
    core, executor = pipeline(max_num_batched_tokens=3)
    prompt = [5, 6, 7, 8]
    run(core, [make_request("r", prompt, 3)])
    expected = expected_tokens(prompt, 3)
    told = [step.last_token_ids.tolist() for step in executor.steps if step.last_token_ids is not None]
    assert told == [[-1], [8], [expected[0]], [expected[1]]]


def test_without_a_pipeline_nothing_is_told() -> None:
    executor = FakeExecutor()
    run(make_core(executor, max_inflight_steps=2), [make_request("r", [1, 2], 3)])
    assert all(step.last_token_ids is None for step in executor.steps)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_any_depth_gives_the_same_tokens(depth: int) -> None:
    core, executor = pipeline(max_inflight_steps=depth)
    requests = [make_request(f"r{i}", [i] * 9, 12, seed=i) for i in range(7)]
    collector = run(core, requests)
    for request in requests:
        assert collector.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, 12, request.seed)
    assert max(len(step.rows) for step in executor.steps[2 * depth :]) == -(-7 // depth)


def test_after_a_failure_steps_are_equal_again() -> None:
    executor = FakeExecutor(num_stages=2, num_blocks=200, fail_steps=(3,))
    core = make_core(executor, max_num_seqs=16, max_num_batched_tokens=512)
    run(core, [make_request(f"r{i}", [i] * 40, 8) for i in range(4)])
    # 160 tokens of prompts and 6 of answers in two equal steps: what was under way before does not count.
    assert [step.total_num_scheduled_tokens for step in executor.steps[3:5]] == [83, 83]
