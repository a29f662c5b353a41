"""Packed weights: what they unpack to, and that to multiply them gives what their numbers give."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from packed_cases import SOME, packed, whole_units

from quire.kernels import ops
from quire.kernels.cpu import (
    byte_dots,
    byte_products,
    byte_rows,
    codes,
    dots,
    few_rows,
    many_rows,
    matrix_tiles,
    packed_call,
    panels,
    rounded_dots,
    vectors,
)
from quire.kernels.cpu.any_rows import capture
from quire.kernels.cpu.byte_products import has_products
from quire.kernels.cpu.claims import _TAKEN
from quire.kernels.cpu.features import IS_WIDE, cpu_features, dots_are_fast
from quire.kernels.cpu.graph import Pool
from quire.kernels.cpu.graph import capture as capture_graph
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.linear import _packed_kernel
from quire.kernels.cpu.panel_vectors import FEW, WIDTH
from quire.kernels.cpu.recording import CompiledCall, recorded_by
from quire.kernels.dispatch import forced_backend
from quire.kernels.elementwise import activate_and_mul
from quire.kernels.packed import (
    BLOCK,
    IN_8_BITS,
    PACKINGS,
    Packing,
    Parts,
    assemble,
    common,
    pack,
    repack,
    take_apart,
    unpack,
)

# (out_features, in_features): an odd number of panels, sums of one span and of more, and parts of a span.
SHAPES = [(32, 32), (48, 96), (80, 576), (48, 1536), (256, 512)]
KERNELS: list[tuple[ModuleType, torch.dtype]] = [(panels, torch.float32), (panels, torch.bfloat16)]
HAS_BYTES = has_products()
if HAS_BYTES:
    KERNELS += [(kernel, dtype) for kernel in (byte_dots, rounded_dots) for dtype in (torch.float32, torch.bfloat16)]
if matrix_tiles.are_available():
    KERNELS += [(codes, torch.float32), (codes, torch.bfloat16)]
if "avx512bf16" in cpu_features():
    KERNELS += [(dots, torch.bfloat16)]
BY_CHUNKS = [(kernel, dtype) for kernel, dtype in KERNELS if kernel in (byte_dots, rounded_dots, dots)]
OF_CODES = [(kernel, dtype) for kernel, dtype in KERNELS if kernel is not panels]
IN_FLOAT32 = codes if matrix_tiles.are_available() else byte_dots if HAS_BYTES else panels  # what multiplies it
IN_BFLOAT16 = dots if dots_are_fast() and IN_FLOAT32 is not codes else IN_FLOAT32
# That are recorded for others, where not 1.
LEAST_ROWS = {panels: FEW[-1] + 1, byte_dots: byte_rows.ROWS + 1, rounded_dots: byte_rows.ROWS + 1}
DTYPES = (
    [torch.bfloat16, torch.float32] if IS_WIDE or HAS_BYTES else [torch.float32]
)  # of x, with which weights stay packed


def ids(cases: list[tuple[ModuleType, torch.dtype]]) -> list[str]:
    return [f"{kernel.__name__.rpartition('.')[2]}-{str(dtype)[6:]}" for kernel, dtype in cases]


kernels = pytest.mark.parametrize(("kernel", "dtype"), KERNELS, ids=ids(KERNELS))
of_codes = pytest.mark.parametrize(("kernel", "dtype"), OF_CODES, ids=ids(OF_CODES))
ROW_COUNTS = (*range(1, 19), 29, 31, 32, 33, 40, 48, 100, 700)  # some of them come in more than one chunk
OTHERS = tuple(sorted(PACKINGS.keys() - SOME))
packings = pytest.mark.parametrize("packing", [PACKINGS[name] for name in SOME], ids=SOME)
all_packings = pytest.mark.parametrize("packing", PACKINGS.values(), ids=lambda packing: packing.name)


def of_packings(cases: list[tuple[ModuleType, torch.dtype]], names: Iterable[str] = SOME) -> pytest.MarkDecorator:
    """Kernels with all that they multiply."""
    both = [
        pytest.param(*case, PACKINGS[name], id=f"{kernel}-{name}")
        for case, kernel in zip(cases, ids(cases), strict=True)
        for name in names
        if (case[0] is not codes or PACKINGS[name].num_groups == 1)
        and (case[0] is not panels or not PACKINGS[name].table)
    ]
    return pytest.mark.parametrize(("kernel", "dtype", "packing"), both)


kernels_of_packings, of_codes_of_packings = of_packings(KERNELS), of_packings(OF_CODES)


def most_by_codes(kernel: Any, packing: Packing) -> int:
    """Rows in bfloat16 with which numbers are not rounded: where sums are of codes, only so many."""
    return {codes: 16 if packing.bits == 4 else 32, dots: dots.FEW_ROWS}.get(kernel, sys.maxsize)


def inputs(num_rows: int, in_features: int) -> torch.Tensor:
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(0))


def product(
    kernel: Any, x: torch.Tensor, rows: torch.Tensor, packing: Packing, bias: torch.Tensor | None = None
) -> torch.Tensor:
    got: torch.Tensor = kernel.linear(x, kernel.lay_out(rows, packing), bias, packing, x.dtype)
    return got


@all_packings
def test_a_number_is_its_code_times_a_scale(packing: Packing) -> None:
    """Two rows of two blocks, by hand."""
    count, units = packing.unit * 2 // BLOCK * packing.num_groups, 2  # of groups and units in a row
    halves = torch.tensor([[0.5, -2.0], [0.25, 1.0]]).half(), torch.tensor([[1.0, 3.0], [0.0, -7.0]]).half()
    nested = torch.arange(2 * count).view(2, count) % 127 - 63, torch.arange(2 * count).view(2, count) % 5
    kinds = [each.float().repeat_interleave(count // units, dim=1) for each in halves]
    if packing.is_nested:
        kinds = [half * whole for half, whole in zip(kinds, nested, strict=True)]
    codes = torch.arange(2 * units * packing.unit).view(2, -1) % (1 << packing.bits)
    parts = Parts(
        halves[0],
        halves[1] if packing.has_least else None,
        tuple(each.to(torch.int8) for each in nested[: packing.num_kinds]) if packing.is_nested else (),
        codes.to(torch.uint8).view(torch.int8),
    )
    rows = assemble(packing, parts)
    assert rows.shape[1] == packing.row_bytes(2 * packing.unit)
    assert packing.num_numbers(rows.shape[1]) == 2 * packing.unit
    signed = parts.codes.float().view(2, count, -1)
    least = 0 if packing.table else {4: -8, 6: -32, 8: 0}[packing.bits]
    if packing.table:
        signed = torch.tensor([float(packing.table[code]) for code in codes.flatten()]).view(2, count, -1)
    start = kinds[1] if packing.has_least else kinds[0] * least
    expected = signed * kinds[0][..., None] + start[..., None]
    assert torch.equal(unpack(rows, packing), expected.flatten(1))
    again = take_apart(rows, packing)
    assert (again.least is None) == (parts.least is None)
    assert parts.least is None or torch.equal(again.least, parts.least)
    for found, given in zip(
        (again.scales, *again.nested, again.codes), (parts.scales, *parts.nested, parts.codes), strict=True
    ):
        assert torch.equal(found, given)
    # By hand: float16, what is nested, and codes.
    stored = codes.view(2, -1, 32)
    if packing.bits == 4:
        fold = 16 // packing.num_groups
        lower = [i for i in range(32) if i // fold % 2 == 0]
        stored = torch.stack([stored[..., i] | stored[..., i + fold] << 4 for i in lower], dim=-1)
    elif packing.bits == 6:
        lower = [i for i in range(32) if i % 16 < 12]
        above = [stored[..., i // 16 * 16 + 12 + i % 4] >> i % 16 // 4 * 2 & 3 for i in lower]
        stored = torch.stack([stored[..., i] | part << 6 for i, part in zip(lower, above, strict=True)], dim=-1)
    given = [each.view(torch.uint8) for each in (*halves[: packing.num_kinds], *parts.nested)]
    assert torch.equal(rows, torch.cat([*given, stored.flatten(1).to(torch.uint8)], dim=1))


@all_packings
def test_what_several_ways_have_in_common(packing: Packing) -> None:
    """It holds the numbers of all of them, and needs no more bytes than it must."""
    rows = packed(packing, 16, 256)
    for other in PACKINGS.values():
        both = common([packing, other, packing])
        assert both == common([other, packing])
        assert (both is None) == ((packing.is_nested, packing.unit) != (other.is_nested, other.unit))
        if both is None:
            continue
        assert torch.equal(unpack(repack(rows, packing, both), both), unpack(rows, packing)), other
        assert both.num_groups == max(packing.num_groups, other.num_groups)
        assert both.has_least == (packing.has_least or other.has_least)
        same = packing == other
        assert both.bits == max((each.bits if same or not each.table else 8) for each in (packing, other))
        assert both.table == (packing.table if same else ())
    assert common([packing]) == packing
    assert common([packing, None]) is None
    assert common([None]) is None


def test_a_scale_too_large_for_a_least_number() -> None:
    """Which is 32 times a Q6_K's where others have one: nothing is rounded, and nothing becomes infinite unnoticed."""
    packing, both = PACKINGS["q6_k"], PACKINGS["k6_1_16"]
    rows = packed(packing, 16, 256)
    halves, _, _ = packing.parts(rows)
    halves[3] = torch.tensor([2047.0]).half().view(torch.uint8)
    assert torch.equal(unpack(repack(rows, packing, both), both), unpack(rows, packing))
    halves[3] = torch.tensor([2048.0]).half().view(torch.uint8)
    with pytest.raises(
        ValueError, match="scales of up to 2048, which are too large for least numbers as k6_1_16 has them"
    ):
        repack(rows, packing, both)
    assert torch.equal(unpack(repack(rows, packing, PACKINGS["k8_1_16"]), PACKINGS["k8_1_16"]), unpack(rows, packing))


