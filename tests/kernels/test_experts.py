"""A mixture of experts on CPU against the float32 reference."""

from __future__ import annotations

import pytest
import torch
from expert_cases import (
    CHOICES,
    EXPERT_CASES,
    EXPERT_TOLERANCE,
    ChoiceCase,
    ExpertCase,
    build_experts,
    choice_problem,
    run_experts,
)

from quire.kernels import ops
from quire.kernels.dispatch import forced_backend


@pytest.mark.parametrize("case", EXPERT_CASES, ids=lambda case: case.name)
def test_agrees_with_the_reference(case: ExpertCase) -> None:
    arguments = build_experts(case)
    out = run_experts(arguments)
    with forced_backend("reference"):
        expected = run_experts(arguments)
    assert expected.abs().max() > 0.1
    # What multiplies int8 weights may be rounded to 16 bits of its row's largest.
    tolerance = EXPERT_TOLERANCE[case.dtype] * (5 if case.weights == torch.int8 else 1)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.name)
def test_the_likeliest_experts_are_chosen(case: ChoiceCase) -> None:
    assert choice_problem(case, "cpu") is None


def test_experts_elsewhere_add_nothing() -> None:
    """What two ranks have of the sums is what one has."""
    arguments = build_experts(ExpertCase(12, num_experts=6))
    halves = [
        run_experts(
            {
                **arguments,
                "chosen": arguments["chosen"] - first,  # type: ignore[operator]
                "gate_up": arguments["gate_up"][first : first + 3],  # type: ignore[index]
                "down": arguments["down"][first : first + 3],  # type: ignore[index]
            }
        )
        for first in (0, 3)
    ]
    torch.testing.assert_close(halves[0] + halves[1], run_experts(arguments))


def test_wrong_arguments_are_refused() -> None:
    arguments = build_experts(ExpertCase(3))
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, relu, got 'tanh'"):
        run_experts({**arguments, "activation": "tanh"})
    with pytest.raises(ValueError, match="do not fit 2 tokens"):
        run_experts({**arguments, "x": arguments["x"][:2]})  # type: ignore[index]
    with pytest.raises(ValueError, match=r"x \(3, 47\), gate_up"):
        run_experts({**arguments, "x": torch.zeros(3, 47)})
    with pytest.raises(ValueError, match="experts_per_token must be 1 to 8, got 9"):
        ops.choose_experts(torch.zeros(3, 8), 9, renormalize=True)
    with pytest.raises(ValueError, match="with contiguous rows"):
        ops.choose_experts(torch.zeros(8, 3).T, 2, renormalize=True)
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        ops.choose_experts(torch.zeros(3, 8, dtype=torch.float64), 2, renormalize=True)
    with pytest.raises(ValueError, match=r"slots must have shape \(3,\), got \(4,\)"):
        ops.choose_experts(torch.zeros(3, 8), 2, renormalize=True, slots=torch.arange(4))
