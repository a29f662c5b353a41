# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""What several kernels do with numbers: read and write those in 8 bits, and multiply tiles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import devices

# How the bytes of float8 e4m3 become numbers: FORMAT of `widen`.
PLAIN, E4M3_BY_HAND, E4M3_NATIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def widen(x, DTYPE: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr):
    """Loaded numbers as DTYPE, without a change of value where DTYPE holds it. Bytes of e4m3 are decoded."""
    if FORMAT == E4M3_NATIVE:
        x = x.to(tl.float8e4nv, bitcast=True)
    elif FORMAT == E4M3_BY_HAND:
        # Older GPUs and the interpreter do not know the type. The bits of an e4m3, moved to where a float16 has its
        # exponent, are a number 256 times as small.
        bits = x.to(tl.int16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    elif UPCAST:  # the interpreter makes no bfloat16 of an integer
        x = x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def to_e4m3(x, scale):
    """The bytes of `fp8.quantize`, from float32, by the same steps on every GPU and in the interpreter.

    From 2^-6 on, the exponent is moved and the last 20 bits are rounded off, ties to even: half of them, less one where
    the bit above is 0. Below, numbers are multiples of 2^-9, which float32 rounds to where it has no finer steps left.
    """
    x = tl.div_rn(x, scale)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    large = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # what 16384 was before
    code = tl.where(size < 0x3C800000, small, large)
    code = tl.where(size >= 0x43E00000, 0x7E, code)  # 448, and what is beyond
    code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b, float32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def scaled_dot(a, b, acc, scales, inside, GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """acc + a @ b, float32; where GROUP numbers of a row of the weight share a scale, times those of this part.

    scales: [BLOCK_N] pointers to them; inside: [BLOCK_N], which there are.
    """
    if GROUP > 0:
        part = dot(a, b, tl.zeros_like(acc), PRECISION, UPCAST)
        acc += part * tl.load(scales, mask=inside, other=0.0)[None, :]
    else:
        acc = dot(a, b, acc, PRECISION, UPCAST)
    return acc


def group_options(scales: torch.Tensor | None, num_dims: int, in_features: int, block_k: int) -> dict[str, int]:
    """GROUP of `scaled_dot`, 0 where scales have `num_dims` dimensions, one for each row, and a BLOCK_K that never
    has parts of two groups."""
    if scales is None or scales.dim() == num_dims:
        return {"GROUP": 0, "BLOCK_K": block_k}
    group = in_features // scales.shape[-2]
    return {"GROUP": group, "BLOCK_K": min(block_k, group & -group)}


def e4m3_format(device: torch.device) -> int:
    """How a device decodes e4m3: by an instruction from compute capability 8.9 on."""
    native = (devices.capability(device) or (0, 0)) >= (8, 9)
    return int((E4M3_NATIVE if native else E4M3_BY_HAND).value)


def dot_options(dtype: torch.dtype) -> dict[str, object]:
    """PRECISION and UPCAST of `dot` for operands of a dtype."""
    return {
        # float32 models are run for exactness: TF32 would leave 10 bits of mantissa.
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        # Triton's interpreter keeps bfloat16 as integers and would multiply the bit patterns.
        "UPCAST": dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
    }
