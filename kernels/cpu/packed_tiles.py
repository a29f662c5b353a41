# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""Packed weights (`kernels.packed`) for the CPU's matrix tiles, which take bfloat16.

16 rows, a panel, lie block by block: their scales, their least numbers, then each row's codes. A block becomes a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing
from .matrix_tiles import multiply_tiles, store_tiles, zero_tiles
from .tile_product import STEP_BYTES, TILE, TILE_BYTES
from .vectors import (
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    by_value,
    call,
    load,
    loop_over,
    prefetch,
    splat,
    store,
    take,
    to_bfloat16_by_instruction,
    widen_halves,
)

AHEAD = 8192  # bytes, of what is unpacked later
RING = 4  # blocks whose tiles are in memory: a power of two

_HALVES, _WORDS = ir.VectorType(INT16, LANES), ir.VectorType(INT16, 2 * LANES)


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order `unpack_panels` reads: as many bytes. [num_rows, row_bytes] uint8."""
    halves, codes = panels_of(rows, packing, TILE)
    return join_blocks(halves, codes.permute(0, 2, 1, 3)).view(rows.shape)


def panels_of(rows: Tensor, packing: Packing, panel: int) -> tuple[Tensor, Tensor]:
    """Halves [panel, block, which, row, 2 bytes] and codes [panel, row, block, bytes] of packed rows."""
    num_blocks, num_panels = rows.shape[1] // packing.block_bytes, len(rows) // panel
    halves, codes = packing.parts(rows)
    halves = halves.reshape(num_panels, panel, packing.num_halves, num_blocks, 2).permute(0, 3, 2, 1, 4)
    return halves, codes.reshape(num_panels, panel, num_blocks, -1)


def join_blocks(halves: Tensor, codes: Tensor) -> Tensor:
    """[panel, block, bytes] of both, each [panel, block, ...]."""
    return torch.cat([halves.flatten(2), codes.flatten(2)], dim=2)


@intrinsic(prefer_literal=True)
def unpack_panels(
    typing_context: Any, packing: Any, num_a: Any, panel: Any, panel_bytes: Any, row_bytes: Any, out: Any
) -> Any:
    """Write 16 rows of `row_bytes` of bfloat16 for each of `num_a` panels, which `panel_bytes` are between, one behind
    the other at `out`. What lies behind a block is fetched.

    The first is a constant, the name of a packing; "" does nothing.
    """
    form = PACKINGS.get(packing.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        if form is None:
            return context.get_dummy_value()
        _, num_a, panel, panel_bytes, row_bytes, out = arguments
        memory = _memory(b, 2 * LANES)

        def of_panel(i: Any, _state: list[Any]) -> list[Any]:
            place, target = b.add(panel, b.mul(panel_bytes, i)), b.add(out, b.mul(row_bytes, b.mul(i, INT64(TILE))))

            def step(k: Any, _state: list[Any]) -> list[Any]:
                _unpack_block(b, form, _block_at(b, form, place, k), memory, b.add(target, k), row_bytes)
                return []

            loop_over(b, row_bytes, STEP_BYTES, [], step)
            return []

        loop_over(b, num_a, 1, [], of_panel)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 5), generate


@intrinsic(prefer_literal=True)
def multiply_packed(
    typing_context: Any,
    packing: Any,
    num_a: Any,
    num_b: Any,
    panel: Any,
    panel_bytes: Any,
    x: Any,
    row_bytes: Any,
    sums: Any,
) -> Any:
    """`unpack_panels` and `matrix_tiles.multiply` in one: a block becomes tiles while those of the block before it are
    multiplied, and then its memory is another's.

    The first is a constant; "" does nothing.
    """
    form = PACKINGS.get(packing.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        if form is None:
            return context.get_dummy_value()
        _, num_a, num_b, panel, panel_bytes, x, row_bytes, sums = arguments
        memory, ring = _memory(b, 2 * LANES), _memory(b, (RING * 2 * TILE_BYTES + STEP_BYTES) // 4)
        ring = b.and_(b.add(ring, INT64(STEP_BYTES - 1)), INT64(-STEP_BYTES))

        def of_tiles(m: int, n: int) -> None:
            def tile(k: Any, i: int) -> Any:
                number = b.and_(b.sdiv(k, INT64(STEP_BYTES)), INT64(RING - 1))
                return b.add(ring, b.add(b.mul(number, INT64(m * TILE_BYTES)), INT64(i * TILE_BYTES)))

            def unpack(k: Any) -> None:
                for i in range(m):
                    block = _block_at(b, form, b.add(panel, b.mul(panel_bytes, INT64(i))), k)
                    _unpack_block(b, form, block, memory, tile(k, i), INT64(STEP_BYTES))

            def multiply(k: Any) -> None:
                a = [(tile(k, i), INT64(STEP_BYTES)) for i in range(m)]
                first = b.add(x, b.mul(k, INT64(TILE)))
                multiply_tiles(b, "tdpbf16ps", a, [b.add(first, b.mul(row_bytes, INT64(TILE * j))) for j in range(n)])

            def step(k: Any, _state: list[Any]) -> list[Any]:
                unpack(b.add(k, INT64(STEP_BYTES)))
                multiply(k)
                return []

            zero_tiles(b, m * n)
            unpack(INT64(0))
            last = b.sub(row_bytes, INT64(STEP_BYTES))
            with b.if_then(b.icmp_signed(">", last, INT64(0))):
                loop_over(b, last, STEP_BYTES, [], step)
            multiply(last)
            store_tiles(b, m * n, sums)

        by_value(b, num_a, (1, 2), lambda m: by_value(b, num_b, (1, 2), lambda n: of_tiles(m, n)))
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 7), generate


def _memory(b: ir.IRBuilder, num_words: int) -> Any:
    """The address of so many words on the stack."""
    return b.ptrtoint(alloca_once(b, ir.ArrayType(FLOAT, num_words)), INT64)


def _block_at(b: ir.IRBuilder, packing: Packing, panel: Any, k: Any) -> Any:
    """The address of the block whose numbers lie `k` bytes behind the first, as bfloat16."""
    return b.add(panel, b.mul(b.sdiv(k, INT64(STEP_BYTES)), INT64(TILE * packing.block_bytes)))


def _unpack_block(b: ir.IRBuilder, packing: Packing, block: Any, memory: Any, out: Any, row_bytes: Any) -> None:
    """16 rows of 32 numbers, `row_bytes` from one to the next. `memory`: for two vectors."""
    for line in range(0, TILE * packing.block_bytes, STEP_BYTES):
        prefetch(b, b.add(block, INT64(AHEAD + line)), level=2)
    halves = [load(b, b.add(block, INT64(2 * TILE * i)), _HALVES) for i in range(packing.num_halves)]
    given, *stored = (widen_halves(b, half) for half in halves)
    store(b, given, memory)
    store(b, stored[0] if stored else b.fmul(given, splat(FLOATS, -8.0)), b.add(memory, INT64(4 * LANES)))
    codes, code_bytes = b.add(block, INT64(2 * TILE * packing.num_halves)), BLOCK * packing.bits // 8

    def of_row(i: int, row: int) -> Any:
        return broadcast(b, load(b, b.add(memory, INT64(4 * (LANES * i + row))), FLOAT), LANES)

    for row in range(0, TILE, 2):
        rows = (row, row + 1)
        places = [b.add(codes, INT64(code_bytes * each)) for each in rows]
        targets = [b.add(out, b.mul(row_bytes, INT64(each))) for each in rows]
        scales, least = ([of_row(i, each) for each in rows] for i in (0, 1))
        if packing.bits == 8:
            for place, scale, target in zip(places, scales, targets, strict=True):
                parts = [load(b, b.add(place, INT64(LANES * half)), INT8S) for half in (0, 1)]
                low, high = (b.fmul(b.sitofp(b.sext(part, INTS), FLOATS), scale) for part in parts)
                store(b, to_bfloat16_by_instruction(b, low, high), target)
        else:
            pairs = [load(b, place, INT8S) for place in places]
            for vector, target in zip(_look_up(b, pairs, scales, least), targets, strict=True):
                store(b, vector, target)


def _look_up(b: ir.IRBuilder, pairs: list[Any], scales: list[Any], least: list[Any]) -> list[Any]:
    """32 numbers of bfloat16 for each of two rows, by the two codes in each of 16 bytes: the sixteen numbers that
    there are in either are one table together."""
    every = ir.Constant(FLOATS, [float(code) for code in range(LANES)])
    numbers = [call(b, "llvm.fma.v16f32", FLOATS, [every, *way]) for way in zip(scales, least, strict=True)]
    table = b.bitcast(to_bfloat16_by_instruction(b, *numbers), _WORDS)
    found = []
    for row, both in enumerate(pairs):
        codes = b.zext(take(b, both, [*range(LANES), *range(LANES)]), _WORDS)
        codes = b.lshr(codes, ir.Constant(_WORDS, [0] * LANES + [4] * LANES))
        codes = b.and_(codes, splat(_WORDS, 15))
        if row == 1:
            codes = b.or_(codes, splat(_WORDS, 16))
        found.append(call(b, "llvm.x86.avx512.permvar.hi.512", _WORDS, [table, codes]))
    return found
