"""Caches in 8 bits on CPU: what is stored, and what is read, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import MIXED, Case, attend, build
from numba import njit
from torch import Tensor

from quire.kernels import elementwise, fp8, ops
from quire.kernels.cpu import decode
from quire.kernels.cpu.heads import widen_codes
from quire.kernels.elementwise import Rotation

BF16 = torch.bfloat16


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def all_numbers(dtype: torch.dtype) -> Tensor:
    """Every bfloat16, which are every 65,536th float32, and their neighbours and ties of 8 bits; as rows of 64."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    if dtype == BF16:
        return (upper >> 16).to(torch.int16).view(BF16).view(-1, 1, 64)
    words = torch.stack([upper, upper | 1, upper | 0x8000, upper | 0xFFFF]).to(torch.int32)
    return words.view(torch.float32).view(-1, 1, 64)


@pytest.mark.parametrize("scale", [1.0, 0.017])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_every_number_is_stored_as_torch_rounds_it(dtype: torch.dtype, scale: float) -> None:
    """Subnormal numbers, ties, what is beyond the largest, infinities; NaN stays one."""
    numbers = all_numbers(dtype)
    caches = torch.zeros(2, len(numbers) // 16, 16, 1, 64).to(fp8.DTYPE)
    slots = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    ops.write_kv(numbers, -numbers, *caches, slots, key_scale=scale, value_scale=2 * scale)
    for cache, given, its_scale in zip(caches, (numbers, -numbers), (scale, 2 * scale), strict=True):
        stored, expected = cache.view(-1, 1, 64)[slots], fp8.quantize(given, its_scale)
        is_nan = expected.float().isnan()
        assert torch.equal(stored.float().isnan(), is_nan)
        assert 0 < is_nan.sum() < 2000
        assert torch.equal(bits(stored)[~is_nan], bits(expected)[~is_nan])


@pytest.mark.parametrize(("dtype", "like"), [(torch.float32, np.float32), (BF16, np.uint16)])
def test_every_code_becomes_its_number(dtype: torch.dtype, like: type[np.generic]) -> None:
    """Where chunks of a cache are widened before they are read."""
    kind = np.empty(0, like)

    @njit
    def widen(codes: int, offsets: int, out: int) -> None:
        widen_codes(kind, codes, offsets, 4, 64, out)

    codes, out = torch.arange(256, dtype=torch.uint8).view(4, 64), torch.zeros(4, 64, dtype=dtype)
    offsets = torch.tensor([192, 0, 64, 128])
    widen(codes.data_ptr(), offsets.data_ptr(), out.data_ptr())
    expected = codes[[3, 0, 1, 2]].view(fp8.DTYPE).to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(bits(out.nan_to_num()), bits(expected.nan_to_num()))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_every_code_is_read_as_its_number(dtype: torch.dtype) -> None:
    """A token that sees itself alone gets its value."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 4, 64).view(fp8.DTYPE)
    keys, starts, seq_lens = torch.zeros(codes.shape).to(fp8.DTYPE), np.array([0, 1], np.int32), np.ones(1, np.int32)
    metadata = ops.AttentionMetadata(
        torch.from_numpy(starts), torch.from_numpy(seq_lens), torch.zeros(1, 1, dtype=torch.int32),
        torch.full((1,), -1), starts, seq_lens,
    )  # fmt: skip
    query = torch.ones(1, 4, 64, dtype=dtype)
    assert decode.fits(query, codes)
    out = ops.paged_attention(query, keys, codes, metadata, scale=0.125, value_scale=0.25)
    expected = (codes.float() * 0.25).to(dtype)[0]
    assert expected.isnan().sum() == 2
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 700), *MIXED, (300, 300)), num_heads=9, num_kv_heads=3, fp8=True),
        Case(((1, 300), (40, 300)), sliding_window=33, softcap=5.0, sinks=True, head_dim=80, fp8=True),
        Case(((1, 300), (1, 40), (1, 1)), num_heads=9, num_kv_heads=3, dtype=BF16, fp8=True),
        Case(((300, 700), (33, 300), (2, 257), (1, 40)), num_heads=9, num_kv_heads=3, dtype=BF16, fp8=True),
        Case(((100, 200), (40, 300)), sliding_window=33, head_dim=128, block_size=32, dtype=BF16, fp8=True),
        Case(((100, 200),), softcap=5.0, head_dim=16, block_size=8, dtype=BF16, fp8=True),
    ],
    ids=lambda case: case.name,
)
def test_attention_has_the_bits_of_that_over_the_same_numbers(case: Case) -> None:
    """In float32 and bfloat16, which have all of them."""
    inputs = build(case)
    numbers = (cache.float().to(case.dtype) for cache in (inputs.key_cache, inputs.value_cache))
    widened = replace(inputs, **dict(zip(("key_cache", "value_cache"), numbers, strict=True)))
    options = {"scale": 0.2, "sliding_window": case.sliding_window, "softcap": case.softcap, "sinks": inputs.sinks}
    expected, found = (
        ops.paged_attention(each.query, each.key_cache, each.value_cache, each.metadata, **options)
        for each in (widened, inputs)
    )
    assert not expected.isnan().any()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_scales_are_those_of_the_layer(dtype: torch.dtype) -> None:
    """Two layers share a plan, and each has scales of its own."""
    case = Case(((1, 40), (9, 30)), dtype=dtype, fp8=True)
    inputs = build(case)
    first = attend(inputs, case)
    other = ops.paged_attention(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.metadata,
        **{**case.options, "key_scale": 1e-9, "value_scale": 3.0},
    )  # fmt: skip
    plans = [key for key in inputs.metadata.plans if isinstance(key, tuple)]
    assert sorted(kind for kind, *_ in plans) == ["decode", "prompts"]
    assert torch.equal(attend(inputs, case), first)
    # Keys that hardly count: every token sees the mean of its values.
    slots = inputs.metadata.block_table[0].long()[torch.arange(40) // case.block_size] * case.block_size
    values = inputs.value_cache.float().flatten(0, 1)[slots + torch.arange(40) % case.block_size]
    mean = 3.0 * values.mean(0).repeat_interleave(case.num_heads // case.num_kv_heads, 0)
    torch.testing.assert_close(other[0].float(), mean, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_is_rotated_is_stored_as_it_would_be_alone(dtype: torch.dtype, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(7, heads, 64, generator=generator).to(dtype) * 9 for heads in (4, 2, 2))
    angles = torch.randn(7, 16, generator=generator)
    rotation = Rotation(angles.cos(), angles.sin(), interleaved)
    slots = torch.tensor([5, 0, -1, 31, 7, 8, 20])
    whole, stored = torch.zeros(2, 2, 16, 2, 64, dtype=dtype), torch.zeros(2, 2, 16, 2, 64).to(fp8.DTYPE)
    rotated = [
        elementwise.rotate_and_write_kv(
            query.clone(), key.clone(), value, rotation, *caches, slots, key_scale=0.5, value_scale=0.3
        )
        for caches in (whole, stored)
    ]
    assert torch.equal(*rotated)
    for cache, before, scale in zip(stored, whole, (0.5, 0.3), strict=True):
        assert torch.equal(bits(cache), bits(fp8.quantize(before, scale)))
