# mypy: disable-error-code="attr-defined, type-var, call-arg, untyped-decorator, no-untyped-call"
# (compiled functions and their views into memory are not Python to a type checker)
"""Masks, and drawing tokens on CPU, compiled with Numba: a thread takes a row from its logits to its token.

Tokens are told apart by their distance from the likeliest one, (highest - logit) / temperature, which is not negative:
as integers, the bits of such numbers have the order of the numbers, and where a filter cuts is found by bisecting them.
Each half costs a pass over the row, or over what can still be in its nucleus, which is in the cache; sorting a row
would cost ten times all of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from .call import Arguments, RowFunction, enter_rows, take_rows
from .exponential import soften
from .intrinsics import pointer
from .sources import digest_of

if TYPE_CHECKING:
    from ..sampling import Draws

_BLOCK = 256  # tokens that are looked at, or whose weights are summed up, before they are searched
_INFINITY = np.int32(0x7F800000)  # its bits; those of NaN without the sign are above

_DRAW = Arguments("logits", "stride", "vocab", "temperature", "top_k", "top_p", "min_p", "numbers", "out")
_EXCLUDE = Arguments("logits", "stride", "vocab", "indices", "allowed", "num_words")
_LIKELIEST = Arguments("logits", "stride", "vocab", "block", "chosen", "out")
_DRAW_TYPE, _EXCLUDE_TYPE, _LIKELIEST_TYPE = _DRAW.dtype, _EXCLUDE.dtype, _LIKELIEST.dtype


def exclude_tokens(logits: Tensor, indices: Tensor, allowed: Tensor) -> None:
    """See `sampling.exclude_tokens`."""
    (num_rows, num_words), vocab = allowed.shape, logits.shape[1]
    _exclude(
        num_rows, vocab,
        logits.data_ptr(), logits.stride(0) * 4, vocab, indices.data_ptr(), allowed.data_ptr(), num_words,
    )  # fmt: skip


def likeliest_tokens(logits: Tensor) -> Tensor:
    """See `sampling.likeliest_tokens`."""
    return likeliest_of(logits, _BLOCK)


def likeliest_of(logits: Tensor, block: int, chosen: Tensor | None = None) -> Tensor:
    """`likeliest_tokens`, of those blocks of so many tokens that `chosen` [num_blocks] uint8 has a 1 for, some at
    least; the logits of the others are not read."""
    (num_rows, vocab), flags = logits.shape, 0 if chosen is None else chosen.data_ptr()
    out = torch.empty(num_rows, dtype=torch.int64)
    _likeliest(num_rows, vocab, logits.data_ptr(), logits.stride(0) * 4, vocab, block, flags, out.data_ptr())
    return out


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """See `sampling.draw_tokens`."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    _draw(
        num_rows, vocab,
        logits.data_ptr(), logits.stride(0) * 4, vocab, *(values.data_ptr() for values in draws), out.data_ptr(),
    )  # fmt: skip
    return out


@njit(error_model="numpy")
def _in_order(bits: Any) -> Any:
    """From the bits of a float32 an integer that has the order of the numbers, and back."""
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(error_model="numpy")
def highest(bits: Any) -> Any:
    """The highest number of a row of float32, and whether there is NaN. Integers have no exceptions to look for."""
    top, largest = np.int32(-0x80000000), np.int32(0)
    for i in range(len(bits)):
        top = np.int32(max(top, _in_order(bits[i])))
        largest = np.int32(max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF))))
    return np.int32(_in_order(top)).view(np.float32), largest > _INFINITY


@njit(error_model="numpy")
def _first(logits: Any, top: Any, has_nan: bool) -> Any:
    """The first token with the highest logit, or with NaN."""
    for i in range(len(logits)):
        if logits[i] != logits[i] if has_nan else logits[i] == top:
            return i
    return 0


@njit(error_model="numpy")
def _measure(logits: Any, top: Any, temperature: Any, distances: Any, weights: Any) -> None:
    for i in range(len(logits)):
        distances[i] = (top - logits[i]) / temperature
        weights[i] = -distances[i]
    soften(weights.ctypes.data, len(weights), np.float32(0.0))


@njit(error_model="numpy")
def _count(distances: Any, limit: Any) -> Any:
    """How many are no farther than `limit`."""
    count = np.int64(0)
    for i in range(len(distances)):
        count += np.int64(distances[i] <= limit)
    return count


