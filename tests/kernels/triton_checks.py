"""Runs the Triton kernels over cases and compares with the reference. On a GPU, or on CPU with TRITON_INTERPRET=1.

`python -m tests.kernels.triton_checks` prints one JSON object, check name -> null or what was wrong. The interpreter is
chosen when triton is first imported, so it needs a process of its own.
"""

from __future__ import annotations

import json

import torch

from quire.kernels import fp8, ops
from quire.kernels.dispatch import forced_backend
from tests.kernels.kernel_cases import CASES, TOLERANCE, Case, attend, build


def attention_error(case: Case, device: str) -> float:
    """Largest deviation from the float32 reference over the tokens that belong to requests."""
    inputs = build(case, device)
    with forced_backend("triton"):
        out = attend(inputs, case)
    with forced_backend("reference"):
        expected = attend(inputs.to_float32(), case)
    error = (out.float() - expected).abs()
    return float("inf") if error.isnan().any() else float(error.max())


def write_kv_is_exact(
    dtype: torch.dtype,
    device: str,
    num_kv_heads: int = 3,
    head_dim: int = 80,
    cache_dtype: torch.dtype | None = None,
) -> bool:
    """Strided keys and values, padding slots: the caches must equal those that the reference writes, bit by bit."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(9, 3 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    slots = torch.tensor([7, -1, 0, 11, -1, 3, 23, 22, 12], device=device)
    caches = []
    for backend in ("triton", "reference"):
        pair = torch.full((2, 6, 4, num_kv_heads, head_dim), 77.0, device=device).to(cache_dtype or dtype)
        with forced_backend(backend):
            ops.write_kv(
                fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :], pair[0], pair[1], slots
            )
        caches.append(pair)
    return torch.equal(*(pair.view(torch.uint8) for pair in caches))


def run_checks(device: str) -> dict[str, str | None]:
    results: dict[str, str | None] = {}
    for case in CASES:
        error, allowed = attention_error(case, device), TOLERANCE[case.dtype]
        results[case.name] = None if error <= allowed else f"error {error:.2e}, allowed {allowed:.0e}"
    for dtype in ops.DTYPES:
        name = f"write_kv-{str(dtype).removeprefix('torch.')}"
        results[name] = None if write_kv_is_exact(dtype, device) else "the caches differ from the reference"
    exact = write_kv_is_exact(torch.bfloat16, device, cache_dtype=fp8.DTYPE)
    results["write_kv-fp8"] = None if exact else "the caches differ from the reference"
    return results


if __name__ == "__main__":
    print(json.dumps(run_checks("cpu")))
