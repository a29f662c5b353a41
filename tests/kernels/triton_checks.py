"""Runs the Triton kernels over cases and compares with the reference. On a GPU, or on CPU with TRITON_INTERPRET=1.

`python tests/kernels/triton_checks.py` prints one JSON object, check name -> null or what was wrong. The interpreter is
chosen when triton is first imported, so it needs a process of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import elementwise_cases
import expert_cases
import packed_cases
import sampling_cases
import torch
from kernel_cases import CASES, TOLERANCE, Case, alone, attend, build

from quire.kernels import fp8, ops
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS, Packing, unpack

INVARIANT = [
    Case(((1, 1100), (1, 9), (20, 50), (3, 600)), num_heads=3, num_kv_heads=1, head_dim=32),
    Case(((1, 600), (1, 30), (9, 40)), dtype=torch.bfloat16, sliding_window=550),
]


Check = Callable[[str], str | None]

# Rows of x: one, a tile of them, several, and more than are multiplied without unpacking the weight before.
PACKED = [(1, torch.float32), (130, torch.float32)]
BF16 = torch.bfloat16
MORE_PACKED = [(5, torch.float16), (70, torch.float32), (1, BF16), (9, BF16), (140, BF16)]  # of some packings
PACKED_EXPERTS: list[tuple[int, torch.dtype, tuple[str, str], dict[str, Any]]] = [
    (1, torch.float32, ("q8_0", "q8_0"), {"hidden_size": 96, "size": 160}),
    (40, torch.float32, ("q4_k", "q6_k"), {"elsewhere": 2}),
    (7, torch.bfloat16, ("mxfp4", "mxfp4"), {"hidden_size": 96, "activation": "swiglu_oai", "has_bias": True}),
    (70, torch.float32, ("z4_128", "q3_k"), {"num_experts": 2}),
]

# Decodes and longer ones in turn, more than four: some come after the others where there is little room for their sums.
MANY = Case(((1, 1100), (2, 9), (20, 50), (3, 600), (1, 700), (1, 1), (9, 40), (1, 1030), (2, 520)), padding=2)

SINKS = Case(((1, 900), (1, 300), (1, 5)), num_heads=4, num_kv_heads=1, head_dim=32, sinks=True, softcap=4.0)


def attention_error(case: Case, device: str) -> float:
    """Largest deviation from the float32 reference over the tokens that belong to requests."""
    inputs = build(case, device)
    with forced_backend("triton"):
        out = attend(inputs, case)
    with forced_backend("reference"):
        expected = attend(inputs.to_float32(), case)
    error = (out.float() - expected).abs()
    return float("inf") if error.isnan().any() else float(error.max())


def is_the_same_alone(case: Case, device: str) -> bool:
    """A request gets the same bits alone and in the batch."""
    inputs = build(case, device)
    starts = inputs.metadata.query_start_loc_np
    with forced_backend("triton"):
        together = attend(inputs, case)
        return all(
            torch.equal(attend(alone(inputs, request), case), together[starts[request] : starts[request + 1]])
            for request in range(len(case.lens))
        )


def gives_the_same_with(limits: dict[str, int], case: Case, device: str) -> bool:
    """Programs that take several splits of a request, or all, give the same bits as programs of one split, and so do
    requests for whose sums there is not room at once."""
    inputs = build(case, device)
    with forced_backend("triton"):
        expected = attend(inputs, case)
        with mock.patch.multiple("quire.kernels.triton.attention", **limits):
            return torch.equal(attend(inputs, case), expected)


def write_kv_is_exact(
    dtype: torch.dtype,
    device: str,
    num_kv_heads: int = 3,
    head_dim: int = 80,
    cache_dtype: torch.dtype | None = None,
) -> bool:
    """Strided keys and values, padding slots: the caches must equal those that the reference writes, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(9, 3 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    slots = torch.tensor([7, -1, 0, 11, -1, 3, 23, 22, 12], device=device)
    caches = []
    for backend in ("triton", "reference"):
        pair = torch.full((2, 6, 4, num_kv_heads, head_dim), 77.0, device=device).to(cache_dtype or dtype)
        with forced_backend(backend):
            ops.write_kv(
                fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :], pair[0], pair[1], slots
            )
        caches.append(pair)
    return torch.equal(*(pair.view(torch.uint8) for pair in caches))


