"""How long a step may take before its ranks are given up."""

from __future__ import annotations

import pytest

from quire.cluster.step_deadline import FACTOR, MIN_S, MIN_STEPS, SURE_MIN_S, SURE_STEPS, StepDeadline


def observed(seconds: float, num_tokens: int, times: int = MIN_STEPS, most_s: float = 60.0) -> StepDeadline:
    deadline = StepDeadline(most_s)
    for _ in range(times):
        deadline.observe(num_tokens, seconds)
    return deadline


def test_nothing_is_judged_by_too_few_steps() -> None:
    assert StepDeadline(60.0).allowed_s(8) == 60.0
    assert observed(0.01, 8, MIN_STEPS - 1).allowed_s(8) == 60.0
    assert observed(0.01, 8).allowed_s(8) == MIN_S


def test_a_size_that_is_known_well_is_judged_sooner() -> None:
    """Another size is not, although it is judged by this one; nor one that has just been slow."""
    deadline = observed(0.01, 8, SURE_STEPS)
    assert deadline.allowed_s(8) == deadline.allowed_s(15) == SURE_MIN_S
    assert deadline.allowed_s(16) == MIN_S
    assert observed(0.01, 8, SURE_STEPS - 1).allowed_s(8) == MIN_S
    deadline.observe(8, 0.2)
    assert deadline.allowed_s(8) == FACTOR * 0.2


def test_slow_steps_get_more() -> None:
    assert observed(1.5, 8).allowed_s(15) == FACTOR * 1.5
    assert observed(10.0, 8).allowed_s(8) == 60.0


def test_larger_steps_get_more_in_proportion() -> None:
    deadline = observed(0.5, 8)
    assert deadline.allowed_s(16) == FACTOR * 0.5 * 2
    assert deadline.allowed_s(64) == 60.0
    assert deadline.allowed_s(4) == 60.0  # smaller ones are not known to be faster


def test_one_slow_step_is_forgotten_slowly() -> None:
    deadline = observed(0.5, 8)
    deadline.observe(8, 2.0)
    assert deadline.allowed_s(8) == FACTOR * 2.0
    for _ in range(70):
        deadline.observe(8, 0.5)
    assert deadline.allowed_s(8) == pytest.approx(FACTOR * 2.0 * 0.99**70)
    for _ in range(1000):
        deadline.observe(8, 0.5)
    assert deadline.allowed_s(8) == FACTOR * 0.5