def test_what_is_packed_in_8_bits() -> None:
    """Numbers are off by half a unit of their block, which is the next float16, and nothing of other blocks or rows
    matters."""
    numbers = inputs(48, 96) * torch.tensor([1.0, 1e-3, 300.0]).repeat_interleave(BLOCK)
    numbers[3, :32], numbers[5] = 0.0, -7.0
    numbers[4, 32:64] = torch.linspace(0.0, 1.49 * 127 * 2.0**-24, 32)  # whose unit would be between two float16
    numbers[6, 32:64] = torch.linspace(0.0, 0.3 * 127 * 2.0**-24, 32)  # less than the least of them
    rows = pack(numbers)
    assert rows.shape == (48, IN_8_BITS.row_bytes(96))
    found, units = unpack(rows, IN_8_BITS), numbers.unflatten(1, (3, BLOCK)).abs().amax(dim=2) / 127
    off = (found - numbers).unflatten(1, (3, BLOCK)).abs().amax(dim=2)
    assert (off <= 0.5 * (1.0001 * units * (1 + 2**-10) + 2**-24)).all()
    assert not (off <= 0.4 * units).all()
    assert torch.equal(found[3, :32], torch.zeros(32))
    torch.testing.assert_close(found[5], numbers[5], rtol=2**-8, atol=0)
    assert torch.equal(pack(numbers[7:8].bfloat16()), pack(numbers[7:8].bfloat16().float()))
    assert torch.equal(pack(numbers[7:8, 32:64]), pack(numbers[7:8])[:, [2, 3, *range(6 + 32, 6 + 64)]])
    with pytest.raises(ValueError, match=r"a number of 1e\+07 is too large"):
        pack(torch.full((1, 32), 1e7))


