"""Linear layers: every backend against the float32 reference or exact sums, and what a row may not depend on."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import fp8, ops
from quire.kernels.cpu import few_rows, many_rows, turned_tiles
from quire.kernels.cpu.digits import X_MAX
from quire.kernels.cpu.intrinsics import IS_X86
from quire.kernels.cpu.linear import FEW_ROWS
from quire.kernels.cpu.tiles import FORMATS, best_format
from quire.kernels.cpu.turned_tiles import products
from quire.kernels.dispatch import forced_backend

SHAPES = [(4, 16), (8, 64), (20, 64), (48, 64), (52, 576), (960, 576), (576, 1536)]  # (out_features, in_features)


def _inputs(num_rows: int, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 7919 + out_features)
    x, weight = (
        torch.randn(num_rows, in_features, generator=generator),
        torch.randn(out_features, in_features, generator=generator),
    )
    return x, weight, torch.randn(out_features, generator=generator)


def _assert_is_exact_sum(got: torch.Tensor, expected: torch.Tensor, num_terms: int) -> None:
    """Errors of sums in float32 grow with the square root of the number of terms. They are those against sums in
    float64: the reference's own, which are the library's, are larger on some CPUs."""
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=2e-6 * num_terms**0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 15, 24, 25, 64, 300])
def test_cpu_agrees_with_exact_sums(num_rows: int, shape: tuple[int, int]) -> None:
    x, weight, bias = _inputs(num_rows, *shape)
    before = x.clone(), weight.clone(), bias.clone()
    product = x.double() @ weight.double().T
    for given, expected in ((bias, product + bias), (None, product)):
        _assert_is_exact_sum(ops.linear(x, weight, given), expected, shape[1])
    assert all(torch.equal(now, then) for now, then in zip((x, weight, bias), before, strict=True))


def _int8_inputs(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    return weight, torch.rand(shape[0], generator=generator) / 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 24, 25, 40, 300])
def test_int8_agrees_with_the_reference(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """x may be rounded to half a step of its row's largest / X_MAX, of which many add up like a random walk."""
    x, _, bias = (tensor.to(dtype) for tensor in _inputs(num_rows, *shape))
    before = x.clone()
    weight, scales = _int8_inputs(shape)
    with forced_backend("reference"):
        expected = ops.linear_int8(x.float(), weight, scales, bias.float())
    got = ops.linear_int8(x, weight, scales, bias)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    steps = x.abs().max().item() / X_MAX * shape[1] ** 0.5
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.float(), expected, rtol=rounding, atol=steps + rounding)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 12, 13, 25, 300])
def test_bfloat16_agrees_with_the_reference(num_rows: int, shape: tuple[int, int]) -> None:
    """The sums are of float32, and rounded once."""
    x, weight, bias = (tensor.bfloat16() for tensor in _inputs(num_rows, *shape))
    with forced_backend("reference"):
        expected = ops.linear(x.float(), weight.float(), bias.float())
    got = ops.linear(x, weight, bias)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-2)


def _runnable(name: str) -> bool:
    return best_format(name, "float32") == name


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.skipif(not _runnable(n), reason=n)) for n in FORMATS]
)
@pytest.mark.parametrize("in_features", [576, 3200])  # long rows are read otherwise, and eight of them by four
def test_every_format_of_this_cpu(name: str, in_features: int) -> None:
    """Those that this CPU does not choose, too. A row has the same bits in every batch, and NaN stays in its row."""
    x, weight, bias = _inputs(21, 52, in_features)
    scales = None
    if name.startswith("bfloat16"):
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    elif name.startswith("int8"):
        weight, scales = _int8_inputs((52, in_features))
    whole = few_rows.linear(name, x, weight, scales, bias)
    units = x.abs().amax(dim=1, keepdim=True) / 127
    computed = (x / units).round() * units if name == "int8 digit" else x
    exact = computed.double() @ weight.double().T * (1 if scales is None else scales.double()) + bias.double()
    rtol, atol = 2**-8 if x.dtype == torch.bfloat16 else 1e-4, 2e-3 * (in_features / 576) ** 0.5
    torch.testing.assert_close(whole.double(), exact, rtol=rtol, atol=atol)
    for num_rows in range(1, len(x)):
        assert torch.equal(few_rows.linear(name, x[:num_rows], weight, scales, bias), whole[:num_rows])
        assert torch.equal(few_rows.linear(name, x[num_rows:], weight, scales, bias), whole[num_rows:])
    for bad in (torch.nan, torch.inf):
        x[4, 17] = bad
        spoilt = few_rows.linear(name, x, weight, scales, bias)
        assert not spoilt[4].isfinite().any()
        assert torch.equal(spoilt[:4], whole[:4])
        assert torch.equal(spoilt[5:], whole[5:])


KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int8 of bfloat16": torch.int8}
# Weights of any type become float32 on any CPU, if asked to.
OF_THIS_CPU = [(kind, p) for kind, dtype in KINDS.items() for p in dict.fromkeys((*products(dtype), "float32"))]
SHAPES_OF_TILES = [(16, 64), (32, 576), (48, 576), (80, 1536)]
IN_TILES = [(*how, shape) for how in OF_THIS_CPU for shape in SHAPES_OF_TILES]
IN_TILES += [(kind, "float32", (48, 48)) for kind in KINDS]  # whole steps of 16 numbers, not of 16 pairs or bytes


@pytest.mark.skipif("int8 dot" not in products(torch.int8), reason="x has no digits here")
def test_rows_that_are_not_there_have_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's other rows are computed too. Where their scales were what lay in memory, subnormal results made a step
    of 8 requests take longer than one of 16."""
    made: list[torch.Tensor] = []
    empty = torch.empty

    def dirty(count: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(empty(count, dtype=dtype).fill_(1))
        return made[-1]

    x, weight, bias = _inputs(21, 32, 576)
    weight, scales = _int8_inputs((32, 576))
    monkeypatch.setattr(torch, "empty", dirty)
    many_rows.linear(x, weight, scales, bias)
    (x_scales,) = (each for each in made if each.dtype == torch.float32)
    assert (x_scales[:21] > 0).all()
    assert (x_scales[:21] < 1).all()
    assert (x_scales[21:] == 0).all()


@pytest.mark.skipif("int8 dot" not in products(torch.int8), reason="x has no digits here")
@pytest.mark.parametrize("num_digits", [1, 2])
def test_the_largest_sums_of_bytes(num_digits: int) -> None:
    """Of the least and the largest digits and weights, whose sums begin far below zero."""
    x = torch.tensor([1.0, -1.0]).repeat_interleave(17)[:, None].expand(-1, 8192).contiguous()
    weight = torch.tensor([-128, 127, 1, 0], dtype=torch.int8).repeat(8)[:, None].expand(-1, 8192).contiguous()
    found = many_rows.linear(x, weight, torch.ones(32), None, num_digits=num_digits)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2**-22, atol=0)


@pytest.mark.parametrize(("kind", "product", "shape"), IN_TILES)
def test_tiles_of_many_rows(kind: str, product: str, shape: tuple[int, int]) -> None:
    """Chunks of x, and half a block of the weight. A row has the same bits in every batch, and keeps its NaN."""
    num_rows = many_rows.chunk_bytes(product) // (2 * shape[1]) + 21
    x, weight, bias = _inputs(num_rows, *shape)
    scales = None
    if kind.endswith("bfloat16"):
        x, bias = x.bfloat16(), bias.bfloat16()
    if kind == "bfloat16":
        weight = weight.bfloat16()
    elif kind != "float32":
        weight, scales = _int8_inputs(shape)
    whole = many_rows.linear(x, weight, scales, bias, product)
    exact = x.double() @ weight.double().T * (1 if scales is None else scales.double()) + bias.double()
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8 if x.dtype == torch.bfloat16 else 1e-4, atol=5e-3)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 100):
        assert torch.equal(many_rows.linear(x[:count], weight, scales, bias, product), whole[:count])
        assert torch.equal(many_rows.linear(x[-count:], weight, scales, bias, product), whole[-count:])
    without = many_rows.linear(x[:5], weight, scales, None, product).double()
    torch.testing.assert_close(without, exact[:5] - bias.double(), rtol=2**-8, atol=2e-2)
    for bad in (torch.nan, torch.inf):
        x[4, 17] = bad
        spoilt = many_rows.linear(x, weight, scales, bias, product)
        assert not spoilt[4].isfinite().any()
        assert torch.equal(spoilt[:4], whole[:4])
        assert torch.equal(spoilt[5:], whole[5:])


@pytest.mark.parametrize(
    ("tiles", "dots", "bfloat16", "int8"),
    [
        (True, False, ("tdpbf16ps", "float32", "bfloat16 dot"), ("tdpbssd", "int8 dot")),
        (False, False, ("float32", "bfloat16 dot"), ("int8 dot",)),
        (False, True, ("bfloat16 dot", "float32"), ("int8 dot",)),
    ],
    ids=["Intel, with AMX", "Intel, without", "AMD"],
)
def test_what_multiplies_on_others(
    tiles: bool, dots: bool, bfloat16: tuple[str, ...], int8: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which it is fastest. Only where float32 comes first is a weight copied that no tile fits."""
    monkeypatch.setattr(turned_tiles, "IS_X86", True)
    monkeypatch.setattr(turned_tiles, "cpu_features", lambda: {"avx512bf16", "avx512vnni"})
    monkeypatch.setattr(turned_tiles, "dots_are_fast", lambda: dots)
    monkeypatch.setattr(turned_tiles.matrix_tiles, "are_available", lambda: tiles)
    assert products.__wrapped__(torch.bfloat16) == bfloat16
    assert products.__wrapped__(torch.int8) == int8
    assert products.__wrapped__(torch.float32) == ("float32",)


