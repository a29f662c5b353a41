# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""What a few operators of torch do, as compiled calls: between two others, Python then has nothing to do.

Those that stand between the layers of a forward and what follows: copies, also of bfloat16 to float32, and a sum; and
rows that are looked up, with which a forward begins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from .call import Arguments, RowFunction, enter_rows, take_rows
from .intrinsics import pointer
from .recording import CompiledCall
from .rows import load_row, store_row
from .sources import digest_of

_ATEN = torch.ops.aten
_LOOKED_UP = (_ATEN.embedding.out, _ATEN.index_select.out)
_TAKE = Arguments("table", "num_places", "groups", "row_words", "places", "out")
_TAKE_TYPE = _TAKE.dtype
_SUM = Arguments("x", "x_stride", "x_short", "y", "y_stride", "out", "out_stride", "short", "size")
_SUM_TYPE = _SUM.dtype
_WORD = 4  # bytes: what is only copied may be any numbers


def begins(operator: partial[Any]) -> bool:
    """Whether a call of it pays where none is before it: in most forwards, others are behind it."""
    return operator.func in _LOOKED_UP


def compiled(operator: partial[Any]) -> CompiledCall | None:
    """A call that does what `operator` does, which is not called; None where there is none. Whoever records is told of
    the rows that it depends on."""
    args, alpha = operator.args, operator.keywords.get("alpha", 1)
    if operator.func is _ATEN.copy_.default and len(args) == 2:
        return _copy(*args)
    if operator.func is _ATEN.add_.Tensor and len(args) == 2 and alpha == 1:
        return _add(*args)
    if operator.func is _ATEN.embedding.out and len(args) == 2:
        return _look_up(args[0][None], args[1], operator.keywords["out"][None])
    if operator.func is _ATEN.index_select.out and args[1] == 1 and args[0].dim() == 3:
        return _look_up(args[0], args[2], operator.keywords["out"])
    return None


def _look_up(table: Tensor, places: Tensor, out: Tensor) -> CompiledCall | None:
    """table [groups, places, size] -> out [groups, rows, size]. (Where torch raises, as a place is beside the table, it
    is the nearest one: who repeats a record has checked.)"""
    groups, num_places, size = table.shape
    is_whole = all(each.is_contiguous() for each in (table, places, out)) and size * out.itemsize % _WORD == 0
    is_plain = places.dim() == 1 and places.dtype == torch.int64 and table.dtype == out.dtype
    if not is_whole or not is_plain or 0 in (num_places, out.numel()):
        return None
    row_words = size * out.itemsize // _WORD
    return _take.call(
        len(places), groups * row_words,
        table.data_ptr(), num_places, groups, row_words, places.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def _copy(out: Tensor, x: Tensor) -> CompiledCall | None:
    if not _alike(out, x):
        return None
    if (x.dtype, out.dtype) == (torch.bfloat16, torch.float32):
        return _call(x, None, out, _row_size(out), x_short=True, short=False)
    row_bytes = _row_size(out) * out.itemsize
    if x.dtype != out.dtype or row_bytes % _WORD:
        return None
    return _call(x, None, out, row_bytes // _WORD, x_short=False, short=False)


def _add(out: Tensor, x: Any) -> CompiledCall | None:
    if not isinstance(x, Tensor) or not _alike(out, x):
        return None
    if x.dtype != out.dtype or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    short = x.dtype == torch.bfloat16
    return _call(x, out, out, _row_size(out), x_short=short, short=short)


def _call(x: Tensor, y: Tensor | None, out: Tensor, size: int, *, x_short: bool, short: bool) -> CompiledCall:
    y_place = (0, 0) if y is None else (y.data_ptr(), y.stride(0) * y.itemsize)
    return _sum.call(
        len(out), size,
        x.data_ptr(), x.stride(0) * x.itemsize, x_short, *y_place,
        out.data_ptr(), out.stride(0) * out.itemsize, short, size,
    )  # fmt: skip


def _alike(out: Tensor, x: Tensor) -> bool:
    """Whether both are rows of the same shape, each in one piece."""
    return (
        out.shape == x.shape and out.dim() > 0 and out.numel() > 0 and out[0].is_contiguous() and x[0].is_contiguous()
    )


def _row_size(tensor: Tensor) -> int:
    return tensor.numel() // len(tensor)


def _take_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (1,), _TAKE_TYPE)[0]
        places = carray(pointer(a.places), (a.num_rows,), np.int64)
        table = carray(pointer(a.table), (a.groups, a.num_places, a.row_words), np.int32)
        out = carray(pointer(a.out), (a.groups, a.num_rows, a.row_words), np.int32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                place = min(max(places[row], np.int64(0)), a.num_places - 1)  # nothing else is read, whatever it is
                for group in range(a.groups):
                    for i in range(a.row_words):
                        out[group, row, i] = table[group, place, i]

    return worker


def _sum_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _SUM_TYPE)[0]
        row, other = np.empty(a.size, np.float32), np.empty(a.size, np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for index in range(first, stop):
                load_row(a.x + index * a.x_stride, a.size, a.x_short, row)
                if a.y != 0:
                    load_row(a.y + index * a.y_stride, a.size, a.short, other)
                    for i in range(a.size):
                        row[i] += other[i]
                store_row(row, a.size, a.short, a.out + index * a.out_stride)

    return worker


_SOURCES = digest_of("call", "claims", "intrinsics", "rows")
_sum = RowFunction(partial(_sum_worker, _SOURCES), _SUM, 0.2)  # about what an element takes, in nanoseconds
_take = RowFunction(partial(_take_worker, _SOURCES), _TAKE, 0.2, is_idempotent=True)
FUNCTIONS = (_sum, _take)
