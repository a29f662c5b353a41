# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product of a few rows with a weight matrix, compiled with Numba and run on all threads.

A thread has its own contiguous part of the weight, of which it takes BLOCK rows at a time, so that it reads forwards;
when it is done it takes blocks of the others. A block is multiplied with all rows of x, in tiles (see `tiles`), while
it stands in the caches. What comes next is fetched meanwhile, by each pass a part of it: memory and arithmetic then
take their time together. (But where rows of the weight are read in the order of memory: see `tiles.IN_ORDER`.)
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .claims import enter, new_claims, take_item
from .digits import META_BYTES, quantize_row
from .features import HAS_LARGE_CACHE
from .recording import CallPlaces, CompiledCall, Rows
from .sources import digest_of, filed_as
from .threads import run_call
from .tiles import FAR, FORMATS, IN_ORDER, TILE_ROWS, Format, Places, tile, widen_row

BLOCK = 16  # weight rows that a thread takes at a time: whole tiles
CHUNK_BYTES = 1_000_000  # of x: what stays in a core's second-level cache while the weight goes by
MAX_PREPARED = 48  # rows of x, of which each thread makes a copy in parts
AHEAD = 8192  # bytes, at least: a core reads 10 per nanosecond, from memory that answers after some hundred
AHEAD_IN_ORDER = 5 << 10  # bytes, of rows that are read one after the other
FIRST_CACHE = 32 << 10  # bytes, of most CPUs
# Rows of x that are very few, and bytes of a tile's rows of the weight, up to which these are read as their format says
# for few: what is fetched into the first cache stays there until then. In order nothing is; x stays there beside them.
VERY_FEW, NEAR_BYTES = 2, 24 << 10 if HAS_LARGE_CACHE else FIRST_CACHE // 2
IN_ORDER_BYTES = FIRST_CACHE // 2

_SOURCES = ("claims", "digits", "features", "intrinsics", "tile_product", "tiles", "vectors")

# Places in the arguments of a worker: addresses and sizes.
(
    _X,
    _WEIGHT,
    _SCALES,
    _BIAS,
    _OUT,
    _PREPARED,  # rows of x in parts
    _NUM_ROWS,
    _OUT_FEATURES,
    _IN_FEATURES,
    _ELEMENT_BYTES,
    _NUM_THREADS,
    _CLAIMS,
    _NUM_ARGUMENTS,
) = range(13)
_PLACES = CallPlaces(8 * _X, 8 * _OUT, 8 * _NUM_ROWS, 8 * _CLAIMS, 8 * _WEIGHT, 8 * _BIAS)


def linear(
    name: str,
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    most_rows: int | None = None,
) -> Tensor:
    """(x @ weight.T) * scales + bias in format `name`, which the CPU has.

    `in_features` is a multiple of the format's step and `out_features` of `tiles.TILE_ROWS`, and at least what its
    largest tile takes, or the weight is one that `fits_float32`; it is contiguous.
    x, bias and the result have the format's dtype, or float32 or bfloat16 for x in digits. most_rows: up to how many
    it is this kernel, whoever else has some for more; None if that is not all.
    """
    form = FORMATS[name]
    is_prepared = form.parts > 1 or form.digits > 0
    if is_prepared and len(x) > MAX_PREPARED:
        return torch.cat([linear(name, rows, weight, scales, bias) for rows in torch.split(x, MAX_PREPARED)])
    x = x.contiguous()
    num_rows, in_features = x.shape
    out_features, num_threads = weight.shape[0], torch.get_num_threads()
    out = x.new_empty(num_rows, out_features)
    prepared = num_threads * num_rows * _prepared_row(form, in_features) if is_prepared else 0
    memory = torch.empty(prepared, dtype=torch.int8)
    claims = new_claims(num_threads)
    arguments = (ctypes.c_int64 * _NUM_ARGUMENTS)(
        x.data_ptr(),
        weight.data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        memory.data_ptr(),
        num_rows,
        out_features,
        in_features,
        x.element_size(),
        num_threads,
        ctypes.addressof(claims),
    )
    rows = None if most_rows is None else (Rows(8 * _NUM_ROWS),)
    is_told = most_rows is not None and not is_prepared and scales is None  # which it could not be told
    most_rows = min(most_rows or sys.maxsize, MAX_PREPARED if is_prepared else sys.maxsize)
    call = CompiledCall(_entry(name), arguments, claims, rows, is_idempotent=True, most_rows=most_rows)
    run_call(call._replace(places=_PLACES) if is_told else call)
    return out


