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
from .tile_product import STEP_BYTES, TILE
from .vectors import (
    BFLOAT,
    FLOAT,
    FLOATS,
    INT8S,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    load,
    loop_over,
    prefetch,
    splat,
    store,
    take,
    to_bfloat16_row,
    widen_halves,
)

AHEAD = 8192  # bytes, of what is unpacked later

_HALVES, _WORDS = ir.VectorType(INT16, LANES), ir.VectorType(INT16, 2 * LANES)


def lay_out(rows: Tensor, packing: Packing) -> Tensor:
    """Packed rows, whole panels, in the order that `unpack_panel` reads: as many bytes. [num_rows, row_bytes] uint8."""
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
def unpack_panel(typing_context: Any, packing: Any, panel: Any, row_bytes: Any, out: Any) -> Any:
    """Write 16 rows of `row_bytes` of bfloat16 at `out`, from a panel at an address. What lies behind it is fetched.

    The first is a constant, the name of a packing; "" does nothing.
    """
    form = PACKINGS.get(packing.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        if form is None:
            return context.get_dummy_value()
        _, panel, row_bytes, out = arguments
        block_bytes, code_bytes = TILE * form.block_bytes, BLOCK * form.bits // 8
        memory = b.ptrtoint(alloca_once(b, ir.ArrayType(FLOATS, 2)), INT64)

        def unpack(offset: Any, _state: list[Any]) -> list[Any]:
            block = b.add(panel, b.mul(b.sdiv(offset, INT64(STEP_BYTES)), INT64(block_bytes)))
            for line in range(0, block_bytes, STEP_BYTES):
                prefetch(b, b.add(block, INT64(AHEAD + line)), level=2)
            halves = [load(b, b.add(block, INT64(2 * TILE * i)), _HALVES) for i in range(form.num_halves)]
            scales, *stored = (widen_halves(b, half) for half in halves)
            store(b, scales, memory)
            store(b, stored[0] if stored else b.fmul(scales, splat(FLOATS, -8.0)), b.add(memory, INT64(4 * LANES)))
            codes = b.add(block, INT64(2 * TILE * form.num_halves))
            for row in range(TILE):
                scale, least = (
                    broadcast(b, load(b, b.add(memory, INT64(4 * (LANES * i + row))), FLOAT), LANES) for i in (0, 1)
                )
                place = b.add(codes, INT64(code_bytes * row))
                target = b.add(b.add(out, offset), b.mul(row_bytes, INT64(row)))
                if form.bits == 8:
                    parts = [load(b, b.add(place, INT64(LANES * half)), INT8S) for half in (0, 1)]
                    low, high = (b.fmul(b.sitofp(b.sext(part, INTS), FLOATS), scale) for part in parts)
                    to_bfloat16_row(b, low, high, target)
                else:
                    store(b, _look_up(b, load(b, place, INT8S), scale, least), target)
            return []

        loop_over(b, row_bytes, STEP_BYTES, [], unpack)
        return context.get_dummy_value()

    return types.void(packing, *[types.int64] * 3), generate


def _look_up(b: ir.IRBuilder, pairs: Any, scale: Any, least: Any) -> Any:
    """32 numbers of bfloat16 by the two codes in each of 16 bytes: all sixteen that there are, rounded, are a table."""
    every = ir.Constant(FLOATS, [float(code) for code in range(LANES)])
    numbers = call(b, "llvm.fma.v16f32", FLOATS, [every, scale, least])
    rounded = call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, LANES), [numbers])
    twice = [*range(LANES), *range(LANES)]  # the instruction looks at five bits of a code
    table = take(b, b.bitcast(rounded, _HALVES), twice)
    codes = b.zext(take(b, pairs, twice), _WORDS)
    codes = b.lshr(codes, ir.Constant(_WORDS, [0] * LANES + [4] * LANES))
    return call(b, "llvm.x86.avx512.permvar.hi.512", _WORDS, [table, codes])
