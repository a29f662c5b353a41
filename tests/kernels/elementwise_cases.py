"""Inputs for norms, gated activations and rotations, shared by the CPU tests and the checks of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quire.kernels import elementwise, fp8
from quire.kernels.dispatch import forced_backend
from quire.kernels.elementwise import HeadNorms, Rotation

# Against the same operation in float32 on the same numbers. A norm's sum and an exponential are off by a few units of
# 2**-24 of values of order 10; in a short type that may decide between two neighbouring results, 2**-7 or 2**-10 apart,
# and between two such neighbours where a sum is rounded before it is normalized.
_RELATIVE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def tolerance(name: str, dtype: torch.dtype) -> dict[str, float]:
    """For `assert_close`. Neighbours in 8 bits are an eighth apart; and what a rotation adds up may be less than both,
    which were rounded before where there is a norm."""
    atol = 4 * _RELATIVE[dtype] if name.startswith("norm_rotate") else 1e-5
    return {"rtol": 0.13 if "fp8" in name else _RELATIVE[dtype], "atol": atol}


Check = Callable[[], list[Tensor]]  # runs an operation, and gives all that it may have changed


def checks(dtype: torch.dtype, device: str = "cpu", *, large: bool = False) -> dict[str, Check]:
    """By name; the inputs are made anew, and equal, by each call. `large`: enough rows for several threads, too."""
    return dict(_checks(dtype, device, large=large))


def _checks(dtype: torch.dtype, device: str, *, large: bool) -> Iterator[tuple[str, Check]]:
    name = str(dtype).removeprefix("torch.")
    for num_rows, size in ((1, 576), (3, 100), (40, 16), (2, 1), (0, 8), *[(130, 576)] * large):
        yield f"rms_norm-{num_rows}x{size}-{name}", _norm(num_rows, size, dtype, device)
        yield f"add_rms_norm-{num_rows}x{size}-{name}", _add_norm(num_rows, size, dtype, device)
    yield f"rms_norm-heads-{name}", _head_norm(dtype, device)
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai"):
        for num_rows, size in ((1, 1536), (5, 37), (0, 8), *[(64, 1100)] * large):
            yield f"{activation}-{num_rows}x{size}-{name}", _gate(num_rows, size, activation, dtype, device)
    heads = [(1, 64, 32), (7, 80, 20), (2, 6, 3), (0, 8, 4), *[(150, 64, 32)] * large]
    for interleaved in (False, True):
        for num_tokens, head_dim, num_pairs in heads:
            shape = f"{num_tokens}x{head_dim}x{num_pairs}-{'interleaved' if interleaved else 'halves'}-{name}"
            inputs = num_tokens, head_dim, num_pairs, interleaved, dtype, device
            yield f"rotate-{shape}", _rotate(*inputs)
            yield f"rotate_and_write-{shape}", _write(*inputs, cache_dtype=dtype)
            yield f"norm_rotate_and_write-{shape}", _write(*inputs, cache_dtype=dtype, has_norms=True)
    for has_norms in (False, True):
        kind = "norm_rotate_and_write" if has_norms else "rotate_and_write"
        inputs = 7, 64, 32, False, dtype, device
        yield f"{kind}-fp8-{name}", _write(*inputs, cache_dtype=fp8.DTYPE, has_norms=has_norms)


def reference(check: Check) -> list[Tensor]:
    with forced_backend("reference"):
        return check()


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(device, dtype)


def _norm(num_rows: int, size: int, dtype: torch.dtype, device: str) -> Check:
    def run() -> list[Tensor]:
        x = _random((num_rows, size + 3), dtype, device)[:, :size]  # rows are further apart than they are long
        weight = _random((size,), dtype, device, 1)
        return [
            elementwise.rms_norm(x, weight, 1e-5),
            elementwise.rms_norm(x.contiguous(), weight, 0.1, unit_offset=True),
            x,
            weight,
        ]

    return run


def _head_norm(dtype: torch.dtype, device: str) -> Check:
    def run() -> list[Tensor]:
        heads = _random((5, 9, 64), dtype, device)
        return [elementwise.rms_norm(heads[:, 2:6], _random((64,), dtype, device, 1), 1e-6)]

    return run


def _add_norm(num_rows: int, size: int, dtype: torch.dtype, device: str) -> Check:
    def run() -> list[Tensor]:
        x, weight = _random((num_rows, size + 2), dtype, device)[:, :size], _random((size,), dtype, device, 1)
        stream = _random((num_rows, size + 1), dtype, device, 2)
        first, total = elementwise.add_rms_norm(x, stream[:, :size], weight, 1e-5)
        between = total.clone()
        second, total = elementwise.add_rms_norm(x, total, weight, 1e-5, unit_offset=True, multiplier=0.22)
        return [first, between, second, total, x, stream[:, size:]]

    return run


def _gate(num_rows: int, size: int, activation: str, dtype: torch.dtype, device: str) -> Check:
    def run() -> list[Tensor]:
        gate_up = _random((num_rows, 2 * size + 1), dtype, device)[:, : 2 * size]
        if num_rows:
            gate_up[0, :4] = torch.tensor([-200.0, -30.0, 30.0, 200.0], dtype=dtype)
        return [elementwise.activate_and_mul(gate_up, activation), gate_up]

    return run


def _rotation(num_tokens: int, num_pairs: int, interleaved: bool, device: str) -> Rotation:
    angles = _random((num_tokens, num_pairs), torch.float32, "cpu", 3)
    return Rotation(angles.cos().to(device), angles.sin().to(device), interleaved)


def _rotate(
    num_tokens: int, head_dim: int, num_pairs: int, interleaved: bool, dtype: torch.dtype, device: str
) -> Check:
    def run() -> list[Tensor]:
        heads = _random((num_tokens, 5, head_dim), dtype, device)
        elementwise.rotate(heads[:, 1:4], _rotation(num_tokens, num_pairs, interleaved, device))
        return [heads]

    return run


def _write(
    num_tokens: int,
    head_dim: int,
    num_pairs: int,
    interleaved: bool,
    dtype: torch.dtype,
    device: str,
    cache_dtype: torch.dtype,
    has_norms: bool = False,
) -> Check:
    """Packed projections of 3 query heads and 2 KV heads; every third token belongs to nobody."""

    def run() -> list[Tensor]:
        packed = _random((num_tokens, 7, head_dim), dtype, device)
        slots = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:num_tokens].to(device)
        slots[2::3] = -1
        caches = torch.full((2, 50, 4, 2, head_dim), 7.0, device=device).to(cache_dtype)
        weights = [_random((head_dim,), dtype, device, seed) for seed in (5, 6)]
        rotated = elementwise.rotate_and_write_kv(
            packed[:, :3],
            packed[:, 3:5],
            packed[:, 5:],
            _rotation(num_tokens, num_pairs, interleaved, device),
            caches[0],
            caches[1],
            slots,
            key_scale=0.05,
            value_scale=0.7,
            norms=HeadNorms(*weights, 1e-5, unit_offset=interleaved) if has_norms else None,
        )
        return [rotated, packed[:, 3:], caches.float()]

    return run
