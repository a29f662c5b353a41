# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"
"""The product of tiles in the CPU's own matrix tiles (Intel AMX), bfloat16 or int8.

A tile register holds 16 rows of 64 bytes. One instruction multiplies two of them, which is 16 x 16 sums.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, register_jitable

from .features import cpu_features
from .tile_product import A_GOES_BY, B_GOES_BY, FETCHED_AT_ONCE, STEP_BYTES, TILE, TILE_BYTES, Operands
from .vectors import INT8, INT64, call, loop_over, prefetch

FIRST_A, FIRST_B = 4, 6  # tile registers; sums are in those before
_WHOLE_ROW = INT64(STEP_BYTES)

INSTRUCTIONS = {torch.bfloat16: "tdpbf16ps", torch.int8: "tdpbssd"}  # by the operands' type

logger = logging.getLogger(__name__)


@cache
def are_available() -> bool:
    """Whether this CPU has them and the system lets this process use them, which it asks for.

    avx512bf16, which rounds what they compute, is there wherever they are, unless a virtual machine hides it.
    """
    if (
        sys.platform != "linux"
        or not {"amx-tile", "amx-bf16", "amx-int8", "avx512bf16", "avx512vnni"} <= cpu_features()
    ):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # of Linux on x86-64: ARCH_REQ_XCOMP_PERM
    if ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) != 0:
        logger.info("the CPU has matrix tiles, but the system does not let this process use them")
        return False
    return True


def _describe(config: Any, num_rows: int) -> None:
    """Write what `configure` reads, [64] uint8: palette 1, and for all eight tiles their rows, of 64 bytes. Those from
    FIRST_B on have TILE of them, and others `num_rows`."""
    config[:] = 0
    config[0] = 1
    for tile in range(8):
        set_shape(config, tile, num_rows if tile < FIRST_B else TILE, STEP_BYTES)


@register_jitable(error_model="numpy")
def set_shape(config: Any, tile: int, num_rows: int, row_bytes: int) -> None:
    """Of one tile, where what `describe` writes is to be otherwise. (Not compiled where Python calls it.)"""
    config[16 + 2 * tile], config[48 + tile] = row_bytes, num_rows


describe = njit(error_model="numpy")(_describe)


def configuration() -> np.ndarray:
    """What `configure` reads, for tiles of TILE rows."""
    config = np.empty(64, np.uint8)
    _describe(config, TILE)
    return config


@intrinsic
def begin(typing_context: Any, config: Any) -> Any:
    """Before the first product of this thread. Address of what `describe` writes."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        configure(b, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def end(typing_context: Any) -> Any:
    """Behind the last product of this thread."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, _arguments: Any) -> Any:
        release(b)
        return context.get_dummy_value()

    return types.void(), generate


def configure(b: ir.IRBuilder, config: Any) -> None:
    """Generate: set this thread's tiles up. Address of what `describe` writes."""
    _call_tiles(b, "ldtilecfg", b.inttoptr(config, INT8.as_pointer()))


def release(b: ir.IRBuilder) -> None:
    """Generate: give this thread's tiles back. The system need not save them any more."""
    _call_tiles(b, "tilerelease")


def multiply(b: ir.IRBuilder, instruction: str, num_a: int, num_b: int, operands: Operands) -> None:
    """Generate it, with `tdpbf16ps` (sums in float32) or `tdpbssd` (int32)."""
    a, a_row, b_start, goes_by, row_bytes, fetch, fetch_lines, sums = operands
    for tile in range(num_a * num_b):
        zero_tile(b, tile)
    a_tiles, b_tiles = range(FIRST_A, FIRST_A + num_a), range(FIRST_B, FIRST_B + num_b)
    fetch_bytes = b.mul(fetch_lines, INT64(STEP_BYTES))
    a_goes_by, b_goes_by = (b.icmp_signed("==", goes_by, INT64(which)) for which in (A_GOES_BY, B_GOES_BY))

    def step(k: Any, _state: list[Any]) -> list[Any]:
        lines = b.add(fetch, b.mul(k, fetch_lines))

        def fetch_some(i: Any, _state: list[Any]) -> list[Any]:
            for line in range(FETCHED_AT_ONCE):
                prefetch(b, b.add(lines, b.add(i, INT64(STEP_BYTES * line))), level=2)
            return []

        for j, tile in enumerate(b_tiles):
            start = b.add(b_start, b.mul(b.add(b.mul(row_bytes, INT64(j)), k), INT64(TILE)))
            _load_by(b, tile, start, INT64(STEP_BYTES), b_goes_by)
        for i, tile in enumerate(a_tiles):
            _load_by(b, tile, b.add(b.add(a, b.mul(a_row, INT64(TILE * i))), k), a_row, a_goes_by)
        # Behind the loads, which would find no line fill buffer that is free.
        with b.if_then(b.icmp_signed(">", fetch_lines, INT64(0))):
            loop_over(b, fetch_bytes, STEP_BYTES * FETCHED_AT_ONCE, [], fetch_some)
        for i, a_tile in enumerate(a_tiles):
            for j, b_tile in enumerate(b_tiles):
                multiply_tile(b, instruction, i * num_b + j, a_tile, b_tile)
        return []

    loop_over(b, row_bytes, STEP_BYTES, [], step)
    for tile in range(num_a * num_b):  # [A, B, row of A, row of B]
        store_tile(b, tile, b.add(sums, INT64(tile * TILE_BYTES)))


def zero_tile(b: ir.IRBuilder, tile: int) -> None:
    """Generate: its sums begin."""
    _call_tiles(b, "tilezero", INT8(tile))


def load_tile(b: ir.IRBuilder, tile: int, start: Any, row_bytes: Any) -> None:
    """Generate: load its rows, which are so many bytes apart."""
    _call_tiles(b, "tileloadd64", INT8(tile), b.inttoptr(start, INT8.as_pointer()), row_bytes)


def load_tile_once(b: ir.IRBuilder, tile: int, start: Any, row_bytes: Any) -> None:
    """Generate: likewise. They do not stay in the first cache."""
    _call_tiles(b, "tileloaddt164", INT8(tile), b.inttoptr(start, INT8.as_pointer()), row_bytes)


def multiply_tile(b: ir.IRBuilder, instruction: str, sums: int, a_tile: int, b_tile: int) -> None:
    """Generate: add the product of two tiles to a third one."""
    _call_tiles(b, instruction, INT8(sums), INT8(a_tile), INT8(b_tile))


def store_tile(b: ir.IRBuilder, tile: int, start: Any, row_bytes: Any = _WHOLE_ROW) -> None:
    """Generate: store its rows, which are so many bytes apart, or one behind the other."""
    _call_tiles(b, "tilestored64", INT8(tile), b.inttoptr(start, INT8.as_pointer()), row_bytes)


def _load_by(b: ir.IRBuilder, tile: int, start: Any, row_bytes: Any, goes_by: Any) -> None:
    """Generate: load 16 rows, which are so many bytes apart. `goes_by`, int1: not to stay in the first cache."""
    with b.if_else(goes_by) as (streamed, kept):
        with streamed:
            load_tile_once(b, tile, start, row_bytes)
        with kept:
            load_tile(b, tile, start, row_bytes)


def _call_tiles(b: ir.IRBuilder, name: str, *arguments: Any) -> None:
    call(b, f"llvm.x86.{name}", ir.VoidType(), arguments)
