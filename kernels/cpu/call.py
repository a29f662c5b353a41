# mypy: disable-error-code="attr-defined, call-arg, no-untyped-call, untyped-decorator"
"""Calls of compiled functions that divide rows among threads, with as little ado as possible.

A decode step makes more than a hundred of them, most of which have a few microseconds of work: no more than a torch
operator takes to find its kernel. So a small one is a plain C call on the calling thread, which keeps the interpreter's
lock (to hand it over and wait for it again costs more); a large one is run by all threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from .claims import enter, new_claims, take_item
from .intrinsics import pointer
from .recording import CallPlaces, CompiledCall, Rows, recorder
from .threads import run_call

_SMALL_NS = 15_000  # less than this much work wakes no other thread
_ITEM_NS = 20_000  # what a thread takes at once
_EVERYONES = ("claims", "num_threads", "grain", "num_rows")
_EVERYONES_TYPE = np.dtype([(name, np.int64) for name in _EVERYONES])


class Arguments:
    """The arguments of a compiled function, in memory: int64, then the `floats`, float64.

    The first four are everyone's: what threads have claimed, how many there are, how many rows are an item, and how
    many there are.
    """

    def __init__(self, *names: str, floats: tuple[str, ...] = ()) -> None:
        everything = (*_EVERYONES, *names, *floats)
        fields = [(name, ctypes.c_double if name in floats else ctypes.c_int64) for name in everything]
        self.structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        self.dtype: np.dtype[Any] = np.dtype([(n, np.float64 if n in floats else np.int64) for n in everything])


class RowFunction:
    """A compiled `function(address of its arguments)`, which takes `grain` rows at a time until none are left."""

    def __init__(
        self,
        compiled: Callable[[], Any],
        arguments: Arguments,
        element_ns: float,
        *,
        is_idempotent: bool = False,
        takes: str = "",
    ) -> None:
        """`compiled` gives the function when it is first needed. `element_ns` is about what one element of a row takes,
        in nanoseconds. `takes`: of a function that has an `out`, what it has as x in its `places`. See
        `recording.CompiledCall`."""
        self._compiled = compiled
        self._structure = arguments.structure
        self._element_ns = element_ns
        self._is_idempotent = is_idempotent
        self._places = CallPlaces(*map(self._offset, (takes, "out", "num_rows", "claims"))) if takes else None

    def compile(self) -> bool:
        """Now rather than with the first call. Whether it was on disk already."""
        self._call  # noqa: B018 (a property, which is kept)
        return bool(self._worker.cache_hits)

    @cached_property
    def _worker(self) -> Any:
        return self._compiled()

    @cached_property
    def _call(self) -> Any:
        return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._worker.address)

    def __call__(
        self, num_given: int, row_size: int, *arguments: float, times: int = 1, per: int = 1, also: str | None = None
    ) -> None:
        """Rows of `row_size` elements: `times` as many as are given, or one for `per` of them. `arguments` are what
        follows `num_rows`; the one named by `also` is `num_given`."""
        row_ns, num_rows = row_size * self._element_ns, -(-num_given * times // per)
        if num_rows * row_ns < _SMALL_NS and recorder() is None:
            given = self._structure(0, 1, max(1, num_rows), num_rows, *arguments)
            self._call(ctypes.addressof(given))
            return
        run_call(self.call(num_given, row_size, *arguments, times=times, per=per, also=also))

    def call(
        self, num_given: int, row_size: int, *arguments: float, times: int = 1, per: int = 1, also: str | None = None
    ) -> CompiledCall:
        """The same, not called yet."""
        row_ns, num_rows = row_size * self._element_ns, -(-num_given * times // per)
        num_threads, most = torch.get_num_threads(), max(1, int(_ITEM_NS / row_ns))
        claims, item_rows = new_claims(num_threads), max(1, min(most, -(-num_rows // num_threads)))
        given = self._structure(ctypes.addressof(claims), num_threads, item_rows, num_rows, *arguments)
        rows: tuple[Rows, ...] | None = None
        if recorder() is not None:
            grain = Rows(self._offset("grain"), times, per * num_threads, most)
            rows = (Rows(self._offset("num_rows"), times, per), grain)
            rows += () if also is None else (Rows(self._offset(also)),)
        call = CompiledCall(self._worker.ctypes, given, claims, rows, is_idempotent=self._is_idempotent)
        return call if self._places is None else call._replace(places=self._places)

    def _offset(self, name: str) -> int:
        offset: int = getattr(self._structure, name).offset
        return offset


@njit(error_model="numpy")
def enter_rows(address: int) -> int:
    """The number of the calling thread in a call with the arguments at `address`."""
    return enter(carray(pointer(address), (1,), _EVERYONES_TYPE)[0].claims)


@njit(error_model="numpy")
def take_rows(address: int, thread: int, item: int, lap: int) -> tuple[int, int, int, int]:
    """Item and lap as of `claims.take_item`, for a thread that is done with `item`; the first row of the new one, and
    the end of its rows."""
    a = carray(pointer(address), (1,), _EVERYONES_TYPE)[0]
    item, lap = take_item(a.claims, a.num_threads, (a.num_rows + a.grain - 1) // a.grain, thread, item, lap)
    first = item * a.grain
    return item, lap, first, min(first + a.grain, a.num_rows)
