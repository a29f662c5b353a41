# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""Words to use the CPU's matrix tiles with (Intel AMX), for `many_rows`.

A tile register holds 16 rows of 64 bytes. One instruction multiplies two of them, which is 16 x 16 sums:

    A: 16 rows of the weight, as they lie    times    B: 16 rows of x, turned    ->    C: 16 x 16 sums

Words of 32 bits are what is turned: two bfloat16 or four int8, that one step of a sum takes together.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .digits import join_digits
from .tiles import cpu_features
from .vectors import (
    FLOAT,
    FLOATS,
    INT8,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    load,
    loop_over,
    prefetch,
    store,
    take,
    to_bfloat16,
)

logger = logging.getLogger(__name__)

STEP_BYTES = 64  # of a row of either operand, which one instruction takes; a line of the cache, too
TILE = 16  # rows of a tile
TILE_BYTES = TILE * STEP_BYTES
FETCHED_AT_ONCE = 4  # lines


@cache
def are_available() -> bool:
    """Whether this CPU has them and the system lets this process use them, which it asks for."""
    if sys.platform != "linux" or not {"amx-tile", "amx-bf16", "amx-int8"} <= cpu_features():
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # of Linux on x86-64: ARCH_REQ_XCOMP_PERM
    if ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0:
        logger.info("the CPU has matrix tiles, but the system does not let this process use them")
        return False
    return True


