# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Masks, and drawing tokens: one program takes a row from its logits to its token.

A token's distance from the likeliest one, (highest - logit) / temperature, is not negative; as integers, the bits of
such numbers have the order of the numbers. Where a filter cuts is found by bisecting them: a pass over the row each,
which stays in the second-level cache, until only one token, or tokens at one distance, are left between the bounds,
which are moved to where tokens are (logits of bfloat16 have few distances). Nothing is sorted, and nothing is read back
from the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from ..sampling import Draws

_BLOCK = 4096
_DRAW_BLOCK, _DRAW_WARPS = 8192, 32  # all registers of a multiprocessor, and none spilled

INFINITY = tl.constexpr(0x7F800000)  # its bits


@triton.jit
def _exclude_kernel(
    logits,  # [n, vocab], written
    indices,  # [m]
    allowed,  # [m, num_words]
    stride,
    vocab,
    num_words,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(allowed + row * num_words + token // 32, mask=token // 32 < num_words, other=0)
    place = logits + tl.load(indices + row) * stride + token
    tl.store(place, -float("inf"), mask=(token < vocab) & ((word >> (token % 32)) & 1 == 0))


@triton.jit
def _distances(logits, token, vocab, highest, temperature):
    """Infinite behind the end of the row."""
    logit = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
    return (highest - logit) / temperature


@triton.jit
def _weights(distance):
    """As float32; nothing from 87 on, where they would be 2e-38."""
    return tl.where(distance < 87.0, tl.exp(-distance), 0.0)


@triton.jit
def _within(logits, vocab, highest, temperature, limit, BLOCK: tl.constexpr):
    """How many tokens are no farther than `limit`, and their weight: of every BLOCKth in float32, of all in float64.
    Then the farthest distance among them, and the nearest beyond, infinite where there is none."""
    farthest = tl.zeros((BLOCK,), tl.float32)
    nearest = tl.full((BLOCK,), float("inf"), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):  # nothing is added up over a tile here, which all its threads would wait for
        token = start + tl.arange(0, BLOCK)
        distance = _distances(logits, token, vocab, highest, temperature)
        kept = (distance <= limit) & (token < vocab)
        count += kept.to(tl.int32)
        mass += tl.where(kept, _weights(distance), 0.0)
        farthest = tl.where(kept, tl.maximum(farthest, distance), farthest)
        nearest = tl.where(distance > limit, tl.minimum(nearest, distance), nearest)
    all_mass = tl.sum(mass.to(tl.float64), axis=0)
    return tl.sum(count, axis=0), all_mass, tl.max(farthest, axis=0), tl.min(nearest, axis=0)


@triton.jit
def _kept_weights(logits, token, vocab, highest, temperature, farthest, ties_left):
    """The weights of a tile of tokens, 0 where a filter excludes one, and how many are left of those at `farthest`."""
    distance = _distances(logits, token, vocab, highest, temperature)
    weights = tl.where((distance <= farthest) & (token < vocab), _weights(distance), 0.0)
    if ties_left < vocab:
        at_border = ((distance == farthest) & (token < vocab)).to(tl.int32)
        is_beyond = (at_border > 0) & (tl.cumsum(at_border, axis=0) > ties_left)
        weights = tl.where(is_beyond, 0.0, weights)
        ties_left = tl.maximum(ties_left - tl.sum(at_border, axis=0), 0)
    return weights, ties_left


@triton.jit
def _highest(logits, vocab, BLOCK: tl.constexpr):
    """The highest logit of a row but for NaN, the first token that has it, and the first NaN, or `vocab`."""
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)  # of every BLOCKth token
    places = tl.arange(0, BLOCK)
    nans = tl.zeros((BLOCK,), tl.int32) + vocab
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + token, mask=token < vocab, other=-float("inf"))
        nans = tl.where(logit != logit, tl.minimum(nans, token), nans)
        places = tl.where(logit > tops, token, places)
        tops = tl.where(logit > tops, logit, tops)
    highest = tl.max(tops, axis=0)
    return highest, tl.min(tl.where(tops == highest, places, vocab), axis=0), tl.min(nans, axis=0)


