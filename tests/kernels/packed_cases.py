"""Packed weights for the kernel tests, shared by the CPU tests and the checks of the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from expert_cases import ExpertCase, build_experts
from torch import Tensor

from quire.kernels import ops
from quire.kernels.packed import IN_8_BITS, PACKINGS, Packing, pack, repack

SIZES = {"hidden_size": 256, "size": 256}
# Packings with all bits of a code, one group and two, least numbers or none. Others combine these otherwise, and take
# part where a test says so, or takes little.
SOME = ("q4_0", "q4_1", "q8_0", "q2_k", "k6_1_16")


def packed(packing: Packing, out_features: int, in_features: int, scale: float = 0.05) -> Tensor:
    """Rows of anything. Some of the float16 are subnormal, negative or zero; what is nested has 6 bits and a sign."""
    generator = torch.Generator().manual_seed(out_features * 31 + in_features)
    rows = torch.empty(out_features, packing.row_bytes(in_features), dtype=torch.uint8)
    rows.random_(256, generator=generator)
    halves, nested, _ = packing.parts(rows)
    scales = torch.randn(out_features, halves.shape[1] // 2, generator=generator) * scale
    scales /= 32 if packing.is_nested else 1
    scales[:, ::5] *= 1e-4
    scales[0, 0] = 0.0
    halves.copy_(scales.half().view(torch.uint8))
    nested.copy_(torch.randint(-63, 64, nested.shape, generator=generator).to(torch.int8).view(torch.uint8))
    return rows


def whole_units(packing: Packing, num_columns: int) -> int:
    """As many, or some more that can be packed so."""
    return -(-num_columns // packing.unit) * packing.unit


def packed_experts(numbers: Tensor, packing: Packing) -> ops.ExpertMatrices:
    """[num_experts, rows, columns], rounded to 8 bits; or, where scales are nested, random bytes of small scales; or
    of any, where numbers are looked up."""
    if packing.is_nested:
        num_experts, num_rows, num_columns = numbers.shape
        generator = torch.Generator().manual_seed(num_rows)
        size = packing.row_bytes(num_columns)
        rows = torch.randint(0, 256, (num_experts * num_rows, size), dtype=torch.uint8, generator=generator)
        halves, _, _ = packing.parts(rows)
        halves.copy_(torch.full((len(rows), halves.shape[1] // 2), 2e-5).half().view(torch.uint8))
    elif packing.table:
        rows = torch.cat([packed(packing, *matrix.shape) for matrix in numbers])
    else:
        rows = repack(pack(numbers.flatten(0, 1)), IN_8_BITS, packing)
    return ops.ExpertMatrices(rows.view(len(numbers), -1, rows.shape[1]), None, packing)


def laid_out(of: ops.ExpertMatrices, dtype: torch.dtype, *, in_int8: bool = False) -> ops.ExpertMatrices:
    assert of.packing is not None
    each = [ops.lay_out_packed(rows, of.packing, dtype, in_int8=in_int8) for rows in of.weight]
    return of._replace(weight=torch.stack(each), in_int8=in_int8)


def packed_case(num_tokens: int, dtype: torch.dtype, kinds: tuple[str, str], **changes: Any) -> dict[str, Any]:
    """Arguments of `ops.experts` with rows of the file's order."""
    arguments: dict[str, Any] = build_experts(ExpertCase(num_tokens, dtype=dtype, **{**SIZES, **changes}))
    for name, kind in zip(("gate_up", "down"), kinds, strict=True):
        matrices = packed_experts(arguments[name].float(), PACKINGS[kind])
        arguments[name] = matrices._replace(bias=arguments.pop(f"{name}_bias", None))
    return arguments


def of_backend(arguments: dict[str, Any], *, in_int8: bool = False) -> dict[str, Any]:
    dtype = arguments["x"].dtype
    return arguments | {name: laid_out(arguments[name], dtype, in_int8=in_int8) for name in ("gate_up", "down")}