def configuration() -> np.ndarray:
    """What `configure` reads, [64] uint8: palette 1, and for all eight tiles 16 rows of 64 bytes."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = STEP_BYTES
    config[48:56] = TILE
    return config


@intrinsic
def configure(typing_context: Any, config: Any) -> Any:
    """Set this thread's tiles up. Address of 64 bytes."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _call_tiles(b, "ldtilecfg", b.inttoptr(arguments[0], INT8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typing_context: Any) -> Any:
    """Give this thread's tiles back: the system need not save them any more."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        _call_tiles(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def multiply(
    typing_context: Any,
    instruction: Any,
    num_a: Any,
    num_b: Any,
    a: Any,
    a_row: Any,
    b_start: Any,
    b_group: Any,
    row_bytes: Any,
    fetch: Any,
    fetch_lines: Any,
    sums: Any,
) -> Any:
    """`num_a` x `num_b` tiles of sums at `sums`, [A, B, weight row, row of x].

    Constants: these numbers and the instruction. Addresses: of the first weight row, of the first B and of the sums.
    `a_row` bytes are between weight rows, of which `row_bytes` are multiplied, `b_group` bytes between one B and the
    other. On the way, `fetch_lines` lines per step are fetched from `fetch` on, a multiple of FETCHED_AT_ONCE.
    """
    name, m, n = instruction.literal_value, num_a.literal_value, num_b.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        a, a_row, b_start, b_group, row_bytes, fetch, fetch_lines, sums = arguments[3:]
        for tile in range(m * n):
            _call_tiles(b, "tilezero", INT8(tile))
        a_tiles, b_tiles = range(4, 4 + m), range(6, 6 + n)

        fetch_bytes = b.mul(fetch_lines, INT64(STEP_BYTES))

        def step(k: Any, _state: list[Any]) -> list[Any]:
            lines = b.add(fetch, b.mul(k, fetch_lines))

            def fetch_some(i: Any, _state: list[Any]) -> list[Any]:
                for line in range(FETCHED_AT_ONCE):
                    prefetch(b, b.add(lines, b.add(i, INT64(STEP_BYTES * line))))
                return []

            with b.if_then(b.icmp_signed(">", fetch_lines, INT64(0))):
                loop_over(b, fetch_bytes, STEP_BYTES * FETCHED_AT_ONCE, [], fetch_some)
            for i, tile in enumerate(a_tiles):
                start = b.add(b.add(a, b.mul(a_row, INT64(TILE * i))), k)
                _load_tile(b, tile, start, a_row)
            for j, tile in enumerate(b_tiles):
                start = b.add(b.add(b_start, b.mul(b_group, INT64(j))), b.mul(k, INT64(TILE)))
                _load_tile(b, tile, start, INT64(STEP_BYTES))
            for i in range(m):
                for j in range(n):
                    _call_tiles(b, name, INT8(i * n + j), INT8(4 + i), INT8(6 + j))
            return []

        loop_over(b, row_bytes, STEP_BYTES, [], step)
        for tile in range(m * n):
            place = b.inttoptr(b.add(sums, INT64(tile * TILE_BYTES)), INT8.as_pointer())
            _call_tiles(b, "tilestored64", INT8(tile), place, INT64(STEP_BYTES))
        return context.get_dummy_value()

    return types.void(instruction, num_a, num_b, *[types.int64] * 8), generate


@intrinsic
def turn_tile(typing_context: Any, source: Any, row_bytes: Any, last_row: Any, target: Any) -> Any:
    """16 rows of 16 words of 32 bits become columns: target[j][i] = source[min(i, last_row)][j]."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        source, row_bytes, last_row, target = arguments
        rows = []
        for i in range(TILE):
            row = b.select(b.icmp_signed("<", INT64(i), last_row), INT64(i), last_row)
            rows.append(load(b, b.add(source, b.mul(row, row_bytes)), INTS))
        for i, row in enumerate(_turned(b, rows)):
            store(b, row, b.add(target, INT64(i * STEP_BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    num_digits: Any,
    sums: Any,
    num_rows: Any,
    x_scales: Any,
    scales: Any,
    bias: Any,
    short: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store a tile of sums as `num_rows` rows of results for 16 columns, which `out_row` bytes are between.

    `num_digits` is a constant. For more than one, sums has a tile for each; x_scales (of the rows) and scales (of the
    columns) multiply. bias (float32) is added. `short`: results are rounded to bfloat16.
    """
    is_int8 = num_digits.literal_value > 1

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, sums, num_rows, x_scales, scales, bias, short, out, out_row = arguments
        places = [b.add(sums, INT64(STEP_BYTES * i)) for i in range(TILE)]
        if is_int8:
            lows = [load(b, b.add(place, INT64(TILE_BYTES)), INTS) for place in places]
            rows = [join_digits(b, load(b, place, INTS), low) for place, low in zip(places, lows, strict=True)]
        else:
            rows = [load(b, place, FLOATS) for place in places]
        added = load(b, bias, FLOATS)
        is_short = b.icmp_signed("!=", short, INT64(0))
        for i, row in enumerate(_turned(b, rows)):
            with b.if_then(b.icmp_signed("<", INT64(i), num_rows)):
                if is_int8:
                    x_scale = load(b, b.add(x_scales, INT64(4 * i)), FLOAT)
                    row = b.fmul(b.fmul(row, broadcast(b, x_scale, LANES)), load(b, scales, FLOATS))
                total, place = b.fadd(row, added), b.add(out, b.mul(out_row, INT64(i)))
                with b.if_else(is_short) as (half, full):
                    with half:
                        store(b, to_bfloat16(b, total), place)
                    with full:
                        store(b, total, place)
        return context.get_dummy_value()

    return types.void(num_digits, *[types.int64] * 8), generate


def _turned(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of 16 vectors: riffling the upper half of them into the lower one, as often as 16 has bits."""
    halves = [[i // 2 + LANES * (i % 2) + start for i in range(LANES)] for start in (0, LANES // 2)]
    for _ in range(4):
        pairs = [(rows[i], rows[i + TILE // 2]) for i in range(TILE // 2)]
        rows = [take(b, low, half, high) for low, high in pairs for half in halves]
    return rows


def _call_tiles(b: ir.IRBuilder, name: str, *arguments: Any) -> None:
    call(b, f"llvm.x86.{name}", ir.VoidType(), arguments)


def _load_tile(b: ir.IRBuilder, tile: int, start: Any, row_bytes: Any) -> None:
    _call_tiles(b, "tileloadd64", INT8(tile), b.inttoptr(start, INT8.as_pointer()), row_bytes)
