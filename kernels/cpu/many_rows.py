# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product of many rows with a weight matrix in tiles of 16 rows each, compiled with Numba.

Libraries multiply tiles too, but want a turned copy of the weight beside the weight. Here x is turned, once per call,
and the weight is read as it is: at the speed of memory, until there are some tens of rows (vectors) or hundreds (matrix
tiles).

    x  --turn-->  B, B, ...  --multiply with 32 rows of the weight-->  sums  --finish-->  results

    float32     products and sums in float32
    bfloat16    likewise
    int8        x in two digits per number (`digits`), each a B of its own; sums in whole numbers

They are multiplied in the CPU's own matrix tiles, where it has them for the type of the weight, or in vectors. Where
neither is fast for that type, 32 rows of the weight become float32, times their scales, each time that they are read:
many rows share the work.
A row's result does not depend on the rows beside it: a sum of float32 takes its products in the order of
`tile_product`, one of bfloat16 in that of `in_features`, and whole numbers have none.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .call import Arguments, RowFunction, enter_rows, take_rows
from .claims import enter, new_claims, take_item
from .cores import CHUNK_BYTES
from .digits import META_BYTES, MOST_DIGITS, quantize_row, store_starts
from .intrinsics import pointer
from .matrix_tiles import configuration
from .recording import CompiledCall, Rows
from .rows import load_row
from .sources import digest_of, filed_as
from .threads import run_call
from .tile_product import (
    A_GOES_BY,
    B_GOES_BY,
    FETCHED_AT_ONCE,
    STEP_BYTES,
    TILE,
    TILE_BYTES,
    span_bytes,
    words_by_class,
)
from .tiles import FORMATS
from .turned_tiles import begin, end, finish, multiply, products, turn_tile

BLOCK = 2 * TILE  # weight rows that a thread takes at a time


CHUNKS_IN_VECTORS = 8  # that are one there: vectors wait for products, not for x, which may come from the third cache
MANY_PAIRS = 8  # of B, which would push the block of weights out of the first cache

_SOURCES = (
    *("call", "claims", "digits", "features", "intrinsics", "rows", "vectors"),
    *("matrix_tiles", "tile_product", "tiles", "turned_tiles", "vector_tiles"),
)
_CONFIGURATION = configuration()

_TURN = Arguments("x", "x_bytes", "in_features", "turned", "scales", "num_x")
_TURN_TYPE = _TURN.dtype

