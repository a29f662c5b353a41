# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Linear layers for the few rows of a decode step, compiled with Numba: every weight is read once, at memory speed.

A step that decodes M requests multiplies M rows with each weight matrix. That is a matter of memory, not of
arithmetic, until M is some tens; the library's float32 GEMM, made for large M, then reaches a fifth of the bandwidth.
Here a thread takes CHUNK rows of the weight at a time from a shared counter, and computes tiles of them:

    weight rows n .. n + N-1   times   x rows m .. m + M-1   ->   M * N sums, each a vector register of 16 lanes

walking both along `in_features`, while the next N rows are fetched ahead. A weight tile of a few rows stays in the
first-level cache for all groups of x rows. Lane l of a sum adds the products at positions l, l + 16, l + 32, ... in
order, and the lanes are added in a fixed tree: whatever the tile, so a row's result does not depend on the rows that
are computed with it.

The tiles are written as LLVM vectors, because the compiler does not find them in loops over scalars.

All linear layers of SmolLM2 (135 M float32 weights, 538 MB) on 2 cores, milliseconds, best of 12 in one run:

    rows                     1      2      4      8     16
    torch (MKL)             41     43     73     96    100
    this, float32           39     40     41     45     62
    this, int8 weights      13     14     16     22     38
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from .intrinsics import fetch_add
from .threads import run_parallel

MAX_ROWS = 24  # with more, the library's GEMM is as fast
LANES = 16
CHUNK = 48  # weight rows; TILE_ROWS divides it
TILE_ROWS = 4  # the most weight rows of a tile; they must divide `out_features`
_DEQUANTIZED_ROWS = 4096  # of an int8 weight at once, where there are many rows of x

