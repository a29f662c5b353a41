# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Rows of a packed matrix (`kernels.packed`) that are looked up, unpacked on the way."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from ..packed import BLOCK, PACKINGS, Packing, unpack
from .call import Arguments, RowFunction, enter_rows, take_rows
from .intrinsics import pointer
from .rows import store_row
from .sources import digest_of, filed_as

DTYPES = (torch.float32, torch.bfloat16)  # of what is unpacked, by compiled code

_SOURCES = ("..packed", "call", "claims", "intrinsics", "rows")
_UNPACK = Arguments("rows", "num_places", "num_blocks", "places", "out", "short")
_UNPACK_TYPE = _UNPACK.dtype
_UNPACK_NS = 0.5  # about what a number takes


def look_up_packed(token_ids: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """See `ops.look_up_packed`."""
    if dtype not in DTYPES or 0 in (len(token_ids), len(rows)):
        return unpack(rows.index_select(0, token_ids), packing).to(dtype)
    token_ids, num_numbers = token_ids.contiguous(), packing.num_numbers(rows.shape[1])
    out = torch.empty(len(token_ids), num_numbers, dtype=dtype)
    _unpacker(packing.name)(
        len(token_ids), num_numbers,
        rows.data_ptr(), len(rows), num_numbers // BLOCK, token_ids.data_ptr(), out.data_ptr(), dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def looks_up_packed(dtype: torch.dtype) -> bool:
    """See `ops.looks_up_packed`."""
    return dtype in DTYPES


@cache
def _unpacker(packing: str) -> RowFunction:
    sources = f"{digest_of(*_SOURCES)} {PACKINGS[packing]}"
    return RowFunction(partial(_unpack_worker, packing, sources), _UNPACK, _UNPACK_NS, is_idempotent=True)


@njit(error_model="numpy")
def _widened_half(bits: Any) -> Any:
    """float16 becomes float32. Its exponents are 112 less; those of subnormal numbers, and of what is not finite, stand
    for something else."""
    sign, exponent, rest = np.int32(bits >> 15) << 31, np.int32(bits >> 10) & 31, np.int32(bits & 1023)
    if exponent == 0:
        return np.float32(-rest if sign else rest) * np.float32(2.0**-24)
    exponent = np.int32(255 if exponent == 31 else exponent + 112)
    return np.int32(sign | exponent << 23 | rest << 13).view(np.float32)


def _unpack_worker(packing: str, sources: str) -> Any:
    kind = PACKINGS[packing]
    bits, has_least, is_nested, num_kinds, unit = kind.bits, kind.has_least, kind.is_nested, kind.num_kinds, kind.unit
    has_table, table = bool(kind.table), np.array(kind.table or range(16), np.float32)
    per_block, unit_bytes, zero, fold = kind.num_groups, kind.row_bytes(kind.unit), kind.zero, kind.fold
    code_bytes, group_size = kind.code_bytes, BLOCK // per_block

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    @filed_as(packing)
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _UNPACK_TYPE)[0]
        num_blocks = a.num_blocks
        num_numbers = num_blocks * BLOCK
        num_groups, num_units, size = num_blocks * per_block, num_numbers // unit, 2 if a.short != 0 else 4
        row_bytes, per_unit = num_units * unit_bytes, num_groups // num_units
        nested_at = 2 * num_kinds * num_units
        codes_at = nested_at + (num_kinds * num_groups if is_nested else 0)
        places = carray(pointer(a.places), (a.num_rows,), np.int64)
        row, thread, item, lap = np.empty(num_numbers, np.float32), enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for index in range(first, stop):
                place = min(max(places[index], np.int64(0)), a.num_places - 1)  # nothing else is read, whatever it is
                start = a.rows + place * row_bytes
                halves = carray(pointer(start), (num_kinds, num_units), np.uint16)
                nested = carray(pointer(start + nested_at), (num_kinds, num_groups), np.int8)
                codes = carray(pointer(start + codes_at), (num_blocks, code_bytes), np.int8 if bits == 8 else np.uint8)
                for k in range(num_groups):
                    scale = _widened_half(halves[0, k // per_unit])
                    if is_nested:
                        scale *= np.float32(nested[0, k])
                    least = scale * np.float32(-zero)
                    if has_least:
                        least = _widened_half(halves[num_kinds - 1, k // per_unit])
                        if is_nested:
                            least *= np.float32(nested[num_kinds - 1, k])
                    block, part, first_number = k // per_block, k % per_block, k * group_size
                    if bits == 8:
                        for i in range(group_size):
                            number = np.float32(codes[block, part * group_size + i]) * scale
                            row[first_number + i] = number + least if has_least else number
                        continue
                    if bits == 4:
                        for i in range(fold):
                            both = codes[block, part * fold + i]
                            if has_table:
                                row[first_number + i] = table[both & 15] * scale
                                row[first_number + fold + i] = table[both >> 4] * scale
                            else:
                                row[first_number + i] = np.float32(both & 15) * scale + least
                                row[first_number + fold + i] = np.float32(both >> 4) * scale + least
                        continue
                    for half in range(group_size // 16):
                        own, first_of_half = codes[block, 12 * (part + half) :], first_number + 16 * half
                        for i in range(12):
                            row[first_of_half + i] = np.float32(own[i] & 63) * scale + least
                        for i in range(4):
                            last = own[i] >> 6 | own[4 + i] >> 6 << 2 | own[8 + i] >> 6 << 4
                            row[first_of_half + 12 + i] = np.float32(last) * scale + least
                store_row(row, num_numbers, a.short, a.out + index * num_numbers * size)

    return worker