@triton.jit
def _narrowed(
    logits,
    vocab,
    highest,
    temperature,
    high,  # the bits of a distance
    count,  # of the tokens within it, and their mass
    mass,
    wanted,  # float64: so many tokens, or so much mass
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least distance within which there is what is wanted, its count and mass, and those of what is nearer.

    Or what was given, where that has no more than is wanted. Where tokens are left between it and what is nearer, they
    are all at this distance, unless there is just what is wanted.
    """
    low = tl.full((), -1, tl.int32)
    count_below = 0
    mass_below = tl.zeros((), tl.float64)
    found = mass if BY_MASS else count.to(tl.float64)
    while (found > wanted) & (count - count_below > 1) & (high - low > 1):
        middle = low + (high - low) // 2
        limit = middle.to(tl.float32, bitcast=True)
        inner_count, inner_mass, farthest, nearest = _within(logits, vocab, highest, temperature, limit, BLOCK)
        inner = inner_mass if BY_MASS else inner_count.to(tl.float64)
        is_enough = inner >= wanted
        high = tl.where(is_enough, farthest.to(tl.int32, bitcast=True), high)
        low = tl.where(is_enough, low, nearest.to(tl.int32, bitcast=True) - 1)
        found = tl.where(is_enough, inner, found)
        count = tl.where(is_enough, inner_count, count)
        mass = tl.where(is_enough, inner_mass, mass)
        count_below = tl.where(is_enough, count_below, inner_count)
        mass_below = tl.where(is_enough, mass_below, inner_mass)
    return high, count, mass, count_below, mass_below


@triton.jit
def _border(logits, vocab, highest, temperature, k, p, least, BLOCK: tl.constexpr):
    """What the filters leave of a row: the farthest distance, and how many of the tokens at it, the first ones."""
    high = tl.full((), INFINITY, tl.int32)
    count = vocab
    mass = tl.zeros((), tl.float64)
    if ((k > 0) & (k < vocab)) | (p < 1.0):
        count, mass, _, _ = _within(logits, vocab, highest, temperature, float("inf"), BLOCK)
    if (k > 0) & (k < vocab):
        wanted = k.to(tl.float64)
        high, count, mass, _, _ = _narrowed(
            logits, vocab, highest, temperature, high, count, mass, wanted, False, BLOCK
        )
    ties = vocab
    if p < 1.0:
        wanted = p.to(tl.float64) * mass
        high, count, mass, count_below, mass_below = _narrowed(
            logits, vocab, highest, temperature, high, count, mass, wanted, True, BLOCK
        )
        if (mass > wanted) & (count - count_below > 1):
            weight = _weights(high.to(tl.float32, bitcast=True)).to(tl.float64)
            ties = tl.maximum(tl.ceil((wanted - mass_below) / weight).to(tl.int32), 1)
    farthest = high.to(tl.float32, bitcast=True)
    if least > 0.0:
        nearer = tl.maximum(0.0 - tl.log(least), 0.0)
        ties = tl.where(nearer < farthest, vocab, ties)
        farthest = tl.minimum(farthest, nearer)
    return farthest, ties


@triton.jit
def _picked(logits, vocab, highest, temperature, farthest, ties, number, BLOCK: tl.constexpr):
    """The token at which the running sum of the kept weights passes `number` times their sum."""
    totals = tl.zeros((BLOCK,), tl.float32)
    ties_left = ties
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        weights, ties_left = _kept_weights(logits, token, vocab, highest, temperature, farthest, ties_left)
        totals += weights

    target = number * tl.sum(totals.to(tl.float64), axis=0)
    before = tl.zeros((), tl.float64)
    ties_left = ties
    picked = vocab
    last = tl.zeros((BLOCK,), tl.int32)  # with any weight: rounding may leave the target to nobody
    start = 0
    while (start < vocab) & (picked == vocab):
        token = start + tl.arange(0, BLOCK)
        weights, ties_left = _kept_weights(logits, token, vocab, highest, temperature, farthest, ties_left)
        mass = tl.sum(weights.to(tl.float64), axis=0)
        if before + mass > target:
            sums = before + tl.cumsum(weights.to(tl.float64), axis=0)
            picked = tl.min(tl.where((sums > target) & (weights > 0.0), token, vocab), axis=0)
        last = tl.where(weights > 0.0, token, last)
        before += mass
        start += BLOCK
    return tl.where(picked == vocab, tl.max(last, axis=0), picked)


@triton.jit
def _draw_kernel(
    logits,  # [n, vocab]
    temperatures,  # [n], and so are all below
    top_k,
    top_p,
    min_p,
    numbers,
    out,
    stride,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, first, first_nan = _highest(logits, vocab, BLOCK)
    drawn = tl.where(first_nan < vocab, first_nan, first)
    temperature = tl.load(temperatures + row)
    if (temperature > 0.0) & (first_nan == vocab) & (tl.abs(highest) < float("inf")):
        k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        farthest, ties = _border(logits, vocab, highest, temperature, k, p, least, BLOCK)
        number = tl.load(numbers + row)
        drawn = _picked(logits, vocab, highest, temperature, farthest, ties, number, BLOCK)
    tl.store(out + row, drawn.to(tl.int64))


def exclude_tokens(logits: Tensor, indices: Tensor, allowed: Tensor) -> None:
    """See `sampling.exclude_tokens`."""
    (num_rows, num_words), vocab = allowed.shape, logits.shape[1]
    if num_rows:
        grid = (num_rows, cdiv(vocab, _BLOCK))
        _exclude_kernel[grid](logits, indices, allowed, logits.stride(0), vocab, num_words, BLOCK=_BLOCK)


def likeliest_tokens(logits: Tensor) -> Tensor:
    """See `sampling.likeliest_tokens`."""
    return logits.argmax(dim=-1)


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """See `sampling.draw_tokens`."""
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        block = min(_DRAW_BLOCK, next_power_of_2(vocab))
        _draw_kernel[(num_rows,)](logits, *draws, out, logits.stride(0), vocab, BLOCK=block, num_warps=_DRAW_WARPS)
    return out