_FLOAT, _INT8, _INT32, _INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    if weight.dtype == torch.float32 and _is_small(x, weight):
        return _small(x, weight, None, bias)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_int8`."""
    if _is_small(x, weight):
        return _small(x, weight, scales, bias)
    return _widened(x, weight, scales, bias)


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`. CPUs have no instruction that reads such numbers: less memory, not more speed."""
    return _widened(x, weight, scales, bias)


def _widened(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], _DEQUANTIZED_ROWS):
        rows = slice(start, start + _DEQUANTIZED_ROWS)
        out[:, rows] = F.linear(x, weight[rows].to(x.dtype).mul_(scales[rows, None].to(x.dtype)))
    return out if bias is None else out.add_(bias)


def _is_small(x: Tensor, weight: Tensor) -> bool:
    fits = x.shape[1] % LANES == 0 and weight.shape[0] % TILE_ROWS == 0 and weight.is_contiguous()
    return fits and 0 < x.shape[0] <= MAX_ROWS and x.dtype == torch.float32


def _small(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape[0], weight.shape[0])
    counter = np.zeros(1, np.int64)
    arguments = np.array(
        [
            x.data_ptr(),
            weight.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            out.data_ptr(),
            counter.ctypes.data,
            x.shape[0],
            *weight.shape,
        ],
        np.int64,
    )
    run_parallel(_worker.ctypes, arguments.ctypes.data)
    return out if bias is None else out.add_(bias)


# Places in the arguments of a worker: addresses and sizes.
_X, _WEIGHT, _SCALES, _OUT, _COUNTER, _NUM_ROWS, _OUT_FEATURES, _IN_FEATURES, _NUM_ARGUMENTS = range(9)


def _tile(num_x: int, num_weights: int, weight_type: ir.Type) -> Any:
    """A compiled `tile(x, weight, scales, out, in_features, out_features)` over addresses of a tile's first elements.

    Writes `num_x` x `num_weights` results. `scales` is read for int8 weights only.
    """
    quantized = weight_type is _INT8
    weight_bytes = 1 if quantized else 4

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        x, weight, scales, out, in_features, out_features = arguments
        fma = _declared(b, "llvm.fma.v16f32", ir.FunctionType(_VECTOR, [_VECTOR] * 3))
        prefetch = _declared(
            b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [_INT8.as_pointer(), _INT32, _INT32, _INT32])
        )

        def offset(address: Any, count: Any, size: int) -> Any:
            return b.add(address, b.mul(count, _INT64(size)))

        def load(address: Any, element: ir.Type, size: int) -> Any:
            loaded = b.load(b.inttoptr(address, ir.VectorType(element, LANES).as_pointer()))
            loaded.align = size
            return loaded

        x_rows = [offset(x, b.mul(in_features, _INT64(i)), 4) for i in range(num_x)]
        weight_rows = [offset(weight, b.mul(in_features, _INT64(j)), weight_bytes) for j in range(num_weights)]
        ahead = b.mul(in_features, _INT64(weight_bytes * num_weights))  # the same place in the next tile
        before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
        b.branch(loop)

        b.position_at_end(loop)
        k = b.phi(_INT64)
        k.add_incoming(_INT64(0), before)
        sums = [[b.phi(_VECTOR) for _ in weight_rows] for _ in x_rows]
        weights = []
        for row in weight_rows:
            address = offset(row, k, weight_bytes)
            # For reading, into every level of the cache, data: the arguments 0, 3, 1.
            b.call(prefetch, [b.inttoptr(b.add(address, ahead), _INT8.as_pointer()), _INT32(0), _INT32(3), _INT32(1)])
            values = load(address, weight_type, weight_bytes)
            weights.append(b.sitofp(b.sext(values, ir.VectorType(_INT32, LANES)), _VECTOR) if quantized else values)
        added = []
        for row, row_sums in zip(x_rows, sums, strict=True):
            values = load(offset(row, k, 4), _FLOAT, 4)
            added.append([b.call(fma, [values, w, total]) for w, total in zip(weights, row_sums, strict=True)])
        next_k = b.add(k, _INT64(LANES))
        k.add_incoming(next_k, loop)
        for row_sums, row_added in zip(sums, added, strict=True):
            for total, new in zip(row_sums, row_added, strict=True):
                total.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
                total.add_incoming(new, loop)
        b.cbranch(b.icmp_signed("<", next_k, in_features), loop, after)

        b.position_at_end(after)
        for i, row_added in enumerate(added):
            out_row = offset(out, b.mul(out_features, _INT64(i)), 4)
            for j, total in enumerate(row_added):
                result = _sum_lanes(b, total)
                if quantized:
                    scale = b.load(b.inttoptr(b.add(scales, _INT64(4 * j)), _FLOAT.as_pointer()))
                    result = b.fmul(result, scale)
                b.store(result, b.inttoptr(b.add(out_row, _INT64(4 * j)), _FLOAT.as_pointer()))
        return context.get_dummy_value()

    @intrinsic
    def tile(typing_context, x, weight, scales, out, in_features, out_features):  # type: ignore[no-untyped-def]  # noqa: ARG001
        return types.void(*[types.int64] * 6), generate

    return tile


def _declared(b: ir.IRBuilder, name: str, function_type: ir.FunctionType) -> Any:
    return b.module.globals.get(name) or ir.Function(b.module, function_type, name)


def _sum_lanes(b: ir.IRBuilder, vector: Any) -> Any:
    """The halves are added until one lane is left."""
    width = LANES
    while width > 1:
        width //= 2
        nothing = ir.Constant(vector.type, ir.Undefined)
        indices = ir.VectorType(_INT32, width)
        low = b.shuffle_vector(vector, nothing, ir.Constant(indices, list(range(width))))
        high = b.shuffle_vector(vector, nothing, ir.Constant(indices, list(range(width, 2 * width))))
        vector = b.fadd(low, high)
    return b.extract_element(vector, _INT32(0))


# By rows of x: fewer of them take more weight rows, which keeps the arithmetic units as busy.
_float_1x4, _float_2x4, _float_4x4, _float_8x2 = (_tile(i, j, _FLOAT) for i, j in ((1, 4), (2, 4), (4, 4), (8, 2)))
_int8_1x4, _int8_2x4, _int8_4x4, _int8_8x2 = (_tile(i, j, _INT8) for i, j in ((1, 4), (2, 4), (4, 4), (8, 2)))


@njit(cache=True)
def _float_tile(num_x: int, x: int, weight: int, scales: int, out: int, in_features: int, out_features: int) -> None:
    if num_x == 8:
        _float_8x2(x, weight, scales, out, in_features, out_features)
    elif num_x == 4:
        _float_4x4(x, weight, scales, out, in_features, out_features)
    elif num_x == 2:
        _float_2x4(x, weight, scales, out, in_features, out_features)
    else:
        _float_1x4(x, weight, scales, out, in_features, out_features)


@njit(cache=True)
def _int8_tile(num_x: int, x: int, weight: int, scales: int, out: int, in_features: int, out_features: int) -> None:
    if num_x == 8:
        _int8_8x2(x, weight, scales, out, in_features, out_features)
    elif num_x == 4:
        _int8_4x4(x, weight, scales, out, in_features, out_features)
    elif num_x == 2:
        _int8_2x4(x, weight, scales, out, in_features, out_features)
    else:
        _int8_1x4(x, weight, scales, out, in_features, out_features)


@cfunc(types.void(types.voidptr), cache=True)
def _worker(address: Any) -> None:
    """One thread: take chunks of weight rows until there are none, and multiply each with all rows of x."""
    a = carray(address, (_NUM_ARGUMENTS,), np.int64)
    num_rows, out_features, in_features = a[_NUM_ROWS], a[_OUT_FEATURES], a[_IN_FEATURES]
    quantized = a[_SCALES] != 0
    weight_bytes = in_features if quantized else in_features * 4
    while True:
        start = fetch_add(a[_COUNTER], 1) * CHUNK
        if start >= out_features:
            return
        end = min(start + CHUNK, out_features)
        row = 0
        while row < num_rows:
            left = num_rows - row
            num_x = 8 if left >= 8 else (4 if left >= 4 else (2 if left >= 2 else 1))
            x, out = a[_X] + row * in_features * 4, a[_OUT] + row * out_features * 4
            for j in range(start, end, 2 if num_x == 8 else 4):
                weight, scales, results = a[_WEIGHT] + j * weight_bytes, a[_SCALES] + j * 4, out + j * 4
                if quantized:
                    _int8_tile(num_x, x, weight, scales, results, in_features, out_features)
                else:
                    _float_tile(num_x, x, weight, scales, results, in_features, out_features)
            row += num_x