@pytest.mark.skipif("int8 dot" not in products(torch.int8), reason="this CPU does not multiply bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_digits", [1, 2])
def test_int8_is_the_same_in_all_tiles(num_digits: int, dtype: torch.dtype) -> None:
    """Sums of whole numbers have no order: an int8 model's rows do not depend on their batch, however large."""
    x, _, bias = (tensor.to(dtype) for tensor in _inputs(2 * max(FEW_ROWS.values()), 960, 576))
    weight, scales = _int8_inputs((960, 576))
    in_int8, name = num_digits == 1, "int8 digit" if num_digits == 1 else "int8 dot"
    whole = ops.linear_int8(x, weight, scales, bias, in_int8=in_int8)
    for product in products(torch.int8):
        assert torch.equal(many_rows.linear(x, weight, scales, bias, product, num_digits=num_digits), whole)
    for num_rows in range(1, 2 * max(FEW_ROWS.values())):
        assert torch.equal(few_rows.linear(name, x[:num_rows], weight, scales, bias), whole[:num_rows])
        assert torch.equal(ops.linear_int8(x[:num_rows], weight, scales, bias, in_int8=in_int8), whole[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 6, 8, 21, 40, 300])
def test_int8_of_what_is_rounded_to_8_bits(num_rows: int, dtype: torch.dtype) -> None:
    """By the largest of each row: the reference's numbers, but where it is half way between two. In 16 bits where that
    is no faster."""
    shape = (960, 576)
    x, _, bias = (tensor.to(dtype) for tensor in _inputs(num_rows, *shape))
    weight, scales = _int8_inputs(shape)
    with forced_backend("reference"):
        expected = [
            ops.linear_int8(x.float(), weight, scales, bias.float(), in_int8=rounds) for rounds in (True, False)
        ]
    rounds = ops.pays_in_int8(shape, dtype, torch.device("cpu"))
    got = ops.linear_int8(x, weight, scales, bias, in_int8=True).float()
    errors = [float((got - each).abs().max()) for each in expected]
    closest, rounding = min(errors), 2**-8 * float(expected[0].abs().max()) if dtype == torch.bfloat16 else 1e-2
    assert closest == errors[0 if rounds else 1]
    assert closest < rounding
    assert float((expected[0] - expected[1]).abs().max()) > 1e-2, "rounding is seen"


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_int8_of_what_is_not_finite_or_zero(num_rows: int, in_int8: bool) -> None:
    """In all tiles: NaN stays in its row, and nothing times anything is nothing."""
    x, _, _ = _inputs(num_rows, 48, 64)
    weight, scales = _int8_inputs((48, 64))
    x[0, 5], x[1] = torch.inf, 0.0
    out = ops.linear_int8(x, weight, scales, in_int8=in_int8)
    assert not out[0].isfinite().any()
    assert torch.equal(out[1], torch.zeros(48))
    assert out[2:].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 25])
@pytest.mark.parametrize("num_groups", [None, 3])
def test_fp8_agrees_with_the_reference(num_rows: int, num_groups: int | None) -> None:
    x, weight, bias = _inputs(num_rows, 52, 576)
    of_parts = (52,) if num_groups is None else (num_groups, 52)
    stored = fp8.quantize(weight, 0.01)
    scales = torch.rand(of_parts, generator=torch.Generator().manual_seed(3)) / 100
    with forced_backend("reference"):
        expected = ops.linear_fp8(x, stored, scales, bias)
    torch.testing.assert_close(ops.linear_fp8(x, stored, scales, bias), expected, rtol=1e-5, atol=1e-4)


def _same_in_any_batch(dtype: torch.dtype) -> bool:
    return IS_X86 and products(dtype)[:1] == ("float32",)