def numbers_are_stored_right(dtype: torch.dtype, scale: float, device: str) -> bool:
    """A cache in 8 bits gets the bytes that the reference makes on a CPU: of all numbers of 16 bits, and in float32 of
    those that it holds, those half way between two of them, and the neighbours of both."""
    if dtype == torch.float32:
        held = torch.arange(127, dtype=torch.uint8).view(fp8.DTYPE).float() * scale
        exact = torch.cat([held, (held[1:] + held[:-1]) / 2, torch.tensor([464 * scale, torch.inf, torch.nan])])
        exact = torch.cat([exact, exact.nextafter(exact + 1), exact.nextafter(exact - 1)])
        numbers = torch.cat([exact, -exact])
        numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 128))
    else:
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = numbers.view(-1, 2, 64).to(device)
    pair = torch.zeros(2, len(rows), 1, 2, 64, device=device).to(fp8.DTYPE)
    slots = torch.arange(len(rows), device=device)
    with forced_backend("triton"):
        ops.write_kv(rows, rows, *pair, slots, key_scale=scale, value_scale=scale)
    expected = fp8.quantize(numbers, scale).view(torch.uint8)
    got = pair.view(torch.uint8).cpu().flatten(1)
    is_nan = expected & 0x7F == 0x7F  # whose sign some processors drop
    return torch.equal(torch.where(is_nan, got | 0x80, got), torch.where(is_nan, 0xFF, expected).expand(2, -1))


