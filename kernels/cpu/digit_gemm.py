# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Many rows of x times int8 weights: the library's product of bytes, for either digit of x (see `digits`).

    x  --to_digits-->  high 0, low 0, high 1, low 1, ...  --library-->  sums  --from_sums-->  results

What stands before and after the product is compiled, for it is memory that it takes, which torch's operators read and
write five times. It goes by chunks of rows whose sums stay in the caches.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from .call import Arguments, RowFunction
from .digits import META_BYTES, NUM_DIGITS, quantize_row
from .intrinsics import fetch_add, pointer
from .rows import load_row, store_row

STEP = 64  # `in_features` is a multiple of it
_SUM_BYTES = 4 << 20  # of a chunk: what the cores' caches hold together

_DIGITS = Arguments("x", "x_stride", "size", "short", "digits", "scales")
_SUMS = Arguments("sums", "size", "short", "x_scales", "scales", "bias", "out")
_DIGITS_TYPE, _SUMS_TYPE = _DIGITS.dtype, _SUMS.dtype


def linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """(x @ weight.T) * scales + bias, in the dtype of x: float32 or bfloat16."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, out_features)
    chunk = max(32, _SUM_BYTES // (4 * NUM_DIGITS * out_features))
    digits = torch.empty(NUM_DIGITS * min(chunk, num_rows), in_features, dtype=torch.int8)
    sums = torch.empty(len(digits), out_features, dtype=torch.int32)
    x_scales = torch.empty(min(chunk, num_rows), dtype=torch.float32)
    to_digits, from_sums = _functions()
    transposed, short = weight.t(), x.dtype == torch.bfloat16
    for start in range(0, num_rows, chunk):
        part, into = x[start : start + chunk], out[start : start + chunk]
        rows = len(part)
        to_digits(
            rows, in_features,
            part.data_ptr(), part.stride(0) * part.itemsize, in_features, short, digits.data_ptr(), x_scales.data_ptr(),
        )  # fmt: skip
        torch._int_mm(digits[: NUM_DIGITS * rows], transposed, out=sums[: NUM_DIGITS * rows])
        from_sums(
            rows, out_features,
            sums.data_ptr(), out_features, short, x_scales.data_ptr(), scales.data_ptr(),
            0 if bias is None else bias.data_ptr(), into.data_ptr(),
        )  # fmt: skip
    return out


def _digits_worker(address: int) -> None:
    a = carray(pointer(address), (1,), _DIGITS_TYPE)[0]
    size = a.size
    scratch = np.empty(NUM_DIGITS * size + META_BYTES, np.int8)
    meta = scratch[NUM_DIGITS * size : NUM_DIGITS * size + 4].view(np.float32)
    digits = carray(pointer(a.digits), (a.num_rows, NUM_DIGITS * size), np.int8)
    scales = carray(pointer(a.scales), (a.num_rows,), np.float32)
    while True:
        first = fetch_add(address, a.grain)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.grain, a.num_rows)):
            if a.short:
                quantize_row(2, a.x + row * a.x_stride, size, scratch.ctypes.data)
            else:
                quantize_row(4, a.x + row * a.x_stride, size, scratch.ctypes.data)
            digits[row, :] = scratch[: NUM_DIGITS * size]
            scales[row] = meta[0]


def _sums_worker(address: int) -> None:
    a = carray(pointer(address), (1,), _SUMS_TYPE)[0]
    size = a.size
    sums = carray(pointer(a.sums), (a.num_rows, NUM_DIGITS, size), np.int32)
    x_scales = carray(pointer(a.x_scales), (a.num_rows,), np.float32)
    scales = carray(pointer(a.scales), (size,), np.float32)
    bias, results = np.empty(size, np.float32), np.empty(size, np.float32)
    if a.bias != 0:
        load_row(a.bias, size, a.short, bias)
    while True:
        first = fetch_add(address, a.grain)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.grain, a.num_rows)):
            x_scale = x_scales[row]
            for i in range(size):
                total = np.float32(sums[row, 0, i]) * np.float32(256.0) + np.float32(sums[row, 1, i])
                results[i] = total * x_scale * scales[i]
            if a.bias != 0:
                for i in range(size):
                    results[i] += bias[i]
            store_row(results, size, a.short, a.out + row * size * (2 if a.short else 4))


@cache
def _functions() -> tuple[RowFunction, RowFunction]:
    """To digits, and from sums. Compiled when first asked for: not every CPU has the instructions."""
    signature = types.void(types.int64)
    digits = cfunc(signature, cache=True, error_model="numpy")(_digits_worker)
    sums = cfunc(signature, cache=True, error_model="numpy", fastmath={"contract"})(_sums_worker)
    return RowFunction(digits, _DIGITS, 0.5), RowFunction(sums, _SUMS, 0.7)  # about what an element takes, in ns