@njit(error_model="numpy", fastmath={"reassoc"})
def _mass(distances: Any, weights: Any, limit: Any) -> Any:
    """The weight of those no farther than `limit`."""
    mass = 0.0
    for i in range(len(distances)):
        mass += np.float64(weights[i] if distances[i] <= limit else np.float32(0.0))
    return mass


@njit(error_model="numpy")
def _from_bits(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@njit(error_model="numpy")
def _farthest_of(distances: Any, k: int) -> Any:
    """A distance within which are the k nearest, those equal to the k-th, and no others."""
    low, high = np.int64(-1), np.int64(_INFINITY)
    while high - low > 1:
        middle = (low + high) // 2
        count = _count(distances, _from_bits(middle))
        if count == k:
            return _from_bits(middle)
        if count < k:
            low = middle
        else:
            high = middle
    return _from_bits(high)


@njit(error_model="numpy")
def _nucleus(distances: Any, weights: Any, limit: Any, top_p: Any, near: Any, their_weights: Any) -> Any:
    """Of what is no farther than `limit`: the nucleus's farthest distance, how many at it belong to it, and how many
    there are.

    `near` and `their_weights` are scratch: what may be in the nucleus. A token with less than (1 - p) / vocab of the
    mass is not in it, for all of these together have no more than 1 - p; nor are they where rounding says otherwise.
    """
    total = _mass(distances, weights, limit)
    wanted, negligible = top_p * total, (1.0 - top_p) / len(distances) * 0.99 * total
    size, mass_above = np.int64(0), 0.0
    for i in range(len(distances)):
        near[size], their_weights[size] = distances[i], weights[i]
        size += np.int64(distances[i] <= limit) & np.int64(weights[i] > negligible)
    near, their_weights = near[:size], their_weights[:size]
    low, high = np.int64(-1), np.int64(_INFINITY)
    while high - low > 1:
        middle = (low + high) // 2
        mass = _mass(near, their_weights, _from_bits(middle))
        if mass < wanted:
            low, mass_above = middle, mass
        else:
            high = middle
    farthest, num_there, weight = _from_bits(high), np.int64(0), np.float64(1.0)
    for i in range(size):
        if near[i] == farthest:
            num_there, weight = num_there + 1, np.float64(their_weights[i])
    if num_there == 0:  # rounding: all of them
        return limit, num_there, num_there
    return farthest, np.int64(max(1.0, np.ceil((wanted - mass_above) / weight))), num_there


@njit(error_model="numpy")
def _drop_ties(distances: Any, farthest: Any, num_kept: int) -> None:
    """Of the tokens at `farthest` only the first ones stay."""
    for i in range(len(distances)):
        if distances[i] == farthest:
            num_kept -= 1
            if num_kept < 0:
                distances[i] = np.float32(np.inf)


@njit(error_model="numpy")
def _pick(distances: Any, weights: Any, farthest: Any, number: Any, sums: Any) -> Any:
    """The token at which the running sum of the weights passes `number` times their sum. `sums` is scratch."""
    total, vocab = 0.0, len(distances)
    for block in range(len(sums)):
        part = slice(block * _BLOCK, min((block + 1) * _BLOCK, vocab))
        sums[block] = _mass(distances[part], weights[part], farthest)
        total += sums[block]
    target, before, last = number * total, 0.0, 0
    for block in range(len(sums)):
        if sums[block] == 0.0:
            continue
        # Rounding may leave the target to nobody: then it is the last who has any weight.
        if before + sums[block] > target or before + sums[block] == total:
            running = before
            for i in range(block * _BLOCK, min((block + 1) * _BLOCK, vocab)):
                if distances[i] <= farthest and weights[i] > 0.0:
                    running += np.float64(weights[i])
                    last = i
                    if running > target:
                        return i
            return last
        before += sums[block]
    return last


@njit(error_model="numpy")
def _search(logits: Any, bits: Any, block: int, chooses: bool, chosen: Any) -> Any:
    """The first token with the highest logit, or with NaN: found by the highest of each block, then within one."""
    best, place = np.float32(-np.inf), -1
    for start in range(0, len(logits), block):
        if chooses and chosen[start // block] == 0:
            continue
        end, place = min(start + block, len(logits)), start if place < 0 else place
        top, has_nan = highest(bits[start:end])
        if has_nan:
            return start + _first(logits[start:end], top, True)
        if top > best:
            best, place = top, start
    return place + _first(logits[place : place + block], best, False)


def _likeliest_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _LIKELIEST_TYPE)[0]
        out = carray(pointer(a.out), (a.num_rows,), np.int64)
        chosen = carray(pointer(a.chosen), ((a.vocab + a.block - 1) // a.block,), np.uint8)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                place = pointer(a.logits + row * a.stride)
                logits, bits = carray(place, (a.vocab,), np.float32), carray(place, (a.vocab,), np.int32)
                out[row] = _search(logits, bits, a.block, a.chosen != 0, chosen)

    return worker


def _draw_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _DRAW_TYPE)[0]
        vocab, num_rows = a.vocab, a.num_rows
        temperature = carray(pointer(a.temperature), (num_rows,), np.float32)
        top_k = carray(pointer(a.top_k), (num_rows,), np.int32)
        top_p = carray(pointer(a.top_p), (num_rows,), np.float32)
        min_p = carray(pointer(a.min_p), (num_rows,), np.float32)
        numbers = carray(pointer(a.numbers), (num_rows,), np.float64)
        out = carray(pointer(a.out), (num_rows,), np.int64)
        distances, weights = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
        near, their_weights = np.empty(vocab + 1, np.float32), np.empty(vocab + 1, np.float32)
        sums = np.empty((vocab + _BLOCK - 1) // _BLOCK, np.float64)
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                logits = carray(pointer(a.logits + row * a.stride), (vocab,), np.float32)
                top, has_nan = highest(carray(pointer(a.logits + row * a.stride), (vocab,), np.int32))
                if temperature[row] == 0.0 or has_nan or np.isinf(top):
                    out[row] = _first(logits, top, has_nan)
                    continue
                _measure(logits, top, temperature[row], distances, weights)
                farthest = np.float32(np.inf)
                if 0 < top_k[row] < vocab:
                    farthest = _farthest_of(distances, top_k[row])
                if top_p[row] < 1.0:
                    farthest, num_in, num_there = _nucleus(
                        distances, weights, farthest, np.float64(top_p[row]), near, their_weights
                    )
                    if num_in < num_there:
                        _drop_ties(distances, farthest, num_in)
                if min_p[row] > 0.0:
                    farthest = min(farthest, max(-np.log(min_p[row]), np.float32(0.0)))
                out[row] = _pick(distances, weights, farthest, numbers[row], sums)

    return worker


def _exclude_worker(sources: str) -> Any:
    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def worker(address: int) -> None:
        sources  # noqa: B018 (a constant of the function, so that the cache on disk tells versions apart)
        a = carray(pointer(address), (1,), _EXCLUDE_TYPE)[0]
        indices = carray(pointer(a.indices), (a.num_rows,), np.int64)
        num_whole = min(a.num_words, a.vocab // 32)  # words all of whose tokens there are
        thread, item, lap = enter_rows(address), -1, 0
        while True:
            item, lap, first, stop = take_rows(address, thread, item, lap)
            if item < 0:
                return
            for row in range(first, stop):
                logits = carray(pointer(a.logits + indices[row] * a.stride), (a.vocab,), np.float32)
                allowed = carray(pointer(a.allowed + row * a.num_words * 4), (a.num_words,), np.int32)
                for word in range(num_whole):
                    bits = allowed[word]
                    for i in range(32):
                        if not (bits >> np.int32(i)) & np.int32(1):
                            logits[word * 32 + i] = -np.float32(np.inf)
                for token in range(num_whole * 32, a.vocab):
                    if token // 32 >= a.num_words or not (allowed[token // 32] >> np.int32(token % 32)) & np.int32(1):
                        logits[token] = -np.float32(np.inf)

    return worker


_SOURCES = digest_of("call", "claims", "exponential", "walk", "intrinsics", "vectors")
_exclude = RowFunction(partial(_exclude_worker, _SOURCES), _EXCLUDE, 0.3)
_likeliest = RowFunction(partial(_likeliest_worker, _SOURCES), _LIKELIEST, 0.15, is_idempotent=True)
_draw = RowFunction(partial(_draw_worker, _SOURCES), _DRAW, 2.0, is_idempotent=True)
FUNCTIONS = (_exclude, _likeliest, _draw)