# Places in the arguments of a product: addresses and sizes.
(
    _TURNED,
    _X_SCALES,
    _WEIGHT,
    _SCALES,
    _BIAS,
    _OUT,
    _NUM_ROWS,
    _OUT_FEATURES,
    _ROW_BYTES,  # of the weight, as it is multiplied
    _WEIGHT_ROW,  # likewise, as it is
    _SHORT,  # whether bias and results are bfloat16
    _CONFIG,
    _NUM_THREADS,
    _CLAIMS,
    _NUM_ARGUMENTS,
) = range(15)


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    product: str | None = None,
    least_rows: int | None = None,
    num_digits: int = MOST_DIGITS,
) -> Tensor:
    """(x @ weight.T) * scales + bias, in the dtype of x, where the weight `fits`.

    x [num_rows, in_features] and weight [out_features, in_features]: both float32 or both bfloat16 and no scales, or x
    float32 or bfloat16 and the weight int8. `product`: one of the `products` of the weight's type, the first if None.
    num_digits: of x, where that has some.
    least_rows: from how many on it is this kernel, whoever else has some for fewer; None if that is not all.
    """
    x, product = x.contiguous(), product or products(weight.dtype)[0]
    (num_rows, in_features), (out_features, num_threads) = x.shape, (weight.shape[0], torch.get_num_threads())
    out = x.new_empty(num_rows, out_features)
    kernel = _kernel(product, weight.dtype, x.dtype, num_digits)
    num_groups, row_bytes = -(-num_rows // TILE), in_features * kernel.itemsize
    turned = torch.empty((kernel.num_digits or 1) * num_groups * TILE * row_bytes + STEP_BYTES, dtype=torch.int8)
    first = turned.data_ptr() + -turned.data_ptr() % STEP_BYTES  # a row of a tile is then a line of the cache
    x_scales = torch.empty(num_groups * TILE if kernel.num_digits > 0 else 0, dtype=torch.float32)
    kernel.turn(
        num_rows, TILE * in_features,
        x.data_ptr(), x.itemsize, in_features, first, x_scales.data_ptr(), num_rows, per=TILE, also="num_x",
    )  # fmt: skip
    claims = new_claims(num_threads)
    arguments = (ctypes.c_int64 * _NUM_ARGUMENTS)(
        first,
        x_scales.data_ptr(),
        weight.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        out_features,
        row_bytes,
        weight.shape[1] * weight.itemsize,
        x.dtype == torch.bfloat16,
        _CONFIGURATION.ctypes.data,
        num_threads,
        ctypes.addressof(claims),
    )
    rows = None if least_rows is None else (Rows(8 * _NUM_ROWS),)
    run_call(CompiledCall(kernel.multiply, arguments, claims, rows, is_idempotent=True, least_rows=least_rows or 1))
    return out


def turn_rows(x: Tensor) -> Tensor:
    """x [num_rows, in_features], float32 or bfloat16, as float32 in groups of TILE rows, which are turned (see
    `tile_product`). What a last group has no rows for is unspecified."""
    x, (num_rows, in_features) = x.contiguous(), x.shape
    out = torch.empty(-(-num_rows // TILE) * TILE * in_features, dtype=torch.float32)
    _turn(_run("float32", torch.float32), x.dtype == torch.bfloat16)(
        num_rows, TILE * in_features,
        x.data_ptr(), x.itemsize, in_features, out.data_ptr(), 0, num_rows, per=TILE, also="num_x",
    )  # fmt: skip
    return out


def fits(weight: Tensor) -> bool:
    """Whether a weight can be multiplied so: whole tiles, in whole rows, by what this CPU has."""
    if not products(weight.dtype):
        return False
    out_features, in_features = weight.shape
    row_bytes = in_features * _itemsize(products(weight.dtype)[0], weight.dtype)
    return out_features % TILE == 0 and row_bytes % STEP_BYTES == 0 and weight.is_contiguous()


def _itemsize(product: str, dtype: torch.dtype) -> int:
    """Bytes of an element of a weight as it is multiplied."""
    return 4 if product == "float32" else dtype.itemsize


class _Kernel(NamedTuple):
    turn: RowFunction  # of groups of TILE rows of x
    multiply: Any  # ctypes function pointer
    num_digits: int  # of x; 0: it has none
    itemsize: int


@cache
def _kernel(product: str, weight: torch.dtype, x: torch.dtype, num_digits: int) -> _Kernel:
    """Compiled when it is first asked for, as not every CPU can; kept on disk."""
    sources, itemsize = _sources(), _itemsize(product, weight)
    num_digits = num_digits if weight == torch.int8 and itemsize == 1 else 0
    run = _run(product, weight)
    widened = weight.itemsize if weight.itemsize < itemsize else 0
    multiply = _multiply_worker(product, run, num_digits, widened, sources)
    turn = _turn(run, x.itemsize < itemsize, num_digits, product in FORMATS)
    return _Kernel(turn, multiply.ctypes, num_digits, itemsize)


def _run(product: str, weight: torch.dtype) -> int:
    """See `words_by_class`: only sums of float32 have classes, and a word of a bfloat16 weight held two numbers."""
    if product != "float32":
        return 0
    return 2 if weight == torch.bfloat16 else 1


def _sources() -> str:
    return f"{digest_of(*_SOURCES)} {CHUNK_BYTES}"


def chunk_bytes(product: str) -> int:
    """Of x, in what multiplies it."""
    return CHUNK_BYTES * (CHUNKS_IN_VECTORS if product in FORMATS else 1)


_TURN_NS = (0.3, 0.4, 0.5)  # about what an element takes, by digits


@cache
def _turn(run: int, becomes_wider: bool, num_digits: int = 0, in_vectors: bool = True) -> RowFunction:
    sources = _sources()
    in_digits = partial(_turn_digits_worker, num_digits, in_vectors, sources)
    compiled = in_digits if num_digits > 0 else partial(_turn_worker, run, becomes_wider, sources)
    return RowFunction(compiled, _TURN, _TURN_NS[num_digits], is_idempotent=True)


@cache
def _turn_worker(run: int, becomes_wider: bool, sources: str) -> Any:
    """`becomes_wider`: x is bfloat16 and becomes float32."""
    span_size, num_classes, wider = span_bytes(run), len(words_by_class(run)), 2 if becomes_wider else 1

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(run, becomes_wider)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _TURN_TYPE)[0]
        row_bytes = a.in_features * a.x_bytes
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for group in range(first, stop):
                x, turned = a.x + group * TILE * row_bytes, a.turned + group * TILE * row_bytes * wider
                last_row = min(TILE, a.num_x - group * TILE) - 1
                for first_k in range(0, row_bytes * wider, span_size):
                    span = min(row_bytes * wider - first_k, span_size)
                    class_bytes = span * TILE // num_classes
                    for k in range(0, span, STEP_BYTES):
                        source = x + (first_k + k) // wider
                        target = turned + first_k * TILE + k * TILE // num_classes
                        turn_tile(run, becomes_wider, False, source, row_bytes, last_row, target, class_bytes)

    return worker


@cache
def _turn_digits_worker(num_digits: int, in_vectors: bool, sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(num_digits, in_vectors)
    def worker(address: int) -> None:
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (1,), _TURN_TYPE)[0]
        size, x_row = a.in_features, a.in_features * a.x_bytes
        digit_row = num_digits * size + META_BYTES
        memory = np.empty(TILE * digit_row, np.int8)
        digits = memory.ctypes.data
        scales = carray(pointer(a.scales), (a.num_rows, TILE), np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                break
            for group in range(first, stop):
                num_x = min(TILE, a.num_x - group * TILE)
                for i in range(num_x):
                    row, place = group * TILE + i, digits + i * digit_row
                    if a.x_bytes == 2:
                        quantize_row(2, num_digits, a.x + row * x_row, size, place)
                    else:
                        quantize_row(4, num_digits, a.x + row * x_row, size, place)
                    scales[group, i] = carray(pointer(place + num_digits * size), (1,), np.float32)[0]
                for i in range(num_x, TILE):  # what lay there may be subnormal, and take a hundred cycles a number
                    scales[group, i] = 0
                for digit in range(num_digits):
                    turned = a.turned + (group * num_digits + digit) * TILE * size
                    for k in range(0, size, STEP_BYTES):
                        source, target = digits + digit * size + k, turned + k * TILE
                        turn_tile(0, False, in_vectors, source, digit_row, num_x - 1, target, 0)
        memory[0] = 0  # it lives until here: Numba does not see who has its address

    return worker


@njit(error_model="numpy")
def _widen(size: int, weight: int, scales: int, num_rows: int, in_features: int, out: int) -> None:
    """Rows of a weight, bfloat16 (`size` 2) or int8 with scales (1), become float32 at an address."""
    rows = carray(pointer(out), (num_rows, in_features), np.float32)
    for i in range(num_rows):
        row = rows[i]
        if size == 2:
            load_row(weight + 2 * i * in_features, in_features, 1, row)
        else:
            numbers = carray(pointer(weight + i * in_features), (in_features,), np.int8)
            scale = carray(pointer(scales), (num_rows,), np.float32)[i]
            for k in range(in_features):
                row[k] = np.float32(numbers[k]) * scale


@cache
def _multiply_worker(product: str, run: int, num_digits: int, widened: int, sources: str) -> Any:
    """`widened`: bytes of an element of a weight that becomes float32; 0 of one that is multiplied as it is."""
    parts = num_digits or 1  # of a row of x
    x_tiles = 2 // parts  # of TILE rows of x, which are multiplied at a time
    has_starts, most = num_digits > 0 and product in FORMATS, chunk_bytes(product)

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(product, run, num_digits, widened)
    def worker(address: int) -> None:
        """One thread: take blocks until there are none."""
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (_NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, row_bytes, short = a[_NUM_ROWS], a[_OUT_FEATURES], a[_ROW_BYTES], a[_SHORT]
        num_threads, claims, size = a[_NUM_THREADS], a[_CLAIMS], 2 if a[_SHORT] else 4
        weight_row = a[_WEIGHT_ROW]
        thread = enter(claims)
        b_bytes = TILE * row_bytes
        num_pairs = (num_rows + x_tiles * TILE - 1) // (x_tiles * TILE)  # of B
        num_chunks = (num_pairs * 2 * b_bytes + most - 1) // most
        chunk_pairs = (num_pairs + num_chunks - 1) // num_chunks
        goes_by = B_GOES_BY if chunk_pairs >= MANY_PAIRS else A_GOES_BY if chunk_pairs == 1 else 0
        num_blocks = (out_features + BLOCK - 1) // BLOCK
        block_lines = BLOCK * weight_row // row_bytes  # in each step
        fetched = (-(-block_lines // chunk_pairs) + FETCHED_AT_ONCE - 1) // FETCHED_AT_ONCE * FETCHED_AT_ONCE
        memory, bias = np.empty(4 * TILE_BYTES + STEP_BYTES, np.int8), np.zeros(BLOCK, np.float32)
        starts = np.zeros(BLOCK, np.int32)  # of sums
        sums = (memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        wide = np.empty((BLOCK * row_bytes if widened else 0) + STEP_BYTES, np.int8)
        numbers = (wide.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES  # of a block
        item, lap = -1, 0
        begin(product, a[_CONFIG])
        while True:
            item, lap = take_item(claims, num_threads, num_blocks * num_chunks, thread, item, lap)
            if item < 0:
                break
            chunk, first_column = item // num_blocks, item % num_blocks * BLOCK
            w = a[_WEIGHT] + first_column * weight_row
            num_a = min(2, (out_features - first_column) // TILE)
            fetch, lines = w + BLOCK * weight_row, fetched  # the next block, on the way through this one
            fetch_end = fetch + BLOCK * weight_row
            if widened:
                _widen(widened, w, a[_SCALES] + 4 * first_column, num_a * TILE, row_bytes // 4, numbers)
                w = numbers
            if has_starts:
                store_starts(num_a * TILE, w, row_bytes, starts.ctypes.data)
            for pair in range(chunk * chunk_pairs, min((chunk + 1) * chunk_pairs, num_pairs)):
                x, first_row = a[_TURNED] + 2 * pair * b_bytes, pair * x_tiles * TILE
                num_b = 1 if parts == 1 and num_rows - first_row <= TILE else 2
                multiply(product, run, num_a, num_b, w, row_bytes, x, goes_by, row_bytes, fetch, lines, sums)
                fetch += lines * row_bytes
                if fetch >= fetch_end:
                    lines = 0
                if a[_BIAS] != 0:
                    load_row(a[_BIAS] + first_column * size, num_a * TILE, short, bias)
                for j in range(num_b // parts):
                    row = first_row + j * TILE
                    place, rows = sums + j * TILE_BYTES, min(TILE, num_rows - row)
                    x_scales, scales = a[_X_SCALES] + 4 * row, a[_SCALES] + 4 * first_column
                    out = a[_OUT] + (row * out_features + first_column) * size
                    begins, biases, out_row = starts.ctypes.data, bias.ctypes.data, out_features * size
                    finish(
                        product, num_digits, num_a, place, num_b * TILE_BYTES, rows, x_scales, scales, begins, biases,
                        short, out, out_row,
                    )  # fmt: skip
        end(product)
        # They live until here: Numba does not see who has their addresses.
        memory[0] = wide[0] = bias[0] = starts[0] = 0

    return worker
