"""Which panels of a packed weight a product fetches while it multiplies others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from numba import njit, types
from numba.extending import intrinsic

from quire.kernels.cpu.code_words import _AHEAD_IN_IT, _LONG_PANEL, WIDTH, ahead_of
from quire.kernels.cpu.tile_product import TILE
from quire.kernels.packed import BLOCK, PACKINGS


@intrinsic(prefer_literal=True)
def compiled_ahead_of(typing_context: Any, packing: Any, panel_step: Any, num_blocks: Any, k: Any) -> Any:
    kind = PACKINGS[packing.literal_value]
    return types.int64(packing, panel_step, num_blocks, k), lambda _c, b, _s, given: ahead_of(b, kind, *given[1:])


@njit
def ahead_of_q4_1(panel_step: int, num_blocks: int, k: int) -> int:
    return compiled_ahead_of("q4_1", panel_step, num_blocks, k)


@njit
def ahead_of_q4_k(panel_step: int, num_blocks: int, k: int) -> int:
    return compiled_ahead_of("q4_k", panel_step, num_blocks, k)


@njit
def ahead_of_q8_0(panel_step: int, num_blocks: int, k: int) -> int:
    return compiled_ahead_of("q8_0", panel_step, num_blocks, k)


AHEAD = {"q4_1": ahead_of_q4_1, "q4_k": ahead_of_q4_k, "q8_0": ahead_of_q8_0}
SHORT = [("q4_1", 32), ("q4_1", 576), ("q4_1", 1536), ("q4_k", 256), ("q4_k", 1536), ("q8_0", 32), ("q8_0", 960)]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("packing", "in_features"), SHORT)
def test_the_same_block_of_panels_that_come_later(packing: str, in_features: int, is_gated: bool) -> None:
    """So that each is fetched once, and none of the panel beside it, which is multiplied just then. (With 1,536 numbers
    a row that was half of what was fetched.)"""
    num_blocks = in_features // BLOCK
    block = PACKINGS[packing].panel_block_bytes(TILE)
    panel, num_panels = num_blocks * block, 64
    panel_step = num_panels * panel if is_gated else panel
    pair_bytes = panel if is_gated else WIDTH * panel  # from a pair to the next
    assert panel <= _LONG_PANEL
    (ahead,) = {AHEAD[packing](panel_step, num_blocks, k) for k in range(num_blocks)}
    assert ahead % pair_bytes == 0
    num_pairs = ahead // pair_bytes
    assert num_pairs >= 1
    assert ahead >= 8192 > (num_pairs - 1) * pair_bytes  # no further than the memory's answer takes

    count = num_panels if is_gated else num_panels // WIDTH
    at = {
        pair * pair_bytes + j * panel_step + k * block: (pair, j, k)
        for pair in range(count)
        for j in range(WIDTH)
        for k in range(num_blocks)
    }
    for place, (pair, j, k) in at.items():
        if pair + num_pairs < count:
            assert at[place + ahead] == (pair + num_pairs, j, k)


@pytest.mark.parametrize("packing", AHEAD)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("in_features", [2048, 14336])
def test_of_long_panels_what_comes_a_little_later(packing: str, in_features: int, is_gated: bool) -> None:
    """At their end the beginning of the panel that takes their place, and not of the other of a pair, which is read
    just then."""
    num_blocks, block = in_features // BLOCK, PACKINGS[packing].panel_block_bytes(TILE)
    panel, num_panels = num_blocks * block, 64
    assert panel > _LONG_PANEL
    panel_step = num_panels * panel if is_gated else panel
    pair_bytes = panel if is_gated else WIDTH * panel
    for pair, j, k in itertools.product((0, 5), range(WIDTH), range(num_blocks)):
        first = pair * pair_bytes + j * panel_step
        later, behind = divmod(k * block + _AHEAD_IN_IT.constant, panel)
        place = first + k * block + AHEAD[packing](panel_step, num_blocks, k)
        assert place == first + later * pair_bytes + behind