@pytest.mark.parametrize("shape", [(960, 576), (52, 1536), (48, 48), (20, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Bit for bit, by whatever kernel: the order of a sum has chunks, whole and not. One weight fits only few rows."""
    if not _same_in_any_batch(dtype):
        pytest.skip("a library, or instructions for bfloat16, add in orders of their own")
    x, weight, bias = (tensor.to(dtype) for tensor in _inputs(600, *shape))
    whole = ops.linear(x, weight, bias)
    for num_rows in (*range(1, 40), 64, 255, 257, 512):
        assert torch.equal(ops.linear(x[:num_rows], weight, bias), whole[:num_rows])
        assert torch.equal(ops.linear(x[-num_rows:], weight, bias), whole[-num_rows:])


def test_the_order_of_a_sum() -> None:
    """That of `tile_product`, by numbers of which each order gives another sum: 512 in four classes, then the rest."""
    x, weight, _ = _inputs(30, 16, 576)

    def add(total: torch.Tensor, first: int, end: int) -> torch.Tensor:
        for start in range(4):
            part = torch.zeros(30, 16)
            for k in range(first + start, end, 4):
                product = x[:, k, None].double() * weight[:, k].double()  # as exact as in a fused step
                part = (part.double() + product).float()
            total = total + part
        return total

    expected = add(add(torch.zeros(30, 16), 0, 512), 512, 576)
    assert torch.equal(ops.linear(x, weight), expected)
    assert torch.equal(ops.linear(x[:3], weight), expected[:3])


@pytest.mark.parametrize("shape", [(50, 576), (48, 40), (3, 64), (48, 41)])
def test_sizes_that_no_tile_fits(shape: tuple[int, int]) -> None:
    """The library's, or a kernel's for all that are nearly whole."""
    x, weight, bias = _inputs(3, *shape)
    _assert_is_exact_sum(ops.linear(x, weight, bias), x.double() @ weight.double().T + bias, shape[1])


# Vocabularies that 4 does not divide, intermediate sizes that 16 does not, and what tiles reach past in both.
ODD_SHAPES = [(50, 576), (49, 64), (9, 64), (8, 64), (11, 2732), (344, 172), (48, 40), (17, 516), (15, 4)]


@pytest.mark.skipif(not IS_X86, reason="the library's")
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_float32_of_odd_sizes(shape: tuple[int, int], has_padding: bool) -> None:
    """Sums are exact enough, and a row has the same bits in every batch. Behind rows that are not whole quarters of a
    vector is something; what it is does not matter."""
    out_features, in_features = shape
    x, weight, bias = _inputs(300, *shape)
    if has_padding:
        in_features -= 1
        x, weight = x[:, :in_features], weight[:, :in_features]
    whole = ops.linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole, exact.float(), rtol=1e-5, atol=2e-6 * in_features**0.5)
    for num_rows in (*range(1, 27), 48, 49, 64, 257):
        assert torch.equal(ops.linear(x[:num_rows], weight, bias), whole[:num_rows])
        assert torch.equal(ops.linear(x[-num_rows:], weight, bias), whole[-num_rows:])
    assert torch.equal(ops.linear(x, weight), ops.linear(x, weight, torch.zeros(out_features)))


@pytest.mark.skipif(not IS_X86, reason="the library's")
def test_rows_of_a_wider_matrix_are_not_read_past_its_end() -> None:
    x, wide, _ = _inputs(3, 48, 64)
    weight = wide[:, 1:]  # 63 numbers, of which the last row has nothing behind it
    assert not few_rows.is_padded(weight)
    torch.testing.assert_close(ops.linear(x[:, 1:], weight), torch.nn.functional.linear(x[:, 1:], weight))


def test_strided_and_empty_inputs() -> None:
    x, weight, _ = _inputs(8, 48, 64)
    torch.testing.assert_close(ops.linear(x[::2], weight), ops.linear(x, weight)[::2])
    assert ops.linear(x[:0], weight).shape == (0, 48)


@pytest.mark.parametrize("num_rows", [64, 127, 300])
def test_few_rows_in_chunks_of_x(num_rows: int) -> None:
    """More than a cache holds: what a chunk of x has computed is what its rows are alone."""
    x, weight, bias = _inputs(num_rows, 52, 4096)
    assert x.nbytes > few_rows.CHUNK_BYTES
    whole = few_rows.linear("float32", x, weight, None, bias)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=2e-4)
    for start in range(0, num_rows, 7):
        rows = slice(start, start + 7)
        assert torch.equal(few_rows.linear("float32", x[rows], weight, None, bias), whole[rows])
