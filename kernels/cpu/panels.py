# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="attr-defined, misc, type-var, call-arg, untyped-decorator, no-untyped-call, var-annotated"
# (compiled functions and their views into memory are not Python to a type checker)
"""The product with a packed weight (`kernels.packed`), in float32: compiled with Numba and run on all threads.

What decides is arithmetic, not memory: a packed weight is read in a fifth of the time that its numbers would take. So
16 rows of the weight, a panel, are packed again when they are loaded, such that a number of each is one vector:

    codes   [block][vector][row of the panel][8 numbers]   --unpack-->   panel   [number][row of the panel] float32

A thread unpacks SPAN numbers of one or two panels at a time, which then stand in its first cache, and multiplies them
with all rows of x, some at a time: a vector of the panel, times one number of a row of x, added to that row's sums.
Sums take their products in the order of `tile_product`, so that results have the bits that the same numbers have in
`few_rows` and `many_rows`. Numbers of bfloat16 are rounded to it when they are unpacked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing
from .claims import enter, new_claims, take_item
from .features import IS_WIDE
from .intrinsics import pointer
from .many_rows import CHUNK_BYTES, turned
from .packed_tiles import join_blocks, panels_of
from .recording import CompiledCall, Rows
from .sources import digest_of
from .threads import run_call
from .tile_product import CLASSES, IN_A_ROW, STEP_BYTES, TILE
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    from_bfloat16,
    joined,
    load,
    loop_over,
    prefetch,
    splat,
    store,
    to_bfloat16,
    widen_halves,
)

PANEL = LANES  # rows of the weight
SPAN = CLASSES * IN_A_ROW  # numbers of them
WIDTH = 2 if IS_WIDE else 1  # panels at a time
SUMS = 16 if IS_WIDE else 4  # vectors that leave registers for what is multiplied
FEW = (1, 2, 3, 4, 6, 8) if IS_WIDE else (1, 2, 4)  # rows of x whose sums of a class are no more
SIZES = (12, 8, 4) if IS_WIDE else (6, 4, 2)  # rows of x at a time, where there are more
STEP = 2  # numbers of a class that a loop takes at once
AHEAD = 4096  # bytes, of what is unpacked later
CODES = 8  # of 4 bits, in a lane

_SOURCES = (
    *("call", "claims", "digits", "features", "intrinsics", "many_rows", "packed_tiles"),
    *("rows", "tile_product", "tiles", "turned_tiles", "vectors"),
)
_HALVES = ir.VectorType(INT16, LANES)
_VECTOR_BYTES = 4 * LANES

# Places in the arguments of a worker: addresses and sizes.
(
    _X,
    _WEIGHT,
    _BIAS,
    _OUT,
    _NUM_ROWS,
    _OUT_FEATURES,
    _IN_FEATURES,
    _NUM_THREADS,
    _CLAIMS,
    _NUM_ARGUMENTS,
) = range(10)


def fits(out_features: int, in_features: int) -> bool:
    """Whether a packed weight of this shape can be multiplied so."""
    return out_features % PANEL == 0 and out_features >= PANEL * WIDTH and in_features % BLOCK == 0


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order that `linear` reads: as many bytes. [num_rows, row_bytes] uint8."""
    halves, codes = panels_of(rows, packing, PANEL)
    if packing.bits == 8:
        return join_blocks(halves, codes.permute(0, 2, 3, 1)).view(rows.shape)
    numbers = torch.cat([codes & 15, codes >> 4], dim=3).unflatten(3, (-1, CODES))
    pairs = numbers[..., ::2] | numbers[..., 1::2] << 4  # [panel, row, block, vector, 4 bytes]
    return join_blocks(halves, pairs.permute(0, 2, 3, 1, 4)).view(rows.shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing) -> Tensor:
    """x @ weight.T + bias, in the dtype of x, float32 or bfloat16, to which the numbers of the weight are rounded.

    x [num_rows, in_features]; weight [out_features, row_bytes], in the order of `lay_out`, contiguous.
    """
    short, (num_rows, in_features) = x.dtype == torch.bfloat16, x.shape
    out_features, num_threads = weight.shape[0], torch.get_num_threads()
    out, are_few = x.new_empty(num_rows, out_features), num_rows <= FEW[-1]
    x = x.float().contiguous() if are_few else turned(x)
    claims = new_claims(num_threads)
    arguments = (ctypes.c_int64 * _NUM_ARGUMENTS)(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        out_features,
        in_features,
        num_threads,
        ctypes.addressof(claims),
    )
    rows = None if are_few else (Rows(8 * _NUM_ROWS),)
    entry = _entry(packing.name, short)
    run_call(CompiledCall(entry, arguments, claims, rows, is_idempotent=True, least_rows=FEW[-1] + 1))
    return out