def fits_float32(weight: Tensor) -> bool:
    """Whether a weight of float32 has a tile's rows at least, each of whole quarters of a vector. (A last tile that
    would have fewer begins earlier.)"""
    out_features, in_features = weight.shape
    is_whole = in_features > 0 and in_features == padded_row(in_features)
    return out_features >= FORMATS["float32"].largest[1] and is_whole and weight.is_contiguous()


def padded_row(in_features: int) -> int:
    """Numbers of float32, of whole quarters of a vector, that a row takes."""
    quarter = FORMATS["float32"].step // FORMATS["float32"].rows
    return -(-in_features // quarter) * quarter


def is_padded(weight: Tensor) -> bool:
    """Whether each row of a weight, the last one too, has memory behind it up to `padded_row`. What is there is
    multiplied by zero."""
    (out_features, in_features), row = weight.shape, padded_row(weight.shape[1])
    if in_features == row or weight.stride() != (row, 1):
        return False
    end = weight.storage_offset() + out_features * row
    return end * weight.itemsize <= weight.untyped_storage().nbytes()


def _prepared_row(form: Format, in_features: int) -> int:
    return form.parts * form.x_bytes * in_features + (META_BYTES if form.digits > 0 else 0)


@cache
def _worker(name: str) -> Any:
    """The compiled worker of a format. It is kept on disk for CPUs of one kind."""
    return _compiled(name, digest_of(*_SOURCES))


@cache
def _entry(name: str) -> Any:
    return _worker(name).ctypes


@njit(error_model="numpy")
def _quantize_rows(size: int, num_digits: int, x: int, num_rows: int, in_features: int, out: int, out_row: int) -> None:
    for row in range(num_rows):
        source, target = x + row * in_features * size, out + row * out_row
        if size == 4 and num_digits == 1:
            quantize_row(4, 1, source, in_features, target)
        elif size == 4:
            quantize_row(4, 2, source, in_features, target)
        elif num_digits == 1:
            quantize_row(2, 1, source, in_features, target)
        else:
            quantize_row(2, 2, source, in_features, target)


@njit(error_model="numpy")
def _widen_rows(x: int, num_rows: int, in_features: int, out: int, out_row: int) -> None:
    for row in range(num_rows):
        widen_row(x + row * in_features * 2, in_features, out + row * out_row)


@njit(error_model="numpy")
def _rows_of_tile(left: int, most: int, eight: int) -> int:
    """How many rows of x the next tile takes, of those that are left. `eight`: of eight, which it divides."""
    if left == 8:
        return eight
    if left >= most:
        return most
    if left > eight:
        return eight
    return 4 if left >= 4 else 2 if left >= 2 else 1


@njit(error_model="numpy")
def _num_tiles(num_rows: int, most: int, eight: int) -> int:
    count = 0
    while num_rows > 0:
        num_rows -= _rows_of_tile(num_rows, most, eight)
        count += 1
    return count


def _compiled(name: str, sources: str) -> Any:
    form = FORMATS[name]
    most, eight = form.largest[0], form.of_eight[0]  # rows of x in the largest tile, and in those of eight
    beside_most, beside_eight, beside_four, beside_few = (form.beside(num_x) for num_x in (most, eight, 4, 1))
    parts, num_digits, of_few, in_order = form.parts, form.digits, form.of_few, form.of_few == IN_ORDER
    near_bytes = IN_ORDER_BYTES if in_order else NEAR_BYTES
    is_narrow = form.of_eight[1] < form.largest[1]  # eight rows of x are read anew for fewer rows of the weight
    x_bytes, weight_bytes, meta_bytes = form.x_bytes, form.weight_bytes, META_BYTES if num_digits > 0 else 0

    @cfunc(types.void(types.voidptr), cache=True)
    @filed_as(name)
    def worker(address: Any) -> None:
        """One thread: take blocks until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(address, (_NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, in_features = a[_NUM_ROWS], a[_OUT_FEATURES], a[_IN_FEATURES]
        size, num_threads, claims = a[_ELEMENT_BYTES], a[_NUM_THREADS], a[_CLAIMS]
        thread = enter(claims)
        first_x, weight_row = a[_X], in_features * weight_bytes
        x_row = in_features * x_bytes * parts + meta_bytes
        if parts > 1 or num_digits > 0:
            # Each thread for itself: a microsecond a row, into its own cache, and nobody waits.
            first_x = a[_PREPARED] + thread * num_rows * x_row
            if num_digits > 0:
                _quantize_rows(size, num_digits, a[_X], num_rows, in_features, first_x, x_row)
            else:
                _widen_rows(a[_X], num_rows, in_features, first_x, x_row)
        num_blocks = (out_features + BLOCK - 1) // BLOCK
        num_chunks = (num_rows * x_row + CHUNK_BYTES - 1) // CHUNK_BYTES
        chunk_rows = (num_rows + num_chunks * most - 1) // (num_chunks * most) * most
        of_eight = 4 if is_narrow and eight * x_row >= FIRST_CACHE else eight
        # How often a block is multiplied with rows of x.
        num_groups = _num_tiles(min(chunk_rows, num_rows), most, of_eight)
        fetch_shift = 0 if num_groups == 1 else 1 if num_groups < 4 else 2  # a tile fetches a half, or a quarter
        are_few = of_few != FAR and num_rows <= VERY_FEW and TILE_ROWS * weight_row <= near_bytes
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_blocks * num_chunks, thread, item, lap)
            if item < 0:
                return
            chunk, block = item // num_blocks, item % num_blocks
            end = min((block + 1) * BLOCK, out_features)
            row, last_row = chunk * chunk_rows, min((chunk + 1) * chunk_rows, num_rows)
            fetch = a[_WEIGHT] + end * weight_row
            fetch_end = fetch + BLOCK * weight_row
            while row < last_row:
                num_x = _rows_of_tile(last_row - row, most, of_eight)
                x, j = first_x + row * x_row, block * BLOCK
                while j < end:
                    n = beside_four if num_x == 4 else TILE_ROWS if are_few else beside_few
                    n = beside_most if num_x == most else beside_eight if num_x == eight else n
                    # The last rows may be multiplied twice, by two threads even: to the same bits.
                    j = min(j, out_features - n)
                    w = a[_WEIGHT] + j * weight_row
                    if num_groups == 1:
                        fetch = w + (AHEAD_IN_ORDER if are_few and in_order else max(AHEAD, n * weight_row))
                    scales = a[_SCALES] + 4 * j if a[_SCALES] != 0 else 0
                    bias = a[_BIAS] + size * j if a[_BIAS] != 0 else 0
                    out = a[_OUT] + (row * out_features + j) * size
                    places = Places(x, w, in_features, fetch, fetch_shift, scales, bias, out, out_features, size)
                    if num_x == most:
                        tile(name, most, beside_most, FAR, places)
                    elif num_x == eight:
                        tile(name, eight, beside_eight, FAR, places)
                    elif num_x == 4:
                        tile(name, 4, beside_four, FAR, places)
                    elif num_x == 2 and are_few:
                        tile(name, 2, TILE_ROWS, of_few, places)
                    elif num_x == 2:
                        tile(name, 2, beside_few, FAR, places)
                    elif are_few:
                        tile(name, 1, TILE_ROWS, of_few, places)
                    else:
                        tile(name, 1, beside_few, FAR, places)
                    j += n
                    fetch = min(fetch + (n * weight_row >> fetch_shift), fetch_end)
                row += num_x

    return worker
