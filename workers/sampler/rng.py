"""The only randomness of Quire: a counter-based uniform number per (seed, choice, position, draw).

Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It has no state,
so a token is the same in any batch, after a preemption, and on another machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]  # each holds 32 bits: products of two words must not overflow


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds on arrays of 32-bit words held in uint64, elementwise. Returns the four words of each block."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_:
            k0 = (k0 + _WEYL[0]) & _LOW
            k1 = (k1 + _WEYL[1]) & _LOW
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW, (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
    return c0, c1, c2, c3


def uniform(
    seeds: npt.NDArray[np.uint64],
    choice_indices: npt.NDArray[np.integer],
    positions: npt.NDArray[np.integer],
    draw: int,
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row; all arguments are [n], the result is [n] float64.

    `positions` counts tokens from the start of the prompt; `draw` tells apart several numbers at one position.
    The key is the seed; the counter is (position, choice_index, draw, 0), all below 2 ** 32.
    """
    position = positions.astype(np.uint64) & _LOW
    choice = choice_indices.astype(np.uint64) & _LOW
    counter = (position, choice, np.full_like(position, draw), np.zeros_like(position))
    high, low, _, _ = philox4x32(counter, (seeds & _LOW, seeds >> _WORD))
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
