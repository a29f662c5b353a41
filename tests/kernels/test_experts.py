"""A mixture of experts on CPU against the float32 reference."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

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
from packed_cases import SIZES, of_backend, packed_case
from torch import Tensor

from quire.kernels import fp8, ops
from quire.kernels.cpu import matrix_tiles, moe, routing
from quire.kernels.cpu.graph import Graph, Pool, capture
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recording import calls_of
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS


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
    with pytest.raises(
        ValueError, match="activation must be one of silu, gelu, gelu_tanh, relu, swiglu_oai, got 'tanh'"
    ):
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


def unpacked_case(num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    arguments: dict[str, Any] = build_experts(ExpertCase(num_tokens, dtype=dtype, **SIZES))
    return arguments | {name: ops.ExpertMatrices(arguments[name]) for name in ("gate_up", "down")}


KINDS = [("q8_0", "q8_0"), ("q4_k", "q6_k"), ("q3_k", "q5_k")]


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_packed_experts(kinds: tuple[str, str], dtype: torch.dtype, num_tokens: int) -> None:
    arguments = packed_case(num_tokens, dtype, kinds, elsewhere=2)
    with forced_backend("reference"):
        expected = ops.experts(**arguments)
    out = ops.experts(**of_backend(arguments))
    scale = float(expected.abs().max())
    assert scale > 1e-3
    torch.testing.assert_close(out, expected, atol=scale * (2e-2 if dtype == torch.bfloat16 else 1e-5), rtol=0)


def graph_of(arguments: dict[str, Any], logits: Tensor, out: Tensor, first: int = 0) -> Graph:
    """What a layer does behind its router, on a rank that has experts from the first on."""

    def layer() -> None:
        num_chosen = arguments["chosen"].shape[1]
        chosen, counts = ops.choose_experts(logits, num_chosen, renormalize=True)
        chosen = chosen - first if first else chosen
        out.copy_(ops.experts(**arguments | {"chosen": chosen, "routing": counts}))

    return capture(layer, Pool())


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [*KINDS, None], ids=lambda kinds: "-".join(kinds) if kinds else "unpacked")
def test_a_record_of_experts(kinds: tuple[str, str] | None, dtype: torch.dtype, num_tokens: int) -> None:
    """Whoever is chosen, and by how many: what is repeated is what is computed without a record."""
    arguments = unpacked_case(num_tokens, dtype)
    check_record(arguments if kinds is None else of_backend(packed_case(num_tokens, dtype, kinds)))


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("weights", [torch.int8, fp8.DTYPE])
def test_a_record_of_experts_with_scales(weights: torch.dtype, widened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert has its own. `widened`: as on CPUs that do not multiply bytes."""
    if widened:
        monkeypatch.setattr(sys.modules["quire.kernels.cpu.linear"], "_int8", lambda: "int8")
    arguments: dict[str, Any] = build_experts(ExpertCase(3, weights=weights, **SIZES))
    for name in ("gate_up", "down"):
        arguments[name] = ops.ExpertMatrices(arguments[name], arguments.pop(f"{name}_scales"))
    check_record(arguments)


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.float32, ("q4_k", "q6_k")), (torch.bfloat16, ("q4_k", "mxfp4"))])
def test_a_record_of_experts_in_int8(dtype: torch.dtype, kinds: tuple[str, str]) -> None:
    fit = (ops.fits_packed((64, 256), PACKINGS[kind], dtype, torch.device("cpu"), in_int8=True) for kind in kinds)
    if not all(fit):
        pytest.skip("not packed in int8 on this CPU")
    check_record(of_backend(packed_case(5, dtype, kinds), in_int8=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [KINDS[0], None], ids=["packed", "unpacked"])
def test_a_record_of_experts_with_biases(kinds: tuple[str, str] | None, dtype: torch.dtype) -> None:
    """Each expert has its own, and they are not told twice."""
    arguments = unpacked_case(6, dtype) if kinds is None else of_backend(packed_case(6, dtype, kinds))
    generator = torch.Generator().manual_seed(2)
    for name in ("gate_up", "down"):
        bias = torch.randn(arguments[name].weight.shape[:2], generator=generator).to(dtype)
        without = ops.experts(**arguments)
        arguments[name] = arguments[name]._replace(bias=bias)
        assert not torch.equal(ops.experts(**arguments), without)
    check_record(arguments | {"activation": "swiglu_oai"})


def test_a_record_of_rows_that_lie_apart() -> None:
    arguments = unpacked_case(5, torch.float32)
    check_record(arguments | {"x": torch.zeros(5, 300)[:, :256]})


def check_record(arguments: dict[str, Any]) -> None:
    """The first and the last expert are elsewhere."""
    num_tokens, dtype = len(arguments["x"]), arguments["x"].dtype
    generator = torch.Generator().manual_seed(1)
    logits, out = torch.randn(num_tokens, 7, generator=generator), torch.empty_like(arguments["x"])
    graph = graph_of(arguments, logits, out, first=1)
    for attempt in range(20):
        logits.copy_(torch.randn(logits.shape, generator=generator) * 3)
        if attempt % 4 == 0:
            logits[:, 2] += 100.0  # all choose one
        arguments["x"].copy_(torch.randn(out.shape, generator=generator))
        graph()
        chosen, counts = ops.choose_experts(logits, 2, renormalize=True)
        expected = ops.experts(**arguments | {"chosen": chosen - 1, "routing": counts})
        if dtype == torch.float32:
            assert torch.equal(out, expected)
        else:
            torch.testing.assert_close(out, expected, atol=float(expected.abs().max()) / 64, rtol=0)


@pytest.mark.parametrize(("is_packed", "num_tokens", "is_one"), [(True, 8, True), (True, 12, False), (False, 24, True)])
def test_decodes_of_experts_are_one_program(is_packed: bool, num_tokens: int, is_one: bool) -> None:
    """Without Python between their calls; many rows are an action instead, and where x is split first (in matrix tiles)
    all are."""
    if (is_packed and matrix_tiles.are_available()) or not IS_X86:
        is_one = False
    arguments = unpacked_case(num_tokens, torch.float32)
    if is_packed:
        arguments = of_backend(packed_case(num_tokens, torch.float32, ("q4_k", "q6_k")))
    graph = graph_of(arguments, torch.zeros(num_tokens, 7), torch.empty_like(arguments["x"]))
    has_slots = len(graph._actions) == 1 and isinstance(graph._actions[0], Program)
    assert has_slots is is_one


def test_in_float16_sums_are_those_of_float32() -> None:
    """On a rank that has no expert of any token, too."""
    arguments = unpacked_case(3, torch.float32)
    halves = {name: ops.ExpertMatrices(arguments[name].weight.half()) for name in ("gate_up", "down")}
    found = ops.experts(**arguments | halves | {"x": arguments["x"].half()})
    torch.testing.assert_close(found.float(), ops.experts(**arguments), atol=2e-2, rtol=0)
    nowhere = ops.experts(**arguments | halves | {"x": arguments["x"].half(), "chosen": arguments["chosen"] + 100})
    assert not nowhere.any()


def test_padding_chooses_nobody() -> None:
    chosen, counts = ops.choose_experts(torch.randn(3, 8), 2, renormalize=True, slots=torch.tensor([4, -1, 0]))
    assert chosen[1].tolist() == [-1, -1]
    assert counts[1].tolist() == [0.0, 0.0]
    assert (counts[[0, 2]].sum(dim=1) - 1).abs().max() < 1e-6


def test_results_are_written_once() -> None:
    """Who has lost its core computes again what others read already: they never see anything else."""
    num_tokens, num_experts = 8, 64
    logits, x = torch.randn(num_tokens, num_experts), torch.randn(num_tokens, 64)
    found: list[Tensor] = []
    (choose,) = calls_of(lambda: found.extend(ops.choose_experts(logits, 8, renormalize=True)))
    chosen, counts = found
    rows, parts, out = torch.empty_like(chosen), torch.randn(num_tokens * 8, 64), torch.empty_like(x)
    weight, bias = torch.zeros(num_experts, 64, 64), torch.zeros(num_experts, 64)
    matrices, gathered = ops.ExpertMatrices(weight, bias=bias), torch.empty(num_tokens * 8, 64)
    (product,) = calls_of(lambda: ops.linear(x, weight[0], bias[0]))
    slots = [[moe._copied(product), moe._copied(product)] for _ in range(num_experts)]
    sort = calls_of(
        lambda: routing.sort(chosen, num_experts, x, gathered, rows, slots, [matrices] * 2, [parts.clone(), parts])
    )[0]
    add_up = calls_of(lambda: routing.add_up(parts, rows, counts, out))[0]
    told = [torch.frombuffer(call.arguments, dtype=torch.int64) for slot in slots for call in slot]
    for call, results in ((choose, found), (sort, [rows, *told]), (add_up, [out])):
        expected = [result.clone() for result in results]
        assert_unchanged_amid(call, lambda results=results, expected=expected: all(map(torch.equal, results, expected)))  # type: ignore[misc]


def assert_unchanged_amid(call: Any, is_unchanged: Callable[[], bool]) -> None:
    """While one thread repeats a call."""
    alone = type(call.arguments)()
    ctypes.memmove(ctypes.addressof(alone), ctypes.addressof(call.arguments), ctypes.sizeof(alone))
    alone.claims, alone.num_threads, alone.grain = 0, 1, alone.num_rows

    def repeat() -> None:
        for _ in range(3_000):
            call.function(ctypes.addressof(alone))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        while thread.is_alive():
            assert is_unchanged()
    finally:
        thread.join()
