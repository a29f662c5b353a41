# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""What is read and written of tokens that stay where they are, compiled: the program of a decode step begins and ends
with it, and leaves nothing of it to Python, for which helpers would wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from torch import Tensor

from .call import Arguments, RowFunction, enter_rows, take_rows
from .intrinsics import pointer
from .sources import digest_of

_RESOLVE = Arguments("token_ids", "last_token_ids", "num_last", "out")
_KEEP = Arguments("last_token_ids", "num_last", "rows", "token_ids")
_RESOLVE_TYPE, _KEEP_TYPE = _RESOLVE.dtype, _KEEP.dtype


def resolve_tokens(token_ids: Tensor, last_token_ids: Tensor) -> Tensor:
    """See `tokens.resolve_tokens`."""
    out = torch.empty(len(token_ids), dtype=torch.int64)
    _resolve(len(token_ids), 1, token_ids.data_ptr(), last_token_ids.data_ptr(), len(last_token_ids), out.data_ptr())
    return out


def keep_tokens(last_token_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """See `tokens.keep_tokens`."""
    _keep(len(rows), 1, last_token_ids.data_ptr(), len(last_token_ids), rows.data_ptr(), token_ids.data_ptr())


def _resolve_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _RESOLVE_TYPE)[0]
        token_ids = carray(pointer(a.token_ids), (a.num_rows,), np.int64)
        out = carray(pointer(a.out), (a.num_rows,), np.int64)
        last_token_ids = carray(pointer(a.last_token_ids), (a.num_last,), np.int64)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for i in range(first, stop):
                token = token_ids[i]
                out[i] = token if token >= 0 else last_token_ids[min(-1 - token, a.num_last - 1)]

    return worker


def _keep_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (likewise)
        a = carray(pointer(address), (1,), _KEEP_TYPE)[0]
        last_token_ids = carray(pointer(a.last_token_ids), (a.num_last,), np.int64)
        rows = carray(pointer(a.rows), (a.num_rows,), np.int64)
        token_ids = carray(pointer(a.token_ids), (a.num_rows,), np.int64)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for i in range(first, stop):
                if 0 <= rows[i] < a.num_last:
                    last_token_ids[rows[i]] = token_ids[i]

    return worker


_SOURCES = digest_of("call", "claims", "intrinsics")
_NS = 1.0  # about what a token takes
_resolve = RowFunction(partial(_resolve_worker, _SOURCES), _RESOLVE, _NS, is_idempotent=True)
# Not idempotent: a program begins with reading what this writes, and a row may be given twice. So all threads are done
# with the former before one of them begins this.
_keep = RowFunction(partial(_keep_worker, _SOURCES), _KEEP, _NS)
FUNCTIONS = (_resolve, _keep)
