# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Norms, gated activations and rotations on CPU, compiled with Numba, in float32 and bfloat16.

torch takes three to six operators for each of them, and for a few rows an operator's call costs more than its work.
Here a row is walked along in vectors (`row_vectors`, `exponential`), in float32, and rounded when it is stored. A row's
result depends on its size alone. Other dtypes, and activations that need an error function, are left to torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .. import fp8
from ..activation import gated
from ..reference import elementwise as reference
from . import cache
from .call import Arguments, RowFunction, enter_rows, take_rows
from .exponential import GATES, Gate
from .float8 import store_float8
from .intrinsics import pointer
from .row_vectors import add_rows, copy_bytes, gate_row, scale_row, turn_halves
from .rows import load_row, store_row
from .sources import digest_of

if TYPE_CHECKING:
    from ..elementwise import HeadNorms, Rotation

_COMPILED = (torch.float32, torch.bfloat16)

_NORM = Arguments(
    "heads", "x", "x_stride", "head_stride", "residual", "residual_stride", "weight", "out", "sum", "size", "short",
    floats=("eps", "offset", "multiplier"),
)  # fmt: skip
_GATE = Arguments("gate_up", "stride", "out", "size", "short", floats=Gate._fields)
_ROTATE = Arguments("heads", "num_heads", "stride", "head_stride", "cos", "sin", "num_pairs", "interleaved", "short")
_WRITE = Arguments(
    "heads", "num_heads", "stride", "head_stride", "cos", "sin", "num_pairs", "interleaved", "short",
    "key", "num_kv_heads", "key_stride", "key_head_stride", "value", "value_stride", "value_head_stride",
    "key_cache", "value_cache", "slots", "head_dim", "rotated", "in_bytes", floats=("key_scale", "value_scale"),
)  # fmt: skip


_ANGLES = Arguments("positions", "inv_freq", "num_pairs", "cos", "sin", floats=("magnitude",))

_ANGLES_TYPE = _ANGLES.dtype
_NORM_TYPE, _GATE_TYPE, _ROTATE_TYPE, _WRITE_TYPE = _NORM.dtype, _GATE.dtype, _ROTATE.dtype, _WRITE.dtype


def angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """See `elementwise.angles`."""
    (num_tokens,), (num_pairs,) = positions.shape, inv_freq.shape
    cos, sin = (torch.empty(num_tokens, num_pairs, dtype=torch.float32) for _ in range(2))
    _angles(
        num_tokens, num_pairs,
        positions.data_ptr(), inv_freq.data_ptr(), num_pairs, cos.data_ptr(), sin.data_ptr(), magnitude,
    )  # fmt: skip
    return cos, sin


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See `elementwise.rms_norm`; `offset` is what the weight is stored minus."""
    if x.dtype not in _COMPILED:
        return reference.rms_norm(x, weight, eps, offset)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    size, width = weight.shape[0], x.itemsize
    heads = 1 if x.dim() == 2 else x.shape[1]
    head_stride = 0 if heads == 1 else x.stride(1) * width
    _norm(
        x.shape[0], size,
        heads, x.data_ptr(), x.stride(0) * width, head_stride, 0, 0, weight.data_ptr(), out.data_ptr(), 0, size,
        width == 2, eps, offset, 0.0, times=heads,
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, multiplier: float
) -> tuple[Tensor, Tensor]:
    """See `elementwise.add_rms_norm`. The sum is a new tensor, so that it may be computed more than once."""
    if x.dtype not in _COMPILED:
        return reference.add_rms_norm(x, residual, weight, eps, offset, multiplier)
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    (num_rows, size), width = x.shape, x.itemsize
    _norm(
        num_rows, size,
        1, x.data_ptr(), x.stride(0) * width, 0, residual.data_ptr(), residual.stride(0) * width, weight.data_ptr(),
        out.data_ptr(), total.data_ptr(), size, width == 2, eps, offset, multiplier,
    )  # fmt: skip
    return out, total


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """See `elementwise.activate_and_mul`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if activation not in GATES:
        return gated(activation, *gate_up.split(size, dim=1))
    if gate_up.dtype not in _COMPILED:
        return reference.activate_and_mul(gate_up, activation)
    out = gate_up.new_empty(num_rows, size)
    width = gate_up.itemsize
    _gate(
        num_rows, size,
        gate_up.data_ptr(), gate_up.stride(0) * width, out.data_ptr(), size, width == 2,
        *GATES[activation],
    )  # fmt: skip
    return out