@cache
def _entry(packing: str, short: bool) -> Any:
    return _worker(packing, short, f"{digest_of(*_SOURCES)} {CHUNK_BYTES} {PACKINGS[packing]}").ctypes


def _worker(packing: str, short: bool, sources: str) -> Any:
    panel_block, size = PANEL * PACKINGS[packing].block_bytes, 2 if short else 4

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """One thread: take panels until there are none."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (_NUM_ARGUMENTS,), np.int64)
        num_rows, out_features, in_features = a[_NUM_ROWS], a[_OUT_FEATURES], a[_IN_FEATURES]
        num_threads, claims = a[_NUM_THREADS], a[_CLAIMS]
        thread, x_row, out_row = enter(claims), 4 * in_features, size * out_features
        panel_bytes = in_features // BLOCK * panel_block
        is_few = num_rows <= FEW[-1]
        width = 1 if is_few else WIDTH  # panels at a time
        num_chunks = (num_rows * x_row + CHUNK_BYTES - 1) // CHUNK_BYTES
        chunk_rows = (num_rows + num_chunks * TILE - 1) // (num_chunks * TILE) * TILE
        num_panels = out_features // PANEL
        num_blocks = (num_panels + width - 1) // width
        memory = np.empty((0 if is_few else SPAN * PANEL * width) + LANES, np.float32)
        numbers = (memory.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        sums_row = _VECTOR_BYTES * width
        totals = np.empty((chunk_rows + SIZES[0]) * PANEL * width + LANES, np.float32)
        sums = (totals.ctypes.data + STEP_BYTES - 1) // STEP_BYTES * STEP_BYTES
        item, lap = -1, 0
        while True:
            item, lap = take_item(claims, num_threads, num_blocks * num_chunks, thread, item, lap)
            if item < 0:
                break
            # The last panels may be multiplied twice, by two threads even: to the same bits.
            chunk, first = item // num_blocks, min(item % num_blocks * width, num_panels - width)
            row, chunk_end = chunk * chunk_rows, min((chunk + 1) * chunk_rows, num_rows)
            count, x, cells = chunk_end - row, a[_X] + row * x_row, a[_WEIGHT] + first * panel_bytes
            for k in range(0, in_features, SPAN):
                span = min(SPAN, in_features - k)
                place = cells + k // BLOCK * panel_block
                if is_few:
                    _multiply_few(packing, short, count, place, x + 4 * k, x_row, span, k == 0, sums)
                    continue
                _unpack(packing, short, place, panel_bytes, span, numbers)
                done = 0
                while done < count:
                    left = min(count, (done // TILE + 1) * TILE) - done
                    rows = x + (done // TILE * in_features + k) * TILE * 4 + done % TILE * 4
                    total = sums + done * sums_row
                    if left <= SIZES[2]:
                        _multiply(SIZES[2], numbers, rows, span, k == 0, total)
                        done += SIZES[2]
                    elif left <= SIZES[1] or left > SIZES[0]:
                        _multiply(SIZES[1], numbers, rows, span, k == 0, total)
                        done += SIZES[1]
                    else:
                        _multiply(SIZES[0], numbers, rows, span, k == 0, total)
                        done += SIZES[0]
            column = first * PANEL * size
            bias = a[_BIAS] + column if a[_BIAS] != 0 else 0
            _finish(short, sums, sums_row, width, count, bias, a[_OUT] + row * out_row + column, out_row)
        memory[0] = totals[0] = 0  # they live until here: Numba does not see who has their addresses

    return worker


def _numbers(
    b: ir.IRBuilder, packing: Packing, is_short: bool, block: Any, classes: range = range(CLASSES)
) -> Iterator[tuple[int, Any]]:
    """Those numbers of a block of a panel, at an address, that some classes take: which, and a vector of its rows. With
    those of the first class, what comes later is fetched."""
    for line in range(0, PANEL * packing.block_bytes if classes.start == 0 else 0, STEP_BYTES):
        prefetch(b, b.add(block, INT64(AHEAD + line)), level=2)
    halves = [load(b, b.add(block, INT64(2 * PANEL * i)), _HALVES) for i in range(packing.num_halves)]
    scale, *stored = (widen_halves(b, half) for half in halves)
    least = stored[0] if stored else b.fmul(scale, splat(FLOATS, -8.0))
    codes = b.add(block, INT64(2 * PANEL * packing.num_halves))
    for number in range(BLOCK):
        if packing.bits == 4 and number % CODES == 0:
            words = load(b, b.add(codes, INT64(_VECTOR_BYTES * (number // CODES))), INTS)
        if number // _run(is_short) % CLASSES not in classes:
            continue
        if packing.bits == 8:
            code = b.sext(load(b, b.add(codes, INT64(PANEL * number)), INT8S), INTS)
            value = b.fmul(b.sitofp(code, FLOATS), scale)
        else:
            code = b.and_(b.lshr(words, splat(INTS, 4 * (number % CODES))), splat(INTS, 15))
            value = _fma(b, b.sitofp(code, FLOATS), scale, least)
        yield number, from_bfloat16(b, to_bfloat16(b, value)) if is_short else value


def _fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma.v16f32", FLOATS, [x, y, z])


def _run(is_short: bool) -> int:
    """Numbers in a row that a class takes: see `tile_product`."""
    return 2 if is_short else 1


@intrinsic(prefer_literal=True)
def _unpack(typing_context: Any, packing: Any, short: Any, block: Any, panel_bytes: Any, num_k: Any, out: Any) -> Any:
    """Write numbers of WIDTH panels from a block on, [class][number][panel][row of it] float32. See `tile_product`.

    The first two are constants. `short`: they are rounded to bfloat16. `num_k`: how many of a row, whole blocks.
    """
    form, is_short = PACKINGS[packing.literal_value], short.literal_value
    run = _run(is_short)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, block, panel_bytes, num_k, out = arguments
        row = _VECTOR_BYTES * WIDTH  # bytes
        class_bytes = b.mul(num_k, INT64(row // CLASSES))

        def unpack(k: Any, _state: list[Any]) -> list[Any]:
            for panel in range(WIDTH):
                place = b.add(b.add(block, b.mul(panel_bytes, INT64(panel))), _block_offset(b, form, k))
                start = b.add(b.add(out, b.mul(k, INT64(row // CLASSES))), INT64(_VECTOR_BYTES * panel))
                starts = [b.add(start, b.mul(class_bytes, INT64(i))) for i in range(CLASSES)]
                for number, vector in _numbers(b, form, is_short, place):
                    within = number // (CLASSES * run) * run + number % run
                    store(b, vector, b.add(starts[number // run % CLASSES], INT64(row * within)))
            return []

        loop_over(b, num_k, BLOCK, [], unpack)
        return context.get_dummy_value()

    return types.void(packing, short, *[types.int64] * 4), generate


def _block_offset(b: ir.IRBuilder, packing: Packing, k: Any) -> Any:
    return b.mul(k, INT64(PANEL * packing.block_bytes // BLOCK))


@intrinsic(prefer_literal=True)
def _multiply_few(
    typing_context: Any,
    packing: Any,
    short: Any,
    num_x: Any,
    block: Any,
    x: Any,
    x_row: Any,
    num_k: Any,
    is_first: Any,
    totals: Any,
) -> Any:
    """`_unpack` and `_multiply` in one, of a panel and one of FEW rows of x, which lie behind each other: no number is
    stored. Behind `num_x` rows, totals are of no meaning."""
    form, is_short = PACKINGS[packing.literal_value], short.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, _, num_x, block, x, x_row, num_k, is_first, totals = arguments

        last = b.sub(num_x, INT64(1))

        def of_rows(count: int) -> None:
            at_once = max(1, min(CLASSES, SUMS // count))
            rows = []
            for i in range(count):
                number = b.select(b.icmp_signed("<", INT64(i), last), INT64(i), last)
                rows.append(b.add(x, b.mul(x_row, number)))
            for first in range(0, CLASSES, at_once):
                of_classes(rows, range(first, first + at_once))

        def of_classes(rows: list[Any], classes: range) -> None:
            def step(k: Any, sums: list[Any]) -> list[Any]:
                sums, place = list(sums), b.add(block, _block_offset(b, form, k))
                for number, vector in _numbers(b, form, is_short, place, classes):
                    first = (number // _run(is_short) % CLASSES - classes.start) * len(rows)
                    offset = b.mul(b.add(k, INT64(number)), INT64(4))
                    for i, row in enumerate(rows):
                        factor = broadcast(b, load(b, b.add(row, offset), FLOAT), LANES)
                        sums[first + i] = _fma(b, factor, vector, sums[first + i])
                return sums

            sums = loop_over(b, num_k, BLOCK, [splat(FLOATS, 0.0)] * (len(classes) * len(rows)), step)
            begins = b.and_(is_first, ir.Constant(ir.IntType(1), classes.start == 0))
            for i in range(len(rows)):
                _add_classes(b, begins, sums[i :: len(rows)], b.add(totals, INT64(_VECTOR_BYTES * i)))

        fewer = 0
        for count in FEW:
            is_count = b.and_(b.icmp_signed(">", num_x, INT64(fewer)), b.icmp_signed("<=", num_x, INT64(count)))
            with b.if_then(is_count):
                of_rows(count)
            fewer = count
        return context.get_dummy_value()

    return types.void(packing, short, *[types.int64] * 5, types.boolean, types.int64), generate


def _add_classes(b: ir.IRBuilder, is_first: Any, sums: Sequence[Any], place: Any) -> None:
    """Classes, one after the other, to a total, which begins with the first span."""
    total = b.select(is_first, splat(FLOATS, 0.0), load(b, place, FLOATS))
    for part in sums:
        total = b.fadd(total, part)
    store(b, total, place)


@intrinsic(prefer_literal=True)
def _multiply(typing_context: Any, num_x: Any, numbers: Any, x: Any, num_k: Any, is_first: Any, totals: Any) -> Any:
    """Add to totals [row of x][panel][row of it] the products of `num_k` numbers of WIDTH panels, as `_unpack` writes
    them, with `num_x` rows of x, a constant, which are turned.

    A class takes its products one after the other, then the next class does.
    """
    m, n = num_x.literal_value, WIDTH

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, numbers, x, num_k, is_first, totals = arguments
        class_k = b.sdiv(num_k, INT64(CLASSES))

        def of_class(which: int) -> list[Any]:
            start = b.add(numbers, b.mul(class_k, INT64(_VECTOR_BYTES * n * which)))
            x_start = b.add(x, b.mul(class_k, INT64(4 * TILE * which)))

            def step(first: Any, sums: list[Any]) -> list[Any]:
                sums = list(sums)
                place, factors = (
                    b.add(start, b.mul(first, INT64(_VECTOR_BYTES * n))),
                    b.add(x_start, b.mul(first, INT64(4 * TILE))),
                )
                for k in range(STEP):
                    vectors = [load(b, b.add(place, INT64(_VECTOR_BYTES * (k * n + j))), FLOATS) for j in range(n)]
                    for i in range(m):
                        factor = broadcast(b, load(b, b.add(factors, INT64(4 * (k * TILE + i))), FLOAT), LANES)
                        for j, vector in enumerate(vectors):
                            sums[i * n + j] = _fma(b, factor, vector, sums[i * n + j])
                return sums

            return loop_over(b, class_k, STEP, [splat(FLOATS, 0.0)] * (m * n), step)

        for which in range(CLASSES):
            for i, part in enumerate(of_class(which)):
                first = b.and_(is_first, ir.Constant(ir.IntType(1), which == 0))
                _add_classes(b, first, [part], b.add(totals, INT64(_VECTOR_BYTES * i)))
        return context.get_dummy_value()

    return types.void(num_x, *[types.int64] * 3, types.boolean, types.int64), generate


@intrinsic(prefer_literal=True)
def _finish(
    typing_context: Any,
    short: Any,
    totals: Any,
    totals_row: Any,
    num_panels: Any,
    num_rows: Any,
    bias: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store totals, [row of x][panel][row of it], as rows of results, with the bias if its address is not 0. `short`, a
    constant: both are bfloat16."""
    is_short = short.literal_value
    size = _VECTOR_BYTES // 2 if is_short else _VECTOR_BYTES

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, totals, totals_row, num_panels, num_rows, bias, out, out_row = arguments

        def of_panel(panel: Any, _state: list[Any]) -> list[Any]:
            place = b.add(bias, b.mul(panel, INT64(size)))
            offset = b.mul(panel, INT64(_VECTOR_BYTES))
            before = b.block
            with b.if_then(b.icmp_signed("!=", bias, INT64(0))):
                given = from_bfloat16(b, load(b, place, _HALVES)) if is_short else load(b, place, FLOATS)
                inside = b.block
            added = joined(b, (splat(FLOATS, -0.0), before), (given, inside))

            def of_row(row: Any, _state: list[Any]) -> list[Any]:
                total = load(b, b.add(totals, b.add(offset, b.mul(row, totals_row))), FLOATS)
                result = b.fadd(total, added)
                target = b.add(b.add(out, b.mul(panel, INT64(size))), b.mul(row, out_row))
                store(b, to_bfloat16(b, result) if is_short else result, target)
                return []

            loop_over(b, num_rows, 1, [], of_row)
            return []

        loop_over(b, num_panels, 1, [], of_panel)
        return context.get_dummy_value()

    return types.void(short, *[types.int64] * 7), generate
