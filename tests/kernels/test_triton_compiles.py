"""Every Triton kernel compiles to machine code of an H100, as it would be launched there, without one."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from expert_cases import ExpertCase, build_experts, run_experts
from kernel_cases import Case, attend, build
from packed_cases import packed_case

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ahead_of_time import SHARED_MEMORY, compiled_launches

from quire.kernels import elementwise, fp8, ops
from quire.kernels.elementwise import HeadNorms, Rotation
from quire.kernels.packed import PACKINGS
from quire.kernels.sampling import Draws, draw_tokens, exclude_tokens
from quire.kernels.triton.packed import unpacked

MIXED = ((1, 600), (40, 300))  # a decode with two splits and a chunk
BF16 = torch.bfloat16


def names(launched: list) -> list[str]:
    """Of the kernels, after a look at what they need."""
    for kernel in launched:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY
        if getattr(kernel.metadata, "launch_pdl", False):
            waits_before_it_reads(kernel)
    return [kernel.name for kernel in launched]


def waits_before_it_reads(kernel: Any) -> None:
    """A kernel that is launched while the one before it runs: all of its programs wait, and none has read or written
    anything before, but for weights."""
    before, *after = kernel.asm["ptx"].split("griddepcontrol.wait;")
    assert len(after) == 1, "it waits once, whatever it finds"
    entry = before[before.index(".entry") :]
    assert not re.search(r"\b(ret|st\.global|cp\.async|atom|red)\b", entry)
    reads = re.search(r"ld\.global", entry) is not None
    assert reads == (kernel.name == "row_kernel")


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16),
        Case(MIXED, num_heads=16, num_kv_heads=8, head_dim=80, block_size=256, dtype=BF16, fp8=True, sinks=True),
        Case(MIXED, num_heads=8, num_kv_heads=4, head_dim=256, dtype=torch.float16, sliding_window=50, softcap=50.0),
        Case(MIXED, num_heads=9, num_kv_heads=3, head_dim=64),
    ],
    ids=lambda case: case.name,
)
def test_paged_attention(case: Case) -> None:
    inputs = build(case)
    with compiled_launches() as launched:
        attend(inputs, case)
    merged = [] if case.sliding_window else ["merge_kernel"]  # a window has few keys: one split
    assert names(launched) == ["short_kernel", *merged, "long_kernel"]
    if case.dtype != torch.float32:
        by_name = {kernel.name: kernel.asm["ptx"] for kernel in launched}
        assert "wgmma.mma_async" in by_name["long_kernel"], "prefill without the matrix instructions of the GPU"
        assert "mma.sync" in by_name["short_kernel"]
        for name in ("short_kernel", "long_kernel"):  # waiting for all loads but some is how later ones stay under way
            assert re.search(r"cp\.async\.wait_group\s+[1-9]", by_name[name]), "keys are not loaded ahead"


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_write_kv(dtype: torch.dtype) -> None:
    caches = torch.zeros(2, 4, 16, 3, 80, dtype=dtype)
    rows = torch.zeros(2, 5, 3, 80, dtype=dtype)
    with compiled_launches() as launched:
        ops.write_kv(*rows, *caches, torch.arange(5))
    assert names(launched) == ["_write_kv_kernel"]


def test_norms_activations_and_rotations() -> None:
    x, stream, weight = torch.zeros(5, 2048, dtype=BF16), torch.zeros(5, 2048, dtype=BF16), torch.ones(2048, dtype=BF16)
    heads = torch.zeros(5, 16, 128, dtype=BF16)
    caches = torch.zeros(2, 3, 16, 4, 128, dtype=BF16)
    rotation = Rotation(torch.ones(5, 32), torch.zeros(5, 32), interleaved=False)
    with compiled_launches() as launched:
        elementwise.rms_norm(heads, weight[:128], 1e-6)
        elementwise.add_rms_norm(x, stream, weight, 1e-6)
        elementwise.activate_and_mul(x, "gelu")
        elementwise.rotate(heads, rotation._replace(interleaved=True))
        elementwise.rotate_and_write_kv(heads[:, :8], heads[:, 8:12], heads[:, 12:], rotation, *caches, torch.arange(5))
        elementwise.rotate_and_write_kv(
            heads[:, :8], heads[:, 8:12], heads[:, 12:], rotation, *caches, torch.arange(5),
            norms=HeadNorms(weight[:128], weight[:128], 1e-6, unit_offset=False),
        )  # fmt: skip
    assert names(launched) == ["_norm_kernel"] * 2 + ["_gate_kernel"] + ["_rotate_kernel"] * 3


def test_a_cache_in_8_bits_is_written_by_one_kernel() -> None:
    """Keys are rotated, and both are quantized, on the way."""
    heads = torch.zeros(5, 16, 128, dtype=BF16)
    caches = torch.zeros(2, 3, 16, 4, 128, dtype=BF16).to(fp8.DTYPE)
    rotation = Rotation(torch.ones(5, 64), torch.zeros(5, 64), interleaved=False)
    query, key, value = heads[:, :8], heads[:, 8:12], heads[:, 12:]
    with compiled_launches() as launched:
        elementwise.rotate_and_write_kv(query, key, value, rotation, *caches, torch.arange(5), key_scale=0.5)
        ops.write_kv(key, value, *caches, torch.arange(5), value_scale=0.5)
    assert names(launched) == ["_rotate_kernel", "_write_kv_kernel"]
    assert all("div.rn.f32" in kernel.asm["ptx"] for kernel in launched), "not the bits that a CPU stores"


@pytest.mark.parametrize("out_features", [1024, 4096, 6144, 28672])
def test_linear_of_one_row(out_features: int) -> None:
    x, weight = torch.zeros(1, 1536, dtype=BF16), torch.zeros(out_features, 1536, dtype=BF16)
    with compiled_launches() as launched:
        ops.linear(x, weight, torch.zeros(out_features, dtype=BF16))
        ops.linear(x, weight)
    assert names(launched) == ["row_kernel"] * 2
    with compiled_launches() as launched, pytest.raises(RuntimeError):
        ops.linear(x[:, :64], weight)
    assert not launched


@pytest.mark.parametrize("kind", [torch.int8, fp8.DTYPE])
@pytest.mark.parametrize("num_rows", [1, 200])
def test_linear_in_8_bits(kind: torch.dtype, num_rows: int) -> None:
    operation = ops.linear_int8 if kind == torch.int8 else ops.linear_fp8
    x, weight = torch.zeros(num_rows, 512, dtype=BF16), torch.zeros(256, 512).to(kind)
    with compiled_launches() as launched:
        operation(x, weight, torch.ones(256), torch.zeros(256, dtype=BF16))
        if kind == fp8.DTYPE:
            operation(x, weight, torch.ones(4, 256))
    assert names(launched) == ["weight8_kernel"] * (2 if kind == fp8.DTYPE else 1)
    assert ("mma.sync" if num_rows == 1 else "wgmma.mma_async") in launched[0].asm["ptx"]


@pytest.mark.parametrize(
    ("num_rows", "name"), [(1, "packed_row_kernel"), (16, "packed_kernel"), (100, "packed_kernel")]
)
@pytest.mark.parametrize("kind", ["q4_1", "q6_k", "q8_0", "mxfp4", "iq4_xs", "z4_128"])
def test_packed_linear(kind: str, num_rows: int, name: str) -> None:
    packing = PACKINGS[kind]
    x, weight = torch.zeros(num_rows, 512, dtype=BF16), torch.zeros(256, packing.row_bytes(512), dtype=torch.uint8)
    with compiled_launches() as launched:
        ops.linear_packed(x, weight, packing, torch.zeros(256, dtype=BF16))
        ops.linear_packed(x, weight, packing, out_dtype=torch.float32)
    assert names(launched) == [name] * 2
    for kernel in launched:
        ptx = kernel.asm["ptx"]
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx), "weights are not loaded ahead"
        assert num_rows == 1 or "wgmma.mma_async" in ptx


def test_packed_layers_of_a_model_share_kernels() -> None:
    """Whatever their sizes: no request should wait for the compiler."""
    packing = PACKINGS["z4_128"]
    with compiled_launches() as launched:
        for out_features, in_features in ((256, 512), (48, 2048), (16, 1152)):
            weight = torch.zeros(out_features, packing.row_bytes(in_features), dtype=torch.uint8)
            for num_rows in (1, 9, 16):
                ops.linear_packed(torch.zeros(num_rows, in_features, dtype=BF16), weight, packing)
    assert len({kernel.hash for kernel in launched}) == 2


def test_packed_linear_of_many_rows() -> None:
    packing = PACKINGS["q4_k"]
    with compiled_launches() as launched:
        for dtype in ops.DTYPES:
            unpacked(torch.zeros(256, packing.row_bytes(512), dtype=torch.uint8), packing, dtype)
    assert names(launched) == ["unpack_kernel"] * 3


@pytest.mark.parametrize("num_tokens", [4, 400])
def test_packed_experts(num_tokens: int) -> None:
    arguments = packed_case(num_tokens, BF16, ("mxfp4", "z4_128"), activation="swiglu_oai", has_bias=True)
    with compiled_launches() as launched:
        ops.experts(**arguments)
    assert names(launched) == ["sort_kernel", "gate_up_kernel", "down_kernel", "add_kernel"]
    assert all("wgmma.mma_async" in kernel.asm["ptx"] for kernel in launched[1:3])


@pytest.mark.parametrize(
    ("num_tokens", "weights", "group"),
    [(4, None, None), (400, None, None), (4, fp8.DTYPE, None), (400, fp8.DTYPE, 128)],
)
def test_experts(num_tokens: int, weights: torch.dtype | None, group: int | None) -> None:
    case = ExpertCase(num_tokens, 8, 2, hidden_size=256, size=128, dtype=BF16, weights=weights, group=group)
    arguments = build_experts(case)
    with compiled_launches() as launched:
        run_experts(arguments)
    assert names(launched) == ["sort_kernel", "gate_up_kernel", "down_kernel", "add_kernel"]
    products = launched[1:3]
    assert all(("mma.sync" if num_tokens == 4 else "wgmma.mma_async") in kernel.asm["ptx"] for kernel in products)


def test_choosing_experts() -> None:
    with compiled_launches() as launched:
        for slots in (None, torch.arange(5)[1:]):
            ops.choose_experts(torch.zeros(4, 128, dtype=BF16), 8, renormalize=True, slots=slots)
    assert names(launched) == ["choose_kernel"] * 2


def test_sorting_is_compiled_once_for_many_assignments() -> None:
    """Whether or not their number is divisible by 16: no request should wait for the compiler."""
    with compiled_launches() as launched:
        for num_tokens in (404, 512, 2048):
            run_experts(build_experts(ExpertCase(num_tokens, 8, 2, hidden_size=64, size=64, dtype=BF16)))
    assert len({kernel.hash for kernel in launched if kernel.name == "sort_kernel"}) == 1


def test_masks_and_draws() -> None:
    logits, floats = torch.zeros(3, 151_936), torch.zeros(3)
    draws = Draws(floats, floats.int(), floats, floats, floats.double())
    with compiled_launches() as launched:
        exclude_tokens(logits, torch.arange(3), torch.zeros(3, 4748, dtype=torch.int32))
        draw_tokens(logits, draws)
    assert names(launched) == ["_exclude_kernel", "_draw_kernel"]
