"""Linear layers of every backend against the float32 reference, and what a row may not depend on."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import fp8, ops
from quire.kernels.cpu.linear import MAX_ROWS
from quire.kernels.dispatch import forced_backend

SHAPES = [(4, 16), (48, 64), (52, 576), (960, 576), (576, 1536)]  # (out_features, in_features)


def _inputs(num_rows: int, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * 7919 + out_features)
    x, weight = (
        torch.randn(num_rows, in_features, generator=generator),
        torch.randn(out_features, in_features, generator=generator),
    )
    return x, weight, torch.randn(out_features, generator=generator)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 15, 24, 25, 64])
def test_cpu_agrees_with_the_reference(num_rows: int, shape: tuple[int, int]) -> None:
    """Float32 sums in another order: the difference grows with the square root of the number of terms."""
    x, weight, bias = _inputs(num_rows, *shape)
    before = x.clone(), weight.clone(), bias.clone()
    with forced_backend("reference"):
        expected = ops.linear(x, weight, bias), ops.linear(x, weight)
    got = ops.linear(x, weight, bias), ops.linear(x, weight)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6 * shape[1] ** 0.5)
    assert all(torch.equal(now, then) for now, then in zip((x, weight, bias), before, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 24, 25])
def test_int8_agrees_with_the_reference(num_rows: int, shape: tuple[int, int]) -> None:
    x, _, bias = _inputs(num_rows, *shape)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    scales = torch.rand(shape[0], generator=generator) / 127
    with forced_backend("reference"):
        expected = ops.linear_int8(x, weight, scales, bias)
    torch.testing.assert_close(
        ops.linear_int8(x, weight, scales, bias), expected, rtol=1e-5, atol=2e-6 * shape[1] ** 0.5
    )


@pytest.mark.parametrize("num_rows", [1, 25])
def test_fp8_agrees_with_the_reference(num_rows: int) -> None:
    x, weight, bias = _inputs(num_rows, 52, 576)
    stored, scales = fp8.quantize(weight, 0.01), torch.rand(52, generator=torch.Generator().manual_seed(3)) / 100
    with forced_backend("reference"):
        expected = ops.linear_fp8(x, stored, scales, bias)
    torch.testing.assert_close(ops.linear_fp8(x, stored, scales, bias), expected, rtol=1e-5, atol=1e-4)


def test_rows_do_not_depend_on_their_batch() -> None:
    """Bit for bit, for every number of rows that decode steps have."""
    x, weight, _ = _inputs(MAX_ROWS, 960, 576)
    whole = ops.linear(x, weight)
    for num_rows in range(1, MAX_ROWS):
        assert torch.equal(ops.linear(x[:num_rows], weight), whole[:num_rows])
        assert torch.equal(ops.linear(x[num_rows:], weight), whole[num_rows:])


@pytest.mark.parametrize("shape", [(50, 576), (48, 40)])
def test_sizes_that_no_tile_fits_take_the_library(shape: tuple[int, int]) -> None:
    x, weight, bias = _inputs(3, *shape)
    torch.testing.assert_close(ops.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


def test_strided_and_empty_inputs() -> None:
    x, weight, _ = _inputs(8, 48, 64)
    torch.testing.assert_close(ops.linear(x[::2], weight), ops.linear(x, weight)[::2])
    assert ops.linear(x[:0], weight).shape == (0, 48)
