"""Norms, gated activations and rotations on CPU against the float32 reference, and what a row may not depend on."""

from __future__ import annotations

import pytest
import torch
from elementwise_cases import checks, reference, tolerance

from quire.kernels import elementwise
from quire.kernels.dispatch import forced_backend
from quire.kernels.elementwise import Rotation, angles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMED = {name: (dtype, check) for dtype in DTYPES for name, check in checks(dtype, large=True).items()}


@pytest.mark.parametrize("name", NAMED)
def test_matches_the_reference_and_changes_nothing_else(name: str) -> None:
    dtype, check = NAMED[name]
    for got, expected in zip(check(), reference(check), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(got, expected, **tolerance(name, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    """Bit for bit, whether few rows run on the calling thread or many on all."""
    x, gate_up = torch.randn(700, 100).to(dtype), torch.randn(300, 600).to(dtype)
    weight = torch.randn(100).to(dtype)
    normed, gated = elementwise.rms_norm(x, weight, 1e-5), elementwise.activate_and_mul(gate_up, "silu")
    after, added = elementwise.add_rms_norm(x, x.clone(), weight, 1e-5)
    for row in (0, 13, 299):
        one = slice(row, row + 1)
        assert torch.equal(elementwise.rms_norm(x[one], weight, 1e-5), normed[one])
        assert torch.equal(elementwise.activate_and_mul(gate_up[one], "silu"), gated[one])
        after_alone, alone = elementwise.add_rms_norm(x[one], x[one].clone(), weight, 1e-5)
        assert torch.equal(after_alone, after[one])
        assert torch.equal(alone, added[one])


def test_bfloat16_is_rounded_to_nearest_even_and_keeps_nan() -> None:
    """Every result of torch's own conversion, on numbers whose lower halves are ties and near-ties."""
    upper = torch.tensor([0x3F80, 0x3F81, 0xBF81, 0x7F7F, 0x0001], dtype=torch.int32) << 16
    words = (upper[:, None] | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    ones, zeros = torch.ones(1, 1), torch.zeros(1, 1)
    for number in words.view(torch.float32):
        # A rotation of the pair (1, 0) by (cos, sin) = (number, 0) gives the number.
        heads = torch.tensor([[[1.0, 0.0]]], dtype=torch.bfloat16)
        elementwise.rotate(heads, Rotation(ones * number, zeros, interleaved=False))
        assert heads[0, 0, 0] == number.to(torch.bfloat16)
    broken = torch.tensor([[torch.nan, 1.0], [1.0, 1.0]], dtype=torch.bfloat16)
    normed = elementwise.rms_norm(broken, torch.ones(2, dtype=torch.bfloat16), 0.0)
    assert normed[0].isnan().all()
    assert normed[1].tolist() == [1.0, 1.0]


def test_norm_by_hand() -> None:
    """The mean of the squares of 3 and 4 is 12.5; 1 + 1 = 2 and 3 - 1 = 2 first."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 0.5])
    expected = x / 12.5**0.5 * weight
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 0.0), expected)
    torch.testing.assert_close(elementwise.rms_norm(x, weight - 1, 0.0, unit_offset=True), expected)
    stream = torch.tensor([[1.0, 5.0]])
    normed, total = elementwise.add_rms_norm(torch.tensor([[4.0, -2.0]]), stream, weight, 0.0, multiplier=0.5)
    torch.testing.assert_close(normed, expected)
    assert total.tolist() == x.tolist()


def test_pairs_by_hand() -> None:
    """A quarter turn of both pairs of the first four channels; the other two channels stay."""
    quarter = torch.zeros(1, 2), torch.ones(1, 2)
    halves, neighbours = torch.arange(1.0, 7.0).repeat(2, 1, 1, 1)
    elementwise.rotate(halves, Rotation(*quarter, interleaved=False))
    assert halves.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]
    elementwise.rotate(neighbours, Rotation(*quarter, interleaved=True))
    assert neighbours.flatten().tolist() == [-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_angles(num_tokens: int, backend: str) -> None:
    """Positions near and far, and the bits of each do not depend on those beside it."""
    positions = torch.randint(131072, (num_tokens,), generator=torch.Generator().manual_seed(0))
    positions[0] = 0
    inv_freq = 1.0 / 10000.0 ** (torch.arange(32) / 32)
    with forced_backend(backend):
        cos, sin = angles(positions, inv_freq, 1.25)
        alone = [angles(positions[i : i + 1], inv_freq, 1.25) for i in range(num_tokens)]
    exact = (positions[:, None].float() * inv_freq).double()
    torch.testing.assert_close(cos.double(), exact.cos() * 1.25, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), exact.sin() * 1.25, rtol=0, atol=2e-7)
    if backend == "cpu":
        assert torch.equal(cos, torch.cat([each for each, _ in alone]))
        assert torch.equal(sin, torch.cat([each for _, each in alone]))


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"weight must be \[8\] torch.float32, got \[7\]"):
        elementwise.rms_norm(x, weight[:7], 1e-5)
    with pytest.raises(ValueError, match=r"got .* torch.bfloat16"):
        elementwise.rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(TypeError, match=r"positions must be int64, inv_freq float32, got torch.int32"):
        angles(torch.arange(3, dtype=torch.int32), weight)
    with pytest.raises(ValueError, match="must be rows"):
        angles(torch.arange(4)[::2], weight)
    with pytest.raises(ValueError, match="contiguous rows"):
        elementwise.rms_norm(x.T, weight[:2], 1e-5)
    with pytest.raises(TypeError, match="x must be one of"):
        elementwise.rms_norm(x.double(), weight.double(), 1e-5)
    with pytest.raises(ValueError, match=r"x must be \[2, 8\]"):
        elementwise.add_rms_norm(x[:1], x.clone(), weight, 1e-5)
    with pytest.raises(ValueError, match=r"2 \* size"):
        elementwise.activate_and_mul(torch.randn(2, 7), "silu")
    with pytest.raises(ValueError, match="one of silu, gelu, gelu_tanh, relu, swiglu_oai, got 'swish'"):
        elementwise.activate_and_mul(x, "swish")
    with pytest.raises(ValueError, match=r"cos and sin must be \[1, at most 4\]"):
        elementwise.rotate(torch.randn(1, 1, 8), Rotation(torch.ones(2, 4), torch.ones(2, 4), interleaved=False))
    with pytest.raises(ValueError, match="of the same tokens"):
        elementwise.rotate_and_write_kv(
            torch.randn(1, 2, 8),
            torch.randn(2, 1, 8),
            torch.randn(2, 1, 8),
            Rotation(torch.ones(1, 4), torch.ones(1, 4), interleaved=False),
            *torch.zeros(2, 3, 4, 1, 8),
            torch.tensor([0, 1]),
        )
