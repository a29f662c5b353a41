"""The likeliest token by a packed head: that of all logits, of which few are computed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels import ops
from quire.kernels.cpu import byte_dots, dots, likeliest
from quire.kernels.cpu.byte_products import has_products
from quire.kernels.cpu.features import cpu_features
from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.likeliest import PAIR
from quire.kernels.cpu.linear import choose_likeliest
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import BLOCK, PACKINGS, Packing, lengths, unpack
from quire.kernels.sampling import likeliest_tokens

KERNELS: list[tuple[ModuleType, torch.dtype]] = []
if has_products():
    KERNELS += [(byte_dots, torch.float32), (byte_dots, torch.bfloat16)]
if {"avx512vnni", "avx512bf16"} <= cpu_features():
    KERNELS += [(dots, torch.bfloat16)]
NAMES = [f"{kernel.__name__.rpartition('.')[2]}-{str(dtype)[6:]}" for kernel, dtype in KERNELS]
kernels = pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=NAMES)
SOME = ("q4_0", "q8_0", "q6_k")
packings, more_packings = (
    pytest.mark.parametrize("packing", [PACKINGS[name] for name in names], ids=names)
    for names in (SOME, (*SOME, "q3_k", "q5_0"))
)
TOKENS, SIZE = 2000, 160  # an odd number of panels, and blocks that do not come in fours


def size_of(packing: Packing) -> int:
    """SIZE, or what can be packed so."""
    return -(-SIZE // packing.unit) * packing.unit


def head(packing: Packing, seed: int = 0, *, scale: float = 0.02) -> torch.Tensor:
    """Rows of any codes; least numbers are zero."""
    generator = torch.Generator().manual_seed(seed)
    size = size_of(packing)
    rows = torch.zeros(TOKENS, packing.row_bytes(size), dtype=torch.uint8)
    halves, nested, codes = packing.parts(rows)
    num_scales = size // packing.unit
    scales = (
        (torch.rand(TOKENS, num_scales, generator=generator) + 0.5) * scale / (32 if packing.is_nested else 1)
    ).half()
    halves[:, : 2 * num_scales] = scales.view(torch.uint8)
    nested.copy_(torch.randint(1, 64, nested.shape, generator=generator))
    codes.copy_(torch.randint(256, codes.shape, generator=generator, dtype=torch.uint8))
    return rows


def hidden(num_rows: int, packing: Packing, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, size_of(packing), generator=torch.Generator().manual_seed(seed))


def both(kernel: Any, x: torch.Tensor, rows: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """As it is found, and by all logits."""
    weight = kernel.lay_out(rows, packing)
    logits = kernel.linear(x, weight, None, packing, torch.float32)
    return choose_likeliest(kernel, x, weight, packing, lengths(rows, packing)), likeliest_tokens(logits)


def bounds(kernel: Any, x: torch.Tensor, rows: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    weight, has_pairs = kernel.lay_out(rows, packing), kernel is dots
    rounds = has_pairs and len(x) > dots.FEW_ROWS
    lost = byte_dots.LOST[x.dtype] if kernel is byte_dots else 0.0
    return likeliest.bounds(x, weight, packing, lengths(rows, packing), has_pairs=has_pairs, rounds=rounds, lost=lost)


def pairs_of(logits: torch.Tensor) -> list[torch.Tensor]:
    """The parts that are looked at together. The last two panels are the last pair."""
    starts = [min(start, TOKENS - PAIR) for start in range(0, TOKENS, PAIR)]
    return [logits[:, start : start + PAIR] for start in starts]


@kernels
@more_packings
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33])
def test_it_is_the_token_of_all_logits(num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    for seed in range(8):
        found, expected = both(kernel, hidden(num_rows, packing, seed).to(dtype), head(packing, seed), packing)
        assert torch.equal(found, expected)


@kernels
@packings
@pytest.mark.parametrize("num_rows", [4, 20])
def test_few_pairs_are_multiplied_where_tokens_stand_out(
    num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype
) -> None:
    """Rows of x that point to some token each, as those of a model do."""
    rows = head(packing)
    wanted = torch.randint(TOKENS, (num_rows,), generator=torch.Generator().manual_seed(3))
    x = (unpack(rows, packing)[wanted] + hidden(num_rows, packing) / 10).to(dtype)
    found, expected = both(kernel, x, rows, packing)
    assert torch.equal(found, expected)
    assert torch.equal(found, wanted)
    upper, lower = bounds(kernel, x, rows, packing)
    assert (upper >= lower.amax(dim=1, keepdim=True)).any(dim=0).sum() <= num_rows


@kernels
@packings
@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17])
def test_only_what_is_chosen_is_multiplied(num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    weight, x = kernel.lay_out(head(packing), packing), hidden(num_rows, packing).to(dtype)
    logits = kernel.linear(x, weight, None, packing, torch.float32)
    chosen = (torch.rand(-(-TOKENS // PAIR), generator=torch.Generator().manual_seed(5)) < 0.3).to(torch.uint8)
    for last in (0, 1):
        chosen[-1] = last
        found = torch.full((num_rows, TOKENS), 7.0)
        kernel.multiply(x, weight, None, packing, found, chosen=chosen)
        expected = torch.full((num_rows, TOKENS), 7.0)
        for own, all_, is_chosen in zip(pairs_of(expected), pairs_of(logits), chosen, strict=True):
            if is_chosen:
                own.copy_(all_)
        assert torch.equal(found, expected)


@kernels
@packings
@pytest.mark.parametrize("places", [[7, 12], [40, 1999], [1990, 1999], [1983, 1984], [33, 64, 1024]])
def test_of_equal_ones_it_is_the_first(places: list[int], packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """The highest logit is there several times: within a panel, in panels far apart, and in the odd one."""
    rows = head(packing)
    numbers = unpack(rows, packing)
    x = hidden(6, packing) / 10 + numbers[300]
    rows[places], rows[300] = rows[300].clone(), 0
    found, expected = both(kernel, x.to(dtype), rows, packing)
    assert torch.equal(found, expected)
    assert found.tolist() == [places[0]] * 6


@kernels
@more_packings
def test_tokens_that_are_hard_to_tell_apart(packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """All rows of the head are one another's but for a code or two: nothing stands out."""
    rows, generator = head(packing)[:1].expand(TOKENS, -1).clone(), torch.Generator().manual_seed(4)
    for _ in range(2):
        first = rows.shape[1] - size_of(packing) * packing.bits // 8  # of the codes
        places = torch.randint(first, rows.shape[1], (TOKENS,), generator=generator)
        rows[torch.arange(TOKENS), places] ^= 1
    for seed in range(4):
        found, expected = both(kernel, hidden(9, packing, seed).to(dtype), rows, packing)
        assert torch.equal(found, expected)


