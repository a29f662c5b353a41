"""Weights in the few bits per number that a file stores them in: blocks of 32 numbers of a row share a scale.

    number = scale * code + least        least: stored, or -8 * scale (codes of 4 bits), or 0 (8 bits, signed)

A row is packed into bytes: its scales, the least numbers of its blocks where they are stored, both float16, then its
codes. Of 4 bits, byte i of a block holds the code of its number i in the lower half, and that of number 16 + i above.

These are llama.cpp's Q4_0, Q4_1 and Q8_0 in another order (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
The product of a float16 and a code is exact in float32, so that a number is rounded once, where one is computed at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale: must divide a row
_AT_ONCE = 1024  # rows that are unpacked together, to be looked at once
ROWS = 16  # that backends may put in an order of their own


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to pack."""

    name: str
    bits: int  # of a code: 4, or 8
    has_least: bool

    def num_numbers(self, row_bytes: int) -> int:
        """That a row of so many bytes holds."""
        return row_bytes // self.block_bytes * BLOCK

    def row_bytes(self, num_numbers: int) -> int:
        """What a row of so many numbers, whole blocks, is packed into."""
        return num_numbers // BLOCK * self.block_bytes

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of float16 of packed rows, and their codes: [num_rows, bytes] uint8."""
        num_bytes = rows.shape[1] // self.block_bytes * self.num_halves * 2
        return rows[:, :num_bytes], rows[:, num_bytes:]

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bits // 8 + self.num_halves * 2

    @property
    def num_halves(self) -> int:
        """Of float16, that a block has beside its codes."""
        return 2 if self.has_least else 1


PACKINGS = {
    packing.name: packing
    for packing in (Packing("q4_0", 4, False), Packing("q4_1", 4, True), Packing("q8_0", 8, False))
}


IN_8_BITS = PACKINGS["q8_0"]  # what `pack` gives


def panels_of(rows: Tensor, packing: Packing, panel: int) -> tuple[Tensor, Tensor]:
    """Halves [panel, block, which, row, 2 bytes] and codes [panel, row, block, bytes] of packed rows."""
    num_blocks, num_panels = rows.shape[1] // packing.block_bytes, len(rows) // panel
    halves, codes = packing.parts(rows)
    halves = halves.reshape(num_panels, panel, packing.num_halves, num_blocks, 2).permute(0, 3, 2, 1, 4)
    return halves, codes.reshape(num_panels, panel, num_blocks, -1)


def join_blocks(halves: Tensor, codes: Tensor) -> Tensor:
    """[panel, block, bytes] of both, each [panel, block, ...]."""
    return torch.cat([halves.flatten(2), codes.flatten(2)], dim=2)


def unpack(rows: Tensor, packing: Packing) -> Tensor:
    """[num_rows, row_bytes] uint8 -> [num_rows, num_numbers] float32."""
    num_rows, num_blocks = len(rows), rows.shape[1] // packing.block_bytes
    halves, codes = packing.parts(rows)
    scales, *stored = (
        halves.contiguous().view(torch.float16).float().view(num_rows, packing.num_halves, num_blocks, 1).unbind(1)
    )
    if packing.bits == 8:
        numbers = codes.contiguous().view(torch.int8).view(num_rows, num_blocks, BLOCK).float() * scales
    else:
        pairs, least = codes.reshape(num_rows, num_blocks, BLOCK // 2), stored[0] if stored else -8 * scales
        numbers = torch.cat([pairs & 15, pairs >> 4], dim=2).float() * scales + least
    return numbers.view(num_rows, num_blocks * BLOCK)


def pack(numbers: Tensor) -> Tensor:
    """[num_rows, whole blocks] float -> rows packed as `IN_8_BITS`, [num_rows, row_bytes] uint8. Each number is off by
    at most half of its block's scale, the least float16 that is no less than 1/127 of the block's largest number.

    Raises `ValueError` where there is none.
    """
    blocks = numbers.float().reshape(len(numbers), -1, BLOCK)
    least = blocks.abs().amax(dim=2) / 127
    scales = least.half()
    bits = scales.view(torch.int16)
    bits += scales.float() < least  # the next one: they are not negative
    if scales.isinf().any():
        raise ValueError(f"a number of {blocks.abs().amax():g} is too large to be packed in 8 bits")
    codes = (blocks / scales.float().clamp_min(2.0**-24)[..., None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.flatten(1).view(torch.uint8)], dim=1)


def lengths(rows: Tensor, packing: Packing) -> Tensor:
    """The Euclidean lengths of packed rows, and those of what rounding to bfloat16 takes from them: [2, num_rows]
    float32."""
    found = []
    for start in range(0, len(rows), _AT_ONCE):
        numbers = unpack(rows[start : start + _AT_ONCE], packing)
        lost = numbers - numbers.bfloat16().float()
        found.append(torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (numbers, lost)]))
    return torch.cat(found, dim=1)