@pytest.mark.parametrize("num_rows", [1, 5, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@all_packings
def test_rows_that_are_looked_up(packing: Packing, dtype: torch.dtype, num_rows: int) -> None:
    """They are what the whole matrix unpacks to, whatever the float16 are; in a graph, too, that looks anew."""
    size = whole_units(packing, 160)
    rows = packed(packing, 96, size)
    halves, *_ = packing.parts(rows)
    edges = torch.tensor([0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC01, 0x3C00, 0xBC00], dtype=torch.int32)
    halves[:10, :2] = edges.to(torch.int16).view(torch.uint8).view(10, 2)
    token_ids = torch.randint(96, (num_rows,), generator=torch.Generator().manual_seed(3))
    token_ids[: min(num_rows, 10)] = torch.arange(min(num_rows, 10))

    def expected() -> torch.Tensor:
        return unpack(rows, packing)[token_ids].to(dtype)

    for backend in (None, "reference"):
        with forced_backend(backend) if backend else nullcontext():
            got = ops.look_up_packed(token_ids, rows, packing, dtype)
        torch.testing.assert_close(got, expected(), rtol=0, atol=0, equal_nan=True)
    assert ops.look_up_packed(token_ids[:0], rows, packing, dtype).shape == (0, size)
    found = []
    with torch.inference_mode():
        graph = capture_graph(lambda: found.append(ops.look_up_packed(token_ids, rows, packing, dtype)), Pool())
        token_ids.copy_(95 - token_ids)
        graph()
    torch.testing.assert_close(found[0], expected(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match="token_ids must be"):
        ops.look_up_packed(token_ids[None], rows, packing, dtype)
    with pytest.raises(ValueError, match="rows must be"):
        ops.look_up_packed(token_ids, rows.view(torch.int8), packing, dtype)


WITH_SHAPES = [(PACKINGS[name], shape) for name in SOME for shape in SHAPES]
WITH_SHAPES += [(PACKINGS[name], (48, 1536)) for name in OTHERS if not PACKINGS[name].table]  # not by `panels`


@pytest.mark.parametrize(("packing", "shape"), WITH_SHAPES, ids=lambda each: getattr(each, "name", str(each)))
def test_bits_are_those_of_the_numbers(packing: Packing, shape: tuple[int, int]) -> None:
    """In vectors, however many rows."""
    shape = (shape[0], whole_units(packing, shape[1]))
    rows = packed(packing, *shape)
    numbers, x, bias = unpack(rows, packing), inputs(700, shape[1]), torch.randn(shape[0])
    for given in (bias, None):
        whole = few_rows.linear("float32", x, numbers, None, given)
        if IS_X86:
            assert torch.equal(ops.linear(x, numbers, given), whole)
        for num_rows in ROW_COUNTS:
            got = product(panels, x[:num_rows], rows, packing, given)
            assert torch.equal(got, whole[:num_rows]), num_rows


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@packings
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_becomes_float32(shape: tuple[int, int], packing: Packing, out_dtype: torch.dtype) -> None:
    """In vectors, and results are rounded, or not."""
    shape = (shape[0], whole_units(packing, shape[1]))
    rows, x, bias = packed(packing, *shape), inputs(700, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    for given in (bias, None):
        whole = product(panels, x.float(), rows, packing, None if given is None else given.float())
        for num_rows in ROW_COUNTS:
            got = panels.linear(x[:num_rows], panels.lay_out(rows, packing), given, packing, out_dtype)
            assert torch.equal(got, whole[:num_rows].to(out_dtype)), num_rows


@all_packings
def test_what_multiplies_on_this_cpu(packing: Packing) -> None:
    size = whole_units(packing, 96)
    fit = {torch.float32, torch.bfloat16} & set(DTYPES)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert ops.fits_packed((48, size), packing, dtype, torch.device("cpu")) is (dtype in fit), dtype
        in_int8 = HAS_BYTES and dtype in fit
        if IN_FLOAT32 is codes:
            in_int8 = dtype == torch.bfloat16 and packing.bits == 4 and packing.num_groups == 1
        assert ops.fits_packed((48, size), packing, dtype, torch.device("cpu"), in_int8=True) is in_int8, dtype
    in_tiles = IN_FLOAT32 is codes and packing.num_groups == 1
    for dtype, otherwise in ((torch.bfloat16, IN_BFLOAT16), (torch.float32, IN_FLOAT32)):
        kernel = codes if in_tiles else byte_dots if otherwise is codes else otherwise
        assert _packed_kernel(packing, dtype, in_int8=False) is kernel


def sizes(rows: torch.Tensor, packing: Packing) -> torch.Tensor:
    """By number, in float64, the sizes of what it is the sum of, if a code is one around `zero`. (Of 16 numbers
    with one scale, the sum is less beside what rounding takes from each than of 32: by the root of two.)"""
    parts = take_apart(rows, packing)
    per_half = packing.num_groups * packing.unit // BLOCK
    kinds = [
        part.double().repeat_interleave(per_half, dim=1) for part in (parts.scales, parts.least) if part is not None
    ]
    if packing.is_nested:
        kinds = [half * whole for half, whole in zip(kinds, parts.nested, strict=True)]
    scales, *least = kinds
    middle = packing.zero * scales + least[0] if least else torch.zeros_like(scales)
    of_codes = (packing.zero or 128) * scales.abs()
    whole = (of_codes + middle.abs()).repeat_interleave(BLOCK // packing.num_groups, dim=1)
    return whole * packing.num_groups**0.5


def met(kernel: Any, x: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that a kernel multiplies, float64, and by how much more than by roundings of float32 each may be off:
    by a whole unit, where it lies in the middle between two."""
    in_two_digits, x = kernel is byte_dots and x.dtype == torch.bfloat16, x.double()
    blocks = x.unflatten(1, (-1, BLOCK // packing.num_groups))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    if in_two_digits:  # of them, 32,639 is the most
        units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest * 2 / 1.984375)[1] - 15)
        return ((blocks / units).round() * units).flatten(1), torch.zeros_like(x)
    if kernel is not rounded_dots:
        return x, torch.zeros_like(x)
    units = largest / 127
    whole = blocks / units
    in_the_middle = (whole - whole.floor() - 0.5).abs() < 1e-4
    return (whole.round() * units).flatten(1), (in_the_middle * units).flatten(1)


def check(got: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, most_exact: int) -> None:
    """At most four roundings of float32, of all that is summed up; in bfloat16 that of the result, and of numbers where
    there are more rows than `most_exact`."""
    allowed = 2**-22 * size
    if got.dtype == torch.bfloat16:
        allowed += 2**-8 * exact.abs() + (2**-8 * size if len(got) > most_exact else 0)
    assert ((got.double() - exact).abs() <= allowed).all(), len(got)


@of_codes_of_packings
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_rounded(shape: tuple[int, int], packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """x has all the bits that it can have, over a hundred binary orders of magnitude, and some within a row."""
    shape = (shape[0], whole_units(packing, shape[1]))
    rounded(shape, packing, kernel, dtype)


@of_packings(OF_CODES, OTHERS)
def test_what_is_rounded_of_other_packings(packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """With a bias alone: a product without one is the same program up to where it would be added."""
    rounded((80, 576), packing, kernel, dtype, only_biased=True)


def rounded(
    shape: tuple[int, int], packing: Packing, kernel: Any, dtype: torch.dtype, *, only_biased: bool = False
) -> None:
    shape = (shape[0], whole_units(packing, shape[1]))
    assert kernel.fits(*shape)
    most = most_by_codes(kernel, packing)
    rows, generator = packed(packing, *shape), torch.Generator().manual_seed(1)
    numbers, size = unpack(rows, packing).double(), sizes(rows, packing)
    x = inputs(40, shape[1]) * 2.0 ** torch.randint(-5, 5, (40, shape[1]), generator=generator)
    x = (x * 2.0 ** torch.randint(-50, 50, (40, 1), generator=generator)).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    for num_rows in (1, 8, 16, 21, 32, 40):
        given = x[:num_rows]
        multiplied, off = met(kernel, given, packing)
        exact, of_all = multiplied @ numbers.T, (multiplied.abs() + 2**22 * off) @ size.T
        if not only_biased:
            check(product(kernel, given, rows, packing), exact, of_all, most)
        biased = product(kernel, given, rows, packing, bias)
        check(biased, exact + bias.double(), of_all + bias.double().abs(), most)


@pytest.mark.parametrize("top", [1.0, 1.9765625, 8290432 / 2**22, 1.98437488, 1.9843751, 1.9921875, 1.9999999])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.skipif(not HAS_BYTES, reason="this CPU does not multiply bytes")
def test_the_largest_sums_of_bytes(dtype: torch.dtype, name: str, sign: float, top: float) -> None:
    """All numbers of x are the largest of their block, and all codes the least or the largest: whole numbers of 32 bits
    hold little more than their sum, and those of 16 than that of half of them. `top` lies on both sides of where the
    next power of two takes over; all digits of the third are -126 and -128 where it is negative."""
    packing, x = PACKINGS[name], torch.full((2, 64), sign * top).to(dtype)
    digits = byte_products.THREE_DIGITS if dtype == torch.float32 else byte_products.TWO_DIGITS
    if name == "q5_0" and byte_products.Way(packing, digits).product.number_bytes == 4:
        pytest.skip("products of x as it is are no whole numbers, and each sum of them is rounded")
    rows = torch.zeros(32, packing.row_bytes(64), dtype=torch.uint8)
    halves, _, codes_ = packing.parts(rows)
    halves.copy_(torch.full((32, 2), 0.5).half().view(torch.uint8))
    for byte, code in {4: ((0, -8), (0xFF, 7)), 6: ((0, -32), (0xFF, 31)), 8: ((0x80, -128), (0x7F, 127))}[
        packing.bits
    ]:
        codes_.fill_(byte)
        exact = x.double() @ unpack(rows, packing).double().T
        assert exact[0, 0] == x.double()[0, 0] * 64 * code / 2
        found = byte_dots.linear(x, byte_dots.lay_out(rows, packing), None, packing, torch.float32)
        torch.testing.assert_close(found.double(), exact, rtol=2**-22, atol=0)


@of_codes
def test_a_code_that_cancels_what_is_least(kernel: Any, dtype: torch.dtype) -> None:
    """All numbers are next to nothing, and what is rounded is not."""
    packing = PACKINGS["q4_1"]
    rows = packed(packing, 48, 96)
    halves, _, codes_ = (part.clone() for part in packing.parts(rows))
    scales = torch.rand(48, 3, generator=torch.Generator().manual_seed(2)).half()
    halves.copy_(torch.cat([scales, -5 * scales.float()], dim=1).half().view(torch.uint8))
    rows, x = torch.cat([halves, codes_.fill_(0x55)], dim=1), inputs(40, 96).to(dtype)
    multiplied, off = met(kernel, x, packing)
    exact, of_all = (
        multiplied @ unpack(rows, packing).double().T,
        (multiplied.abs() + 2**22 * off) @ sizes(rows, packing).T,
    )
    for num_rows in (1, 16, 32, 40):
        found = product(kernel, x[:num_rows], rows, packing)
        check(found, exact[:num_rows], of_all[:num_rows], most_by_codes(kernel, packing))


@pytest.mark.parametrize("kernel", [kernel for kernel, dtype in OF_CODES if dtype == torch.float32])
def test_ends_of_float32(kernel: Any) -> None:
    """What becomes infinite in bfloat16 has no rest; what is below the smallest normal number is nothing there. Bytes
    have powers of two above it. (AVX2 multiplies x as it is.)"""
    packing = PACKINGS["q8_0"]
    is_exact = kernel is byte_dots and byte_products.Way(packing, byte_products.THREE_DIGITS).product.number_bytes == 4
    tiny = 6e-39 if is_exact else 0.0
    rows = torch.cat(
        [torch.full((32, 1), 2.0).half().view(torch.uint8), torch.full((32, 32), 3, dtype=torch.uint8)], dim=1
    )
    for value, expected in ((3.4e38, torch.inf), (torch.inf, torch.inf), (1e33, 6e33), (1e-30, 6e-30), (1e-39, tiny)):
        x = torch.zeros(1, 32)
        x[0, 5] = value
        got = product(kernel, x, rows, packing)
        if value == torch.inf:
            assert not got.isfinite().any()
        else:
            rounded = 2**-22 if kernel is rounded_dots else 2**-23  # what a unit is worth is no power of two
            torch.testing.assert_close(got, torch.full((1, 32), expected), rtol=rounded, atol=0)


@kernels_of_packings
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_batch(
    shape: tuple[int, int], packing: Packing, kernel: Any, dtype: torch.dtype
) -> None:
    shape = (shape[0], whole_units(packing, shape[1]))
    rows, x, bias = packed(packing, *shape), inputs(700, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
    found = {num_rows: product(kernel, x[:num_rows], rows, packing, bias) for num_rows in ROW_COUNTS}
    most = most_by_codes(kernel, packing)
    for num_rows, got in found.items():
        whole = found[700 if num_rows > most or dtype == torch.float32 or most == sys.maxsize else most]
        assert torch.equal(got, whole[:num_rows]), num_rows


@of_packings([case for case in OF_CODES if case[0] in (codes, dots) and case[1] == torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows_in_bfloat16(shape: tuple[int, int], packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """They have the bits that numbers in bfloat16 give by the same instruction."""
    shape = (shape[0], whole_units(packing, shape[1]))
    rows, x = packed(packing, *shape), inputs(700, shape[1]).to(dtype)
    instruction = "bfloat16 dot" if kernel is dots else "tdpbf16ps"
    for bias in (None, torch.randn(shape[0]).bfloat16()):
        expected = many_rows.linear(x, unpack(rows, packing).bfloat16(), None, bias, instruction)
        for num_rows in ROW_COUNTS:
            if num_rows > most_by_codes(kernel, packing):
                assert torch.equal(product(kernel, x[:num_rows], rows, packing, bias), expected[:num_rows]), num_rows


@kernels
@pytest.mark.parametrize("num_rows", [8, *range(17, 49, 5), 100, 257])
def test_nothing_is_written_behind_the_result(
    num_rows: int, kernel: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows so long that x comes in several chunks, whose number is rounded: the last must not be one of no rows."""
    packing = PACKINGS["q4_1"]
    rows = packed(packing, 32, 96)
    weight, x = kernel.lay_out(rows, packing), inputs(num_rows, 96).to(dtype)
    expected = kernel.linear(x, weight, None, packing, dtype)
    monkeypatch.setattr(packed_call, "CHUNK_BYTES", 1 << 11)
    memory = torch.full((num_rows + 200, 32), 7.0, dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda _x, *shape, **_dtype: memory[: shape[0]])
    got, behind = kernel.linear(x, weight, None, packing, dtype).clone(), memory[num_rows:].clone()
    monkeypatch.undo()
    assert torch.equal(got, expected)
    assert (behind == 7.0).all()


class _Calls(list[CompiledCall]):
    add_call = list.append


@pytest.mark.parametrize(("kernel", "dtype"), BY_CHUNKS, ids=ids(BY_CHUNKS))
@pytest.mark.parametrize(("num_rows", "num_chunks"), [(255, 1), (256, 2), (600, 2)])
def test_of_many_rows_each_thread_has_its_own(num_rows: int, num_chunks: int, kernel: Any, dtype: torch.dtype) -> None:
    """How often threads have looked for an item: once for each, and at last in vain in all parts."""
    packing, calls, num_threads = PACKINGS["q4_0"], _Calls(), torch.get_num_threads()
    weight, x = kernel.lay_out(packed(packing, 96, 96), packing), inputs(num_rows, 96).to(dtype)
    with recorded_by(calls):
        kernel.linear(x, weight, None, packing, dtype)
    looks = sum(calls[-1].claims[(64 * (1 + thread) + _TAKEN) // 8] for thread in range(num_threads))
    assert num_threads == 2
    assert looks - num_threads**2 == num_chunks * 3, "pairs of panels"


@pytest.mark.parametrize("num_rows", [16, 21])
@pytest.mark.parametrize("dtype", DTYPES)
@all_packings
def test_the_reference_agrees(packing: Packing, dtype: torch.dtype, num_rows: int) -> None:
    size = whole_units(packing, 576)
    rows, x, bias = packed(packing, 80, size), inputs(num_rows, size).to(dtype), torch.randn(80).to(dtype)
    with forced_backend("reference"):
        assert ops.fits_packed((80, size), packing, dtype, torch.device("cpu"))
        expected = ops.linear_packed(x, ops.lay_out_packed(rows, packing, dtype), packing, bias)
    got = ops.linear_packed(x, ops.lay_out_packed(rows, packing, dtype), packing, bias)
    kernel, numbers = _packed_kernel(packing, dtype, in_int8=False), unpack(rows, packing)
    if dtype == torch.bfloat16 and num_rows > most_by_codes(kernel, packing):
        numbers = numbers.bfloat16().float()
        expected = (x.float() @ numbers.T + bias.float()).bfloat16()
    # Four roundings of float32, here and there, of all that is summed up; what a kernel takes from x; those of results.
    allowed = 2 * 2**-22 * (x.double().abs() @ sizes(rows, packing).T + bias.double().abs())
    allowed += (met(kernel, x, packing)[0] - x.double()).abs() @ numbers.double().abs().T
    allowed += 2 * 2**-8 * expected.double().abs() if dtype == torch.bfloat16 else 0
    assert ((got.double() - expected.double()).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@packings
def test_the_reference_agrees_in_int8(packing: Packing, dtype: torch.dtype) -> None:
    """Where no kernel of this CPU rounds x, it is off by what the reference rounds: half a unit of each block."""
    size = whole_units(packing, 96)
    rows, x = packed(packing, 160, size), inputs(12, size).to(dtype)
    x[3], x[4] = 2.0**-110, 0.0  # of blocks as small as these, nothing is left
    rounds = _packed_kernel(packing, dtype, in_int8=True) is rounded_dots
    with forced_backend("reference"):
        expected = ops.linear_packed(x, rows, packing, in_int8=True)
        gated = ops.linear_gated_packed(x, rows, packing, None, "silu", in_int8=rounds)
    weight = ops.lay_out_packed(rows, packing, dtype, in_int8=True)
    got = ops.linear_packed(x, weight, packing, in_int8=True)
    multiplied, off = met(rounded_dots, x, packing)
    multiplied[3:5] = 0.0
    of_group = BLOCK // packing.num_groups
    units = x.double().unflatten(1, (-1, of_group)).abs().amax(dim=-1, keepdim=True) / 127
    lost = units.expand(-1, -1, of_group).flatten(1) * (1e-4 if rounds else 0.501) + off
    allowed = lost @ unpack(rows, packing).double().abs().T + 2**-21 * (x.double().abs() @ sizes(rows, packing).T)
    allowed += 2 * 2**-8 * expected.double().abs() if dtype == torch.bfloat16 else 0
    exact = multiplied @ unpack(rows, packing).double().T
    assert ((expected.double() - exact).abs() <= allowed).all()
    assert ((got.double() - exact).abs() <= allowed)[torch.arange(12) != 3].all()
    assert not expected[3:5].any()
    assert not got[4].any()
    assert not (rounds and got[3].any())
    assert gated.shape == (12, 80)
    torch.testing.assert_close(
        ops.linear_gated_packed(x, weight, packing, None, "silu", in_int8=True), gated, rtol=0.05, atol=0.05
    )


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="bfloat16 does not stay packed on this CPU")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33])
@packings
def test_results_may_be_left_in_float32(num_rows: int, packing: Packing, has_bias: bool) -> None:
    """Rounded, they are those in bfloat16, whatever the backend."""
    size = whole_units(packing, 96)
    rows, x = packed(packing, 80, size), torch.randn(num_rows, size).bfloat16()
    bias = torch.randn(80).bfloat16() if has_bias else None
    for backend in (None, "reference"):
        with forced_backend(backend) if backend else nullcontext():
            weight = ops.lay_out_packed(rows, packing, x.dtype)
            short = ops.linear_packed(x, weight, packing, bias)
            whole = ops.linear_packed(x, weight, packing, bias, out_dtype=torch.float32)
            empty = ops.linear_packed(x[:0], weight, packing, bias, out_dtype=torch.float32)
        assert (short.dtype, whole.dtype, empty.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert torch.equal(whole.bfloat16(), short)
        assert not torch.equal(whole, short.float())


def test_what_the_kernels_cannot_do_is_named() -> None:
    weight, x = packed(PACKINGS["q4_1"], 64, 96), torch.randn(3, 96)
    with pytest.raises(ValueError, match="out_dtype must be float32"):
        ops.linear_packed(x, weight, PACKINGS["q4_1"], out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="activation must be one of"):
        ops.linear_gated_packed(x, weight, PACKINGS["q4_1"], None, "swish")


# With all bits. What comes behind sums does not know how they came: each activation is seen with one packing.
@of_packings(OF_CODES, ("q4_1", "q8_0", "k6_1_16"))
def test_gated_bits_are_those_of_both_steps(
    packing: Packing, kernel: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was not rounded in between; and behind the result nothing is written."""
    size = whole_units(packing, 96)
    rows, x = packed(packing, 160, size), torch.randn(100, size).to(dtype)
    weight = kernel.lay_out(rows, packing)
    activations = ("silu", "gelu_tanh", "swiglu_oai") if packing.name == "q4_1" else ("silu",)
    for activation, bias in itertools.product(activations, (None, torch.randn(160).to(dtype))):
        expected = {}
        for num_rows in (1, 16, 17, 33, 100):
            both = kernel.linear(x[:num_rows], weight, bias, packing, torch.float32)
            expected[num_rows] = activate_and_mul(both, activation).to(dtype)
        for chunk_bytes in (packed_call.CHUNK_BYTES, 1 << 11):
            with monkeypatch.context() as patched:
                patched.setattr(packed_call, "CHUNK_BYTES", chunk_bytes)
                for num_rows in expected:
                    memory = torch.full((num_rows + 100, 80), 7.0, dtype=dtype)
                    patched.setattr(torch.Tensor, "new_empty", lambda _x, *shape: memory[: shape[0]])  # noqa: B023
                    kernel.linear_gated(x[:num_rows], weight, bias, packing, activation)
                    assert torch.equal(memory[:num_rows], expected[num_rows])
                    assert (memory[num_rows:] == 7.0).all()


def rows_of_a_record(kernel: Any, recorded: int) -> tuple[int, int]:
    """Of how many rows, the least and the most, a record of so many is, in memory for 163."""
    others = LEAST_ROWS.get(kernel, 1)
    return (others, 163) if recorded >= others else (1, others - 1)


@of_codes_of_packings
@pytest.mark.parametrize("recorded", [5, 20, 41])
def test_any_number_of_rows_of_gates(recorded: int, kernel: Any, dtype: torch.dtype, packing: Packing) -> None:
    """And of results in float32 with a bias in bfloat16: a record of some rows is repeated with others."""
    size = whole_units(packing, 96)
    bias = torch.randn(160).to(dtype)
    weight, x = kernel.lay_out(packed(packing, 160, size), packing), torch.randn(163, size).to(dtype)
    least, most = rows_of_a_record(kernel, recorded)
    for run in (
        lambda x: kernel.linear_gated(x, weight, bias, packing, "silu"),
        lambda x: kernel.linear(x, weight, bias, packing, torch.float32),
    ):
        with torch.inference_mode():
            record, _ = capture(lambda run=run: (run(x[:recorded]),), Pool(), recorded, 163, [x])
            assert (record.least_rows, record.most_rows) == (least, most)
            for num_rows in {most, least, 2, 7, 16, 17, 32, 33, 41, 100} & set(range(least, most + 1)):
                x.copy_(torch.randn(163, size))
                found = record.replay(num_rows)[0].clone()
                assert torch.equal(found, run(x[:num_rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("out_features", [96, 80])
@packings
def test_gates_of_any_kind_and_size(packing: Packing, out_features: int, activation: str, dtype: torch.dtype) -> None:
    """In one step where a kernel can, in two where it cannot; as the reference has it."""
    size = whole_units(packing, 96)
    if not ops.fits_packed((out_features, size), packing, dtype, torch.device("cpu")):
        pytest.skip("not packed on this CPU")
    rows, bias = packed(packing, out_features, size), inputs(1, out_features)[0].to(dtype)
    x = inputs(7, size).to(dtype)
    with forced_backend("reference"):
        expected = ops.linear_gated_packed(x, rows, packing, bias, activation)
    got = ops.linear_gated_packed(x, ops.lay_out_packed(rows, packing, dtype), packing, bias, activation)
    empty = ops.linear_gated_packed(x[:0], ops.lay_out_packed(rows, packing, dtype), packing, bias, activation)
    assert (got.dtype, empty.shape) == (dtype, (0, out_features // 2))
    # Gates and ups are rounded like what they are sums of, four times, here and there, and in bfloat16 where they are
    # stored; results are rounded in either type.
    unit = 2**-22 if dtype == torch.float32 else 2**-8
    both, of_all = (
        x.double() @ unpack(rows, packing).double().T + bias.double(),
        x.double().abs() @ sizes(rows, packing).T,
    )
    off = 2 * 2**-22 * (of_all + bias.double().abs()) + (unit * both.abs() if dtype == torch.bfloat16 else 0)
    multiplied, _ = met(_packed_kernel(packing, dtype, in_int8=False), x, packing)
    off += (multiplied - x.double()).abs() @ unpack(rows, packing).double().abs().T
    (gates, ups), (off_gates, off_ups) = both.chunk(2, dim=1), off.chunk(2, dim=1)
    activate = F.silu if activation == "silu" else F.relu
    steps = [(activate(gates + sign * off_gates) - activate(gates)).abs() for sign in (-1, 1)]
    allowed = torch.maximum(*steps) * (ups.abs() + off_ups) + activate(gates).abs() * off_ups
    allowed += 2 * unit * (expected.double().abs() + allowed) + 2**-125 * (gates * ups).abs()  # exp ends at exp(87)
    wrong = (got.double() - expected.double()).abs() > allowed
    assert not wrong.any(), (gates[wrong], ups[wrong], got[wrong], expected[wrong], allowed[wrong])


@kernels_of_packings
@pytest.mark.parametrize("num_rows", [5, 21, 40])
def test_nothing_leaves_its_row_or_column(num_rows: int, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    size = whole_units(packing, 96)
    rows = packed(packing, 80, size)
    x = torch.randn(num_rows, size).to(dtype)
    whole = product(kernel, x, rows, packing)
    x[2, 17] = torch.nan
    spoilt = product(kernel, x, rows, packing)
    assert spoilt[2].isnan().all()
    spoilt[2] = whole[2]
    assert torch.equal(spoilt, whole)
    x[2, 17] = torch.inf
    assert not product(kernel, x, rows, packing)[2].isfinite().any()
    x[2, 17] = 0.0
    rows[19, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # a scale that is infinite
    spoilt = product(kernel, x, rows, packing)
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


@kernels
def test_largest_and_smallest_scales(kernel: Any, dtype: torch.dtype) -> None:
    """All of float16 but what is not a number: infinite numbers meet no zero here."""
    packing = PACKINGS["q8_0"]
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = torch.where(halves.isnan(), 1.0, halves).half().reshape(-1, 1)
    rows = torch.cat([halves.view(torch.uint8), torch.full((65536, BLOCK), 3, dtype=torch.uint8)], dim=1)
    for x in (torch.ones(1, BLOCK, dtype=dtype), torch.ones(20, BLOCK, dtype=dtype)):
        assert torch.equal(product(kernel, x, rows, packing)[-1], (halves.float()[:, 0] * 3 * BLOCK).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    packing = PACKINGS["q4_1"]
    weight = ops.lay_out_packed(packed(packing, 48, 96), packing, dtype)
    out = ops.linear_packed(torch.empty(0, 96, dtype=dtype), weight, packing)
    assert (out.shape, out.dtype) == ((0, 48), dtype)


@kernels_of_packings
@pytest.mark.parametrize("recorded", [5, 20, 41])
@pytest.mark.skipif(not IS_X86, reason="other layers of any number of rows are compiled on x86 alone")
def test_any_number_of_rows_of_a_record(recorded: int, packing: Packing, kernel: Any, dtype: torch.dtype) -> None:
    """A record of some rows is repeated with others, but not with so few or so many that they are taken otherwise."""
    size = whole_units(packing, 96)
    least, most = rows_of_a_record(kernel, recorded)
    bias = torch.randn(80).to(dtype)
    weight = kernel.lay_out(packed(packing, 80, size), packing)
    x = torch.randn(163, size).to(dtype)
    with torch.inference_mode():
        record, _ = capture(
            lambda: (kernel.linear(x[:recorded], weight, bias, packing, dtype),), Pool(), recorded, 163, [x]
        )
        assert (record.least_rows, record.most_rows) == (least, most)
        for num_rows in {most, least, 2, 7, 16, 17, 32, 33, 41, 100} & set(range(least, most + 1)):
            x.copy_(torch.randn(163, size))
            found = record.replay(num_rows)[0].clone()
            assert torch.equal(found, kernel.linear(x[:num_rows], weight, bias, packing, dtype))


@pytest.mark.parametrize("shape", [(40, 96), (16, 96), (48, 80), (48, 16)])
def test_what_does_not_fit(shape: tuple[int, int]) -> None:
    device = torch.device("cpu")
    fits = shape == (16, 96) and WIDTH == 1 and not HAS_BYTES  # others take two panels at once
    assert ops.fits_packed(shape, PACKINGS["q4_1"], torch.float32, device) is fits
    for dtype in {torch.float16, torch.bfloat16} - set(DTYPES):
        assert not ops.fits_packed((48, 96), PACKINGS["q4_1"], dtype, device)