@kernels
@packings
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-20, 1e-6, 1e6, 1e20, 1e34, 3e36, 1e38])
def test_rows_of_any_size(size: float, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """Also beside one another, and in the blocks of one row. Above 2^115 the kernels' own sums may overflow."""
    x = hidden(6, packing)
    x[1] *= size
    x[2, :40] *= size
    x[3, 7] *= size
    x[4, 1:] = 0.0
    x[5] = 0.0
    found, expected = both(kernel, x.to(dtype), head(packing), packing)
    assert torch.equal(found, expected)


@kernels
@packings
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(broken: float, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """In x, all pairs of its row are looked at; in a scale of tokens, the first of these may have an infinite
    logit, as of all logits."""
    x = hidden(5, packing).to(dtype)
    x[2, 70] = broken
    found, expected = both(kernel, x, head(packing), packing)
    assert torch.equal(found, expected)
    rows = head(packing)
    rows[[1500, 1800], :2] = torch.tensor([broken]).half().view(torch.uint8)
    found, expected = both(kernel, hidden(5, packing).to(dtype), rows, packing)
    assert torch.equal(found, expected)
    assert 1500 in found.tolist()


@kernels
@more_packings
@pytest.mark.parametrize("num_rows", [1, 7, 24])
def test_no_product_is_out_of_bounds(num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """Rows whose rounding loses as much as it can, in the direction of the token."""
    rows = head(packing)
    # A block's largest is 127, all else between two whole numbers, to the token's side.
    x = unpack(rows, packing)[:num_rows].sign() * torch.where(torch.arange(num_rows) % 2 == 0, 0.499, 0.501)[:, None]
    x[:, ::BLOCK] = 127.0
    x = x.to(dtype)
    logits = kernel.linear(x, kernel.lay_out(rows, packing), None, packing, torch.float32)
    upper, lower = bounds(kernel, x, rows, packing)
    tops = torch.stack([part.amax(dim=1) for part in pairs_of(logits)], dim=1)
    assert (tops <= upper).all()
    assert (lower <= tops).all()
    assert (upper - lower).max() < logits.abs().max() / 2  # and they say something


@kernels
@packings
@pytest.mark.parametrize("num_rows", [2, 24])
def test_what_the_kernel_rounds_is_bounded_too(
    num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype
) -> None:
    """Rounding takes nothing from x, whose numbers are whole with 127 in each block, and next to nothing from tenths
    of these. With 24 rows, `dots` rounds numbers of the weight; what `byte_dots` may take from bfloat16 is allowed
    for."""
    x = torch.randint(-3, 4, (num_rows, size_of(packing)), generator=torch.Generator().manual_seed(6)).float()
    x[:, ::BLOCK] = 127.0
    x[1::2] *= 0.1
    rows, x = head(packing), x.to(dtype)
    packing.parts(rows)[1].fill_(32)
    logits = kernel.linear(x, kernel.lay_out(rows, packing), None, packing, torch.float32)
    upper, lower = bounds(kernel, x, rows, packing)
    tops = torch.stack([part.amax(dim=1) for part in pairs_of(logits)], dim=1)
    assert (tops <= upper).all()
    assert (lower <= tops).all()
    rounds = num_rows > dots.FEW_ROWS if kernel is dots else byte_dots.LOST[dtype] > 0
    assert ((upper - lower)[::2] / logits.abs().max()).max() < (0.02 if rounds else 1e-3)


@packings
@pytest.mark.skipif(not has_products(), reason="this CPU does not multiply bytes")
def test_what_two_digits_lose_is_bounded(packing: Packing) -> None:
    """Numbers that lie in the middle between two that two digits have, all to one side, and that 8 bits have not at
    all: what is bounded is not what x gives, but what the kernel does."""
    size = size_of(packing)
    rows, x = torch.zeros(TOKENS, packing.row_bytes(size), dtype=torch.uint8), torch.full((2, size), 1.5 * 2.0**-14)
    halves, nested, codes = packing.parts(rows)
    halves.copy_(torch.full((TOKENS, size // packing.unit), 0.5).half().view(torch.uint8))
    nested.fill_(1)
    codes.fill_(0x7F if packing.bits == 8 else 0xFF)
    x[:, :: BLOCK // packing.num_groups] = 1.0
    x = x.bfloat16()
    logits = byte_dots.linear(x, byte_dots.lay_out(rows, packing), None, packing, torch.float32)
    assert (logits > (1 + 0.0005 / packing.num_groups) * x.float() @ unpack(rows, packing).T).all()
    upper, _ = bounds(byte_dots, x, rows, packing)
    assert (logits.amax(dim=1, keepdim=True) <= upper).all()


@kernels
def test_sums_that_overflow_in_the_kernel_alone(kernel: Any, dtype: torch.dtype) -> None:
    """Two numbers of x that cancel, one after the other: sums of all digits may become infinite on the way."""
    packing, x = PACKINGS["q8_0"], torch.zeros(2, SIZE)
    rows = torch.zeros(TOKENS, packing.row_bytes(SIZE), dtype=torch.uint8)
    halves, _, codes = packing.parts(rows)
    halves.copy_(torch.full((TOKENS, SIZE // BLOCK), 2.0**-10).half().view(torch.uint8))
    codes[1500, :4], codes[700, 32] = 127, 127
    x[:, :2], x[:, 2:4], x[:, 32] = 2.0**124, -(2.0**124), 2.0**120
    found, expected = both(kernel, x.to(dtype), rows, packing)
    assert torch.equal(found, expected)


@kernels
@pytest.mark.parametrize("num_rows", [1, 20])
def test_sums_that_are_flushed_to_zero(num_rows: int, kernel: Any, dtype: torch.dtype) -> None:
    """Where a kernel takes the smallest numbers for zero, the first token wins."""
    packing = PACKINGS["q8_0"]
    rows = torch.ones(TOKENS, packing.row_bytes(SIZE), dtype=torch.uint8)
    halves, _, codes = packing.parts(rows)
    halves.copy_(torch.full((TOKENS, SIZE // BLOCK), 2.0**-24).half().view(torch.uint8))
    codes[1000] = 7
    for exponent in (-126, -118, -110, -106, -102, -98):
        found, expected = both(kernel, torch.full((num_rows, SIZE), 2.0**exponent).to(dtype), rows, packing)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 8, 24])
def test_a_graph_looks_anew(num_rows: int, dtype: torch.dtype) -> None:
    """At other panels each time; what it has left of the last time's logits is not seen."""
    packing = PACKINGS["q8_0"]
    rows = head(packing)
    weight, own, x = (
        ops.lay_out_packed(rows, packing, dtype),
        lengths(rows, packing),
        hidden(num_rows, packing).to(dtype),
    )
    out = torch.zeros(num_rows, dtype=torch.int64)
    graph = capture(lambda: out.copy_(ops.likeliest_packed(x, weight, packing, own)), Pool())
    for seed in range(20):
        x.copy_(unpack(rows, packing)[seed * 90 : seed * 90 + num_rows] + hidden(num_rows, packing, seed))
        graph()
        assert torch.equal(out, likeliest_tokens(ops.linear_packed(x, weight, packing, out_dtype=torch.float32)))


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_any_packing_on_any_backend(backend: str, dtype: torch.dtype, packing: Packing) -> None:
    """By whatever this CPU multiplies with."""
    rows = head(packing)
    with forced_backend(backend):
        weight = ops.lay_out_packed(rows, packing, dtype)
        for num_rows in (0, 1, 2, 8, 40):
            x = hidden(num_rows, packing).to(dtype)
            logits = ops.linear_packed(x, weight, packing, out_dtype=torch.float32)
            assert torch.equal(
                ops.likeliest_packed(x, weight, packing, lengths(rows, packing)), likeliest_tokens(logits)
            )


@packings
def test_lengths(packing: Packing) -> None:
    rows = head(packing)
    numbers = unpack(rows, packing)
    expected = torch.stack([each.double().norm(dim=1) for each in (numbers, numbers - numbers.bfloat16().float())])
    torch.testing.assert_close(lengths(rows, packing).double(), expected, rtol=1e-5, atol=0)
    with pytest.raises(
        ValueError, match=r"lengths must be \[2, 2000\] float32, contiguous, got \[2, 2000\] torch.bfloat16"
    ):
        ops.likeliest_packed(hidden(2, packing), rows, packing, expected.bfloat16())