def rotate(heads: Tensor, rotation: Rotation) -> None:
    """See `elementwise.rotate`."""
    if heads.dtype not in _COMPILED:
        reference.rotate(heads, rotation)
        return
    cos, sin, interleaved = rotation
    (num_tokens, num_heads, head_dim), width = heads.shape, heads.itemsize
    _rotate(
        num_tokens, num_heads * head_dim,
        heads.data_ptr(), num_heads, heads.stride(0) * width, heads.stride(1) * width,
        cos.data_ptr(), sin.data_ptr(), cos.shape[1], interleaved, width == 2,
    )  # fmt: skip


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
    norms: HeadNorms | None,
) -> Tensor:
    """See `elementwise.rotate_and_write_kv`. Queries become a new tensor, as of `add_rms_norm`."""
    if norms is not None:
        query, key = norms.apply(rms_norm, query, key)
    if query.dtype not in _COMPILED:
        key = key.clone(memory_format=torch.contiguous_format)
        rotate(query, rotation)
        rotate(key, rotation)
        cache.write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        return query
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    cos, sin, interleaved = rotation
    (num_tokens, num_heads, head_dim), num_kv_heads, width = query.shape, key.shape[1], query.itemsize
    _write(
        num_tokens, (num_heads + 2 * num_kv_heads) * head_dim,
        query.data_ptr(), num_heads, query.stride(0) * width, query.stride(1) * width,
        cos.data_ptr(), sin.data_ptr(), cos.shape[1], interleaved, width == 2,
        key.data_ptr(), num_kv_heads, key.stride(0) * width, key.stride(1) * width,
        value.data_ptr(), value.stride(0) * width, value.stride(1) * width,
        key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(), head_dim, rotated.data_ptr(),
        key_cache.dtype == fp8.BYTES, key_scale, value_scale,
    )  # fmt: skip
    return rotated


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    """See `ops.write_kv`: as `rotate_and_write_kv`, with no query and nothing to rotate."""
    if key.dtype not in _COMPILED:
        cache.write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        return
    (num_tokens, num_kv_heads, head_dim), width = key.shape, key.itemsize
    _write(
        num_tokens, 2 * num_kv_heads * head_dim,
        0, 0, 0, 0, 0, 0, 0, False, width == 2,
        key.data_ptr(), num_kv_heads, key.stride(0) * width, key.stride(1) * width,
        value.data_ptr(), value.stride(0) * width, value.stride(1) * width,
        key_cache.data_ptr(), value_cache.data_ptr(), slot_mapping.data_ptr(), head_dim, 0,
        key_cache.dtype == fp8.BYTES, key_scale, value_scale,
    )  # fmt: skip


def _angles_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        """A number by itself: its bits do not depend on those beside it."""
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _ANGLES_TYPE)[0]
        shape, magnitude = (a.num_rows, a.num_pairs), np.float32(a.magnitude)
        positions = carray(pointer(a.positions), (a.num_rows,), np.int64)
        inv_freq = carray(pointer(a.inv_freq), (a.num_pairs,), np.float32)
        cos, sin = carray(pointer(a.cos), shape, np.float32), carray(pointer(a.sin), shape, np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                for i in range(a.num_pairs):
                    angle = np.float32(positions[row]) * inv_freq[i]
                    cos[row, i], sin[row, i] = np.cos(angle) * magnitude, np.sin(angle) * magnitude

    return worker


def _norm_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _NORM_TYPE)[0]
        size, offset, multiplier, width = a.size, np.float32(a.offset), np.float32(a.multiplier), 2 if a.short else 4
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for index in range(first, stop):
                token, head = index // a.heads, index % a.heads
                x = a.x + token * a.x_stride + head * a.head_stride
                residual = a.residual + token * a.residual_stride
                total, out = a.sum + token * size * width, a.out + index * size * width
                squares = add_rows(a.short, x, multiplier, residual, total, size)
                scale = np.float32(1.0 / np.sqrt(np.float64(squares) / size + a.eps))
                given = total if a.residual != 0 else x  # what was rounded is what is normalized
                scale_row(a.short, given, scale, a.weight, offset, out, size)

    return worker


def _gate_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy", fastmath={"contract"})
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _GATE_TYPE)[0]
        size, width = a.size, 2 if a.short else 4
        gate = np.float32(a.scale), np.float32(a.cube), np.float32(a.limit), np.float32(a.added)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for index in range(first, stop):
                gates, out = a.gate_up + index * a.stride, a.out + index * size * width
                gate_row(a.short, gates, gates + size * width, gate, out, size)

    return worker


