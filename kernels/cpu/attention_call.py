"""What a call of attention is given, as records that compiled functions read: of decodes and of prompts."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import fp8
from .claims import new_claims
from .recording import CompiledCall

_FIELDS = (
    *("query", "key_cache", "value_cache", "out", "sinks", "token_stride", "head_stride", "plan"),
    *("claims", "num_threads", "number", "scratch"),  # of the call, as the plan understands them
)
_SCALES = ("key_scale", "value_scale")  # of caches in 8 bits; 1 of others
# What differs from layer to layer. Strides are in elements.
LAYER = np.dtype([*((name, np.int64) for name in _FIELDS), *((name, np.float64) for name in _SCALES)])


class Shape(NamedTuple):
    """What layers have in common that share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int  # 0: none, as of `softcap`
    softcap: float
    cache_bytes: int  # of a number in the caches

    @classmethod
    def of(
        cls, query: Tensor, key_cache: Tensor, scale: float, sliding_window: int | None, softcap: float | None
    ) -> Shape:
        """query [num_tokens, num_heads, head_dim], key_cache [num_blocks, block_size, num_kv_heads, head_dim]."""
        (_, block_size, num_kv_heads, head_dim), number_bytes = key_cache.shape, key_cache.itemsize
        window, cap = sliding_window or 0, softcap or 0.0
        return cls(query.shape[1], num_kv_heads, head_dim, block_size, scale, window, cap, number_bytes)


_SHAPE = [(name, np.float64 if name in ("scale", "softcap") else np.int64) for name in Shape._fields]


def plan_type(*fields: str) -> np.dtype[np.void]:
    """Of a record of whole numbers and addresses, and a shape."""
    return np.dtype([*((name, np.int64) for name in fields), *_SHAPE])


def new_plan(dtype: np.dtype[np.void], shape: Shape) -> npt.NDArray[np.void]:
    """[1], of which the shape is filled in."""
    record = np.zeros(1, dtype)
    for name, value in zip(Shape._fields, shape, strict=True):
        record[name] = value
    return record


class _Layer(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in _FIELDS), *((name, ctypes.c_double) for name in _SCALES)]


# As compiled functions see them.
NUMBERS: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    fp8.DTYPE: np.uint8,
}


class Layer(NamedTuple):
    """What one layer is given."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    out: Tensor
    sinks: Tensor | None
    key_scale: float
    value_scale: float


def layer_call(worker: Any, layer: Layer, plan: npt.NDArray[Any], number: int = 0, scratch: int = 0) -> CompiledCall:
    """A call of a compiled function with a record of LAYER. Whoever makes it keeps alive what that has the addresses
    of."""
    query, key_cache, value_cache, out, sinks, *scales = layer
    num_threads = torch.get_num_threads()
    claims = new_claims(num_threads)
    arguments = _Layer(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        query.stride(0),
        query.stride(1),
        plan.ctypes.data,
        ctypes.addressof(claims),
        num_threads,
        number,
        scratch,
        *scales,
    )
    return CompiledCall(worker.ctypes, arguments, claims, (), is_idempotent=True)
