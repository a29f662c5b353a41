"""What products with packed weights are called with, by `codes`, `dots`, `byte_dots`, `rounded_dots` and `panels`."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from . import kv_prefetch
from .claims import new_claims
from .cores import CHUNK_BYTES
from .recording import CallPlaces, CompiledCall, Rows
from .threads import run_call

# Places in the arguments of a worker, int64: addresses and sizes.
(
    X,
    WEIGHT,
    BIAS,
    OUT,
    NUM_ROWS,
    OUT_FEATURES,
    IN_FEATURES,
    NUM_THREADS,
    CLAIMS,
    CHOSEN,
    CHUNK,  # bytes of x that are one: what stays in a core's cache while the weight goes by
    SHARE,
) = range(12)
NUM_ARGUMENTS = SHARE + kv_prefetch.NUM_WORDS
_PLACES = CallPlaces(8 * X, 8 * OUT, 8 * NUM_ROWS, 8 * CLAIMS, 8 * WEIGHT, 8 * BIAS)


def run_product(
    entry: Any,
    x: int,
    in_features: int,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    least_rows: int = 1,
    most_rows: int = sys.maxsize,
    chosen: Tensor | None = None,
    fetches: bool = False,
) -> None:
    """Fill `out` [num_rows, out_features] by the worker `entry` (a ctypes function pointer).

    `x` is the address of what it takes for x; `least_rows` and `most_rows`: of how many it is this worker that takes x
    so. `chosen`: the pairs of panels that are multiplied, uint8, by workers that can choose; the results of the others
    are left alone. `fetches`: it may fetch what attention reads
    (`kv_prefetch`), by workers that can.
    """
    num_threads = torch.get_num_threads()
    claims = new_claims(num_threads)
    arguments = (ctypes.c_int64 * NUM_ARGUMENTS)(
        x,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        *out.shape,
        in_features,
        num_threads,
        ctypes.addressof(claims),
        0 if chosen is None else chosen.data_ptr(),
        CHUNK_BYTES,
    )
    call = CompiledCall(entry, arguments, claims, (Rows(8 * NUM_ROWS),), is_idempotent=True)
    call = call._replace(least_rows=least_rows, most_rows=most_rows, places=_PLACES)
    if fetches:
        place = ctypes.addressof(arguments) + 8 * SHARE
        call = call._replace(prefetch=kv_prefetch.Fetches(place, len(weight) * in_features))
    run_call(call)