@njit(fastmath={"contract"}, error_model="numpy")
def _turn_neighbours(row: Any, cos: int, sin: int, num_pairs: int) -> None:
    """Rotate pairs of numbers side by side, in float32 scratch."""
    cosines = carray(pointer(cos), (num_pairs,), np.float32)
    sines = carray(pointer(sin), (num_pairs,), np.float32)
    for i in range(num_pairs):
        x, y = row[2 * i], row[2 * i + 1]
        row[2 * i], row[2 * i + 1] = x * cosines[i] - y * sines[i], y * cosines[i] + x * sines[i]


@njit(error_model="numpy")
def _turn(head: int, cos: int, sin: int, num_pairs: int, interleaved: int, short: int, row: Any, out: int) -> None:
    """Rotate a head's first 2 * num_pairs channels. `out` may be `head`; `row` is scratch."""
    if interleaved:
        load_row(head, 2 * num_pairs, short, row)
        _turn_neighbours(row, cos, sin, num_pairs)
        store_row(row, 2 * num_pairs, short, out)
    else:
        turn_halves(short, head, cos, sin, out, num_pairs)


def _rotate_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _ROTATE_TYPE)[0]
        row = np.empty(2 * a.num_pairs, np.float32)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for token in range(first, stop):
                angle = 4 * token * a.num_pairs
                for index in range(a.num_heads):
                    head = a.heads + token * a.stride + index * a.head_stride
                    _turn(head, a.cos + angle, a.sin + angle, a.num_pairs, a.interleaved, a.short, row, head)

    return worker


def _write_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _WRITE_TYPE)[0]
        num_pairs, width = a.num_pairs, 2 if a.short else 4
        head_bytes, turned_bytes = a.head_dim * width, 2 * num_pairs * width
        row = np.empty(max(2 * num_pairs, a.head_dim), np.float32)
        turned = np.empty(head_bytes, np.uint8)  # a key, on its way into a cache in 8 bits
        slots = carray(pointer(a.slots), (a.num_rows,), np.int64)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                break
            for token in range(first, stop):
                cos, sin = a.cos + 4 * token * num_pairs, a.sin + 4 * token * num_pairs
                for index in range(a.num_heads):
                    head = a.heads + token * a.stride + index * a.head_stride
                    out = a.rotated + (token * a.num_heads + index) * head_bytes
                    _turn(head, cos, sin, num_pairs, a.interleaved, a.short, row, out)
                    copy_bytes(head + turned_bytes, out + turned_bytes, head_bytes - turned_bytes)
                if slots[token] < 0:
                    continue
                for index in range(a.num_kv_heads):
                    key = a.key + token * a.key_stride + index * a.key_head_stride
                    value = a.value + token * a.value_stride + index * a.value_head_stride
                    place = slots[token] * a.num_kv_heads + index
                    target = np.int64(turned.ctypes.data) if a.in_bytes else a.key_cache + place * head_bytes
                    _turn(key, cos, sin, num_pairs, a.interleaved, a.short, row, target)
                    copy_bytes(key + turned_bytes, target + turned_bytes, head_bytes - turned_bytes)
                    if a.in_bytes:
                        place *= a.head_dim
                        key_scale, value_scale = np.float32(a.key_scale), np.float32(a.value_scale)
                        store_float8(target, a.head_dim, a.short, key_scale, row, a.key_cache + place)
                        store_float8(value, a.head_dim, a.short, value_scale, row, a.value_cache + place)
                    else:
                        copy_bytes(value, a.value_cache + place * head_bytes, head_bytes)
        turned[0] = 0  # it lives until here: Numba does not see who has its address

    return worker


_SOURCES = digest_of("call", "claims", "exponential", "float8", "intrinsics", "row_vectors", "rows", "vectors", "walk")
# About what an element takes, in nanoseconds.
_angles = RowFunction(partial(_angles_worker, _SOURCES), _ANGLES, 30.0, is_idempotent=True)
_norm = RowFunction(partial(_norm_worker, _SOURCES), _NORM, 0.25, is_idempotent=True)
_gate = RowFunction(partial(_gate_worker, _SOURCES), _GATE, 0.5, is_idempotent=True, takes="gate_up")
_rotate = RowFunction(partial(_rotate_worker, _SOURCES), _ROTATE, 0.3)
_write = RowFunction(partial(_write_worker, _SOURCES), _WRITE, 0.3, is_idempotent=True)
FUNCTIONS = (_norm, _gate, _rotate, _write, _angles)
