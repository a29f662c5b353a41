"""Packed weights: what they unpack to, and that to multiply them gives the bits that their numbers give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from quire.kernels import ops
from quire.kernels.cpu import few_rows, many_rows, panels, vectors
from quire.kernels.cpu.any_rows import capture
from quire.kernels.cpu.graph import Pool
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.panel_vectors import FEW, WIDTH
from quire.kernels.cpu.turned_tiles import products
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import BLOCK, PACKINGS, Packing, unpack

# (out_features, in_features): an odd number of panels, sums of one span and of more, and parts of a span.
SHAPES = [(32, 32), (48, 96), (80, 576), (48, 1536), (256, 512)]
DTYPES = [torch.float32]
if products(torch.bfloat16)[:1] == ("tdpbf16ps",):
    DTYPES.append(torch.bfloat16)  # where it is not multiplied in matrix tiles, weights are unpacked when they are read
packings = pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.name)


def packed(packing: Packing, out_features: int, in_features: int, scale: float = 0.05) -> torch.Tensor:
    """Rows of any codes. Some of the float16 are subnormal, negative or zero."""
    generator = torch.Generator().manual_seed(out_features * 31 + in_features)
    num_halves = in_features // BLOCK * packing.num_halves
    halves = torch.randn(out_features, num_halves, generator=generator) * scale
    halves[:, ::5] *= 1e-4
    halves[0, 0] = 0.0
    codes = torch.randint(
        256, (out_features, packing.row_bytes(in_features) - 2 * num_halves), generator=generator, dtype=torch.uint8
    )
    return torch.cat([halves.half().view(torch.uint8), codes], dim=1)


def product(x: torch.Tensor, rows: torch.Tensor, packing: Packing, bias: torch.Tensor | None = None) -> torch.Tensor:
    return ops.linear_packed(x, ops.lay_out_packed(rows, packing, x.dtype), packing, bias)


def product_of_numbers(x: torch.Tensor, numbers: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """By a kernel that adds in the same order."""
    if x.dtype == torch.float32:
        return few_rows.linear("float32", x, numbers, None, bias)
    return many_rows.linear(x, numbers, None, bias)


@packings
def test_a_number_is_its_code_times_a_scale(packing: Packing) -> None:
    """Two rows of two blocks, by hand."""
    scales = torch.tensor([[0.5, -2.0], [0.25, 1.0]]).half()
    least = torch.tensor([[1.0, 3.0], [0.0, -7.0]]).half() if packing.has_least else torch.empty(2, 0).half()
    halves = torch.cat([scales, least], dim=1).view(torch.uint8)
    codes = torch.arange(128).reshape(2, 2, 32) % (256 if packing.bits == 8 else 16)
    stored = codes if packing.bits == 8 else codes[..., :16] | codes[..., 16:] << 4
    rows = torch.cat([halves, stored.flatten(1).to(torch.uint8)], dim=1)
    assert rows.shape[1] == packing.row_bytes(64)
    assert packing.num_numbers(rows.shape[1]) == 64
    start = least.float() if packing.has_least else scales.float() * (-8 if packing.bits == 4 else 0)
    expected = codes.float() * scales.float()[..., None] + start[..., None]
    assert torch.equal(unpack(rows, packing), expected.flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
@packings
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_numbers(shape: tuple[int, int], packing: Packing, dtype: torch.dtype) -> None:
    """However many rows: each number of them up to 18, and some that have more than one part of x."""
    assert ops.fits_packed(shape, dtype, torch.device("cpu"))
    rows = packed(packing, *shape)
    numbers = unpack(rows, packing).to(dtype)
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(700, shape[1], generator=generator).to(dtype), torch.randn(shape[0]).to(dtype)
    for given in (bias, None):
        whole = product_of_numbers(x, numbers, given)
        if IS_X86 and dtype == torch.float32:
            assert torch.equal(ops.linear(x, numbers, given), whole)
        for num_rows in (*range(1, 19), 29, 32, 33, 100, 700):
            got = product(x[:num_rows], rows, packing, given)
            assert got.dtype == dtype
            assert torch.equal(got, whole[:num_rows]), num_rows


@pytest.mark.parametrize("num_rows", [8, *range(17, 49, 5), 100])
def test_nothing_is_written_behind_the_result(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows so long that x comes in several chunks, whose number is rounded: the last must not be one of no rows."""
    monkeypatch.setattr(panels, "CHUNK_BYTES", 1 << 11)
    panels._entry.cache_clear()
    packing = PACKINGS["q4_1"]
    rows = packed(packing, 32, 96)
    weight, x = panels.lay_out(rows, packing), torch.randn(num_rows, 96)
    memory = torch.full((num_rows + 200, 32), 7.0)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda _x, *shape: memory[: shape[0]])
    got, behind = panels.linear(x, weight, None, packing).clone(), memory[num_rows:].clone()
    monkeypatch.undo()
    panels._entry.cache_clear()
    assert torch.equal(got, product_of_numbers(x, unpack(rows, packing), None))
    assert (behind == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@packings
def test_the_reference_agrees(packing: Packing, dtype: torch.dtype) -> None:
    rows = packed(packing, 80, 576)
    x, bias = torch.randn(21, 576).to(dtype), torch.randn(80).to(dtype)
    with forced_backend("reference"):
        assert ops.fits_packed((80, 576), dtype, torch.device("cpu"))
        expected = product(x, rows, packing, bias)
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(product(x, rows, packing, bias), expected, rtol=rounding, atol=20 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@packings
@pytest.mark.parametrize("num_rows", [5, 21])
def test_nothing_leaves_its_row_or_column(num_rows: int, packing: Packing, dtype: torch.dtype) -> None:
    rows = packed(packing, 80, 96)
    x = torch.randn(num_rows, 96).to(dtype)
    whole = product(x, rows, packing)
    x[2, 17] = torch.nan
    spoilt = product(x, rows, packing)
    assert spoilt[2].isnan().all()
    spoilt[2] = whole[2]
    assert torch.equal(spoilt, whole)
    x[2, 17] = 0.0
    rows[19, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # a scale that is infinite
    spoilt = product(x, rows, packing)
    assert not spoilt[:, 19].isfinite().any()
    others = torch.arange(80) != 19
    rest = torch.arange(num_rows) != 2
    assert torch.equal(spoilt[rest][:, others], whole[rest][:, others])


def test_float16_without_an_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """All there are, by whole numbers: CPUs without one would need a function that nobody has."""
    monkeypatch.setattr(vectors, "cpu_features", frozenset)
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16)

    @intrinsic
    def widen(_typing_context: object, _source: object, _target: object) -> object:
        def generate(context: Any, b: Any, _signature: object, arguments: Any) -> object:
            vector = vectors.load(b, arguments[0], ir.VectorType(vectors.INT16, vectors.LANES))
            vectors.store(b, vectors.widen_halves(b, vector), arguments[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def widen_all(source: int, target: int, count: int) -> None:
        for i in range(0, count, vectors.LANES):
            widen(source + 2 * i, target + 4 * i)

    found, expected = torch.empty(65536), halves.view(torch.float16).float()
    widen_all(halves.data_ptr(), found.data_ptr(), 65536)
    same = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    assert same.all()


def test_largest_and_smallest_scales() -> None:
    """All of float16 but what is not a number: infinite numbers meet no zero here."""
    packing = PACKINGS["q8_0"]
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = torch.where(halves.isnan(), 1.0, halves).half().reshape(-1, 1)
    rows = torch.cat([halves.view(torch.uint8), torch.full((65536, BLOCK), 3, dtype=torch.uint8)], dim=1)
    for x in (torch.ones(1, BLOCK), torch.ones(20, BLOCK)):
        assert torch.equal(product(x, rows, packing)[-1], halves.float()[:, 0] * 3 * BLOCK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    packing = PACKINGS["q4_1"]
    out = product(torch.empty(0, 96, dtype=dtype), packed(packing, 48, 96), packing)
    assert (out.shape, out.dtype) == ((0, 48), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.skipif(not IS_X86, reason="other layers of any number of rows are compiled on x86 alone")
def test_any_number_of_rows_of_a_record(dtype: torch.dtype) -> None:
    """A record of 41 rows is repeated with others, but not with so few that another kernel would take them."""
    packing = PACKINGS["q4_1"]
    weight = ops.lay_out_packed(packed(packing, 96, 96), packing, dtype)
    x = torch.randn(163, 96).to(dtype)
    with torch.inference_mode():
        record, _ = capture(lambda: ops.linear_packed(x[:41], weight, packing), Pool(), 41, 163, [x])
        assert record.least_rows == (1 if dtype == torch.bfloat16 else FEW[-1] + 1)
        for num_rows in (163, record.least_rows, 32, 33, 41, 100):
            x.copy_(torch.randn(163, 96))
            found = record.replay(num_rows).clone()
            assert torch.equal(found, ops.linear_packed(x[:num_rows], weight, packing))


@pytest.mark.parametrize("shape", [(40, 96), (16, 96), (48, 80), (48, 16)])
def test_what_does_not_fit(shape: tuple[int, int]) -> None:
    device = torch.device("cpu")
    fits = shape == (16, 96) and WIDTH == 1
    assert ops.fits_packed(shape, torch.float32, device) is fits
    for dtype in {torch.float16, torch.bfloat16} - set(DTYPES):
        assert not ops.fits_packed((48, 96), dtype, device)