def linear_error(
    kind: torch.dtype, num_rows: int, dtype: torch.dtype, device: str, bias: bool, num_groups: int = 1
) -> float:
    """Largest deviation of a layer with weights in 8 bits, of sizes that no tile divides."""
    out_features, in_features = 70, 100 if num_groups == 1 else 48 * num_groups
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, in_features + 3, generator=generator).to(device, dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    groups = weight.view(out_features, num_groups, -1)
    scales = groups.abs().amax(dim=2) / 127
    stored = (groups / scales[..., None]).flatten(1)
    scales = scales[:, 0] if num_groups == 1 else scales.T.contiguous()
    stored = (stored.round() if kind == torch.int8 else stored).to(kind).to(device)
    added = torch.randn(out_features, generator=generator).to(device, dtype) if bias else None
    operation = ops.linear_int8 if kind == torch.int8 else ops.linear_fp8
    with forced_backend("triton"):
        out = operation(x, stored, scales.to(device), added)
    with forced_backend("reference"):
        expected = operation(x.float(), stored, scales.to(device), None if added is None else added.float())
    return float((out.float() - expected).abs().nan_to_num(nan=torch.inf).max())


def row_error(out_features: int, in_features: int, dtype: torch.dtype, device: str, bias: bool) -> float:
    """Largest deviation of a layer of one row, whose weight lies in rows of something wider."""
    generator = torch.Generator().manual_seed(out_features)
    x = torch.randn(1, in_features, generator=generator).to(device, dtype)
    weight = (torch.randn(out_features, in_features + 8, generator=generator) / in_features**0.5).to(device, dtype)
    weight = weight[:, :in_features]
    added = torch.randn(out_features, generator=generator).to(device, dtype) if bias else None
    with forced_backend("triton"):
        out = ops.linear(x, weight, added)
    with forced_backend("reference"):
        expected = ops.linear(x.float(), weight.float(), None if added is None else added.float())
    return float((out.float() - expected).abs().nan_to_num(nan=torch.inf).max())


def packed_problem(packing: Packing, num_rows: int, dtype: torch.dtype, device: str) -> str | None:
    """Of a layer whose number of panels no tile divides, and no part of the blocks of a row: its numbers, bit by bit
    but in bfloat16, to which the interpreter rounds in another way; and products, with a bias and without."""
    out_features, in_features = 80, packed_cases.whole_units(packing, 800)
    rows = packed_cases.packed(packing, out_features, in_features).to(device)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, in_features + 8, generator=generator).to(device, dtype)[:, :in_features]
    bias = torch.randn(out_features, generator=generator).to(device, dtype)
    with forced_backend("triton"):
        weight = ops.lay_out_packed(rows, packing, dtype)
        got = [
            ops.linear_packed(x, weight, packing, bias),
            ops.linear_packed(x, weight, packing, out_dtype=torch.float32),
        ]
        gated = ops.linear_gated_packed(x, weight[: out_features // 16 // 2 * 32], packing, None, "silu")
    if num_rows > 128 and (dtype != torch.bfloat16 or device == "cuda"):
        from quire.kernels.triton.packed import unpacked

        if not torch.equal(unpacked(weight, packing, dtype), unpack(rows.cpu(), packing).to(device, dtype)):
            return "a number is not that which is packed"
    with forced_backend("reference"):
        expected = [ops.linear_packed(x, rows, packing, each, out_dtype=torch.float32) for each in (bias, None)]
        expected.append(ops.linear_gated_packed(x, rows[: len(weight) // 32 * 32], packing, None, "silu"))
    allowed = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip((*got, gated), expected, strict=True):
        error = float((one.float() - other.float()).abs().nan_to_num(nan=torch.inf).max() / other.float().abs().max())
        if error > allowed:
            return f"error {error:.2e} of the largest, allowed {allowed:.0e}"
    return None


def packed_experts_problem(
    num_tokens: int, dtype: torch.dtype, kinds: tuple[str, str], changes: dict[str, Any], device: str
) -> str | None:
    arguments = packed_cases.packed_case(num_tokens, dtype, kinds, **changes)
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    with forced_backend("reference"):
        expected = ops.experts(**arguments).float()
    with forced_backend("triton"):
        out = ops.experts(**packed_cases.of_backend(arguments)).float()
    error = float((out - expected).abs().nan_to_num(nan=torch.inf).max() / expected.abs().max())
    return beyond(error, 5e-2 if dtype == torch.bfloat16 else 1e-5)


def moved(value: Any, device: str) -> Any:
    """Tensors, and those of experts' matrices, to a device."""
    if isinstance(value, ops.ExpertMatrices):
        return value._replace(weight=value.weight.to(device), bias=moved(value.bias, device))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def experts_error(case: expert_cases.ExpertCase, device: str) -> float:
    """Largest deviation from the reference."""
    arguments = expert_cases.build_experts(case, device)
    with forced_backend("triton"):
        out = expert_cases.run_experts(arguments)
    with forced_backend("reference"):
        expected = expert_cases.run_experts(arguments)
    return float((out.float() - expected.float()).abs().nan_to_num(nan=torch.inf).max())


def choices_problem(case: expert_cases.ChoiceCase, device: str) -> str | None:
    with forced_backend("triton"):
        slots = torch.full((3,), -1, device=device)
        none, _ = ops.choose_experts(torch.ones(3, case.num_experts, device=device), 2, renormalize=True, slots=slots)
        problem = expert_cases.choice_problem(case, device)
        return problem or wrong(bool((none == -1).all()), "an expert is read for padding")


def elementwise_problem(name: str, dtype: torch.dtype, device: str) -> str | None:
    """Where a norm, a gated activation or a rotation differs from the reference."""
    check = elementwise_cases.checks(dtype, device)[name]
    with forced_backend("triton"):
        got = check()
    try:
        for one, expected in zip(got, elementwise_cases.reference(check), strict=True):
            torch.testing.assert_close(one, expected, **elementwise_cases.tolerance(name, dtype))
    except AssertionError as error:
        return str(error)
    return None


def draws_problem(vocab: int, device: str, tile: int) -> str | None:
    """The first few tokens that are drawn wrong, by tiles of so many. The interpreter takes some of them."""
    with forced_backend("triton"), mock.patch("quire.kernels.triton.sampling._DRAW_BLOCK", tile):
        return "; ".join(sampling_cases.mistakes(vocab, device, 1 if device == "cuda" else 101)[:3]) or None


def masks_are_exact(vocab: int, num_words: int, device: str) -> bool:
    with forced_backend("triton"):
        got = sampling_cases.excluded(vocab, num_words, device)
    with forced_backend("reference"):
        return torch.equal(got, sampling_cases.excluded(vocab, num_words, device))


def broken_rows_are_right(device: str, tile: int) -> bool:
    with forced_backend("triton"), mock.patch("quire.kernels.triton.sampling._DRAW_BLOCK", tile):
        drawn = sampling_cases.broken(device)
    with forced_backend("reference"):
        return torch.equal(drawn, sampling_cases.broken(device))


def checks() -> dict[str, Check]:
    """By name; a check takes a device and says what is wrong."""
    named: dict[str, Check] = {}
    for case in CASES:
        named[case.name] = lambda device, case=case: beyond(attention_error(case, device), case.tolerance)
    for case in INVARIANT:
        named[f"alone-{case.name}"] = lambda device, case=case: wrong(
            is_the_same_alone(case, device), "other bits than alone"
        )
    fewer = [
        *(("few-programs", {"MOST_PROGRAMS": 1}, case) for case in INVARIANT),
        ("few-sums", {"MOST_SUMS": 1}, MANY),
        # Some requests have no more splits than a program takes, and others have.
        *(("three-splits", {"FEW_PAIRS": 1, "MOST_SPLITS_EACH": 3}, case) for case in (*INVARIANT, SINKS)),
        ("two-splits", {"FEW_PAIRS": 1, "MOST_SPLITS_EACH": 2}, MANY),
    ]
    for kind, limits, case in fewer:
        named[f"{kind}-{case.name}"] = lambda device, limits=limits, case=case: wrong(
            gives_the_same_with(limits, case, device), f"other bits with {limits}"
        )
    for dtype in ops.DTYPES:
        for name in elementwise_cases.checks(dtype):
            named[name] = lambda device, name=name, dtype=dtype: elementwise_problem(name, dtype, device)
    for kind, num_rows, dtype, bias, num_groups in (
        (torch.int8, 1, torch.float32, True, 1),
        (torch.int8, 70, torch.float32, False, 1),
        (torch.int8, 650, torch.float32, True, 1),  # more than one group of tiles
        (torch.int8, 17, torch.bfloat16, True, 1),
        (fp8.DTYPE, 5, torch.float32, False, 1),
        (fp8.DTYPE, 33, torch.bfloat16, True, 1),
        (fp8.DTYPE, 40, torch.float32, True, 3),
        (fp8.DTYPE, 1, torch.bfloat16, False, 2),
    ):
        name = f"linear-{str(kind).removeprefix('torch.')}-{num_rows}-{str(dtype).removeprefix('torch.')}"
        name += f"-{num_groups}-groups" if num_groups > 1 else ""
        named[name] = lambda device, case=(kind, num_rows, dtype), more=(bias, num_groups): beyond(
            linear_error(*case, device, *more), TOLERANCE[case[2]]
        )
    for out_features, in_features, dtype, bias in (
        (70, 100, torch.bfloat16, True),
        (48, 1536, torch.bfloat16, False),
        (33, 700, torch.float16, True),
    ):
        name = f"linear-row-{out_features}x{in_features}-{str(dtype).removeprefix('torch.')}"
        named[name] = lambda device, case=(out_features, in_features, dtype), bias=bias: beyond(
            row_error(*case, device, bias), TOLERANCE[case[2]]
        )
    for packing in PACKINGS.values():
        for num_rows, dtype in (*PACKED, *(MORE_PACKED if packing.name in ("q4_1", "mxfp4", "q6_k") else ())):
            named[f"linear-{packing.name}-{num_rows}-{str(dtype).removeprefix('torch.')}"] = (
                lambda device, case=(packing, num_rows, dtype): packed_problem(*case, device)
            )
    for num_tokens, dtype, kinds, changes in PACKED_EXPERTS:
        name = "-".join(["experts", str(num_tokens), *kinds, str(dtype).removeprefix("torch."), *changes])
        named[name] = lambda device, case=(num_tokens, dtype, kinds, changes): packed_experts_problem(*case, device)
    for experts in expert_cases.EXPERT_CASES:
        named[experts.name] = lambda device, case=experts: beyond(
            experts_error(case, device), expert_cases.EXPERT_TOLERANCE[case.dtype]
        )
    for choice in expert_cases.CHOICES:
        named[choice.name] = lambda device, case=choice: choices_problem(case, device)
    for vocab, num_words in sampling_cases.MASKS:
        named[f"exclude_tokens-{vocab}-{num_words}"] = lambda device, case=(vocab, num_words): wrong(
            masks_are_exact(*case, device), "the logits differ from the reference"
        )
    for tile in (8192, 64):
        named[f"draw_tokens-broken-by-{tile}"] = lambda device, tile=tile: wrong(
            broken_rows_are_right(device, tile), "not as the reference takes them"
        )
    for vocab, tile in (*((vocab, 8192) for vocab in sampling_cases.VOCABS), (1000, 64), (197, 64), (5000, 2048)):
        named[f"draw_tokens-{vocab}-by-{tile}"] = lambda device, case=(vocab, tile): draws_problem(
            case[0], device, case[1]
        )
    for dtype, cache_dtype in (*((dtype, dtype) for dtype in ops.DTYPES), (torch.bfloat16, fp8.DTYPE)):
        name = "fp8" if cache_dtype == fp8.DTYPE else str(dtype).removeprefix("torch.")
        named[f"write_kv-{name}"] = lambda device, dtype=dtype, cache_dtype=cache_dtype: wrong(
            write_kv_is_exact(dtype, device, cache_dtype=cache_dtype), "the caches differ from the reference"
        )
    for dtype, scale in itertools.product(ops.DTYPES, (1.0, 0.013)):
        name = f"write_kv-fp8-numbers-{str(dtype).removeprefix('torch.')}-{scale}"
        named[name] = lambda device, dtype=dtype, scale=scale: wrong(
            numbers_are_stored_right(dtype, scale, device), "the bytes differ from those of the reference"
        )
    return named


def beyond(error: float, allowed: float) -> str | None:
    return None if error <= allowed else f"error {error:.2e}, allowed {allowed:.0e}"


def wrong(right: bool, problem: str) -> str | None:
    return None if right else problem


def run_checks(device: str) -> dict[str, str | None]:
    return {name: run_check(check, device) for name, check in checks().items()}


def run_check(check: Check, device: str) -> str | None:
    """None, or what is wrong. A check that raises is one that fails: the others say what they say all the same."""
    try:
        return check(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps(run_checks("cpu")))
