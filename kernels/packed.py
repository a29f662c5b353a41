"""Weights in the few bits per number that a file stores them in: some numbers of a row, side by side, share a scale.

    number = scale * code + least        least: stored, or -8 * scale (codes of 4 bits), or 0 (8 bits, signed)

Numbers come in blocks of 32, in which all or each half of them, a group, share a scale. A row is packed into bytes: its
scales, the least numbers of its groups where they are stored, both float16 or float32, then its codes. Of 4 bits, byte
i of a block holds the code of its number i in the lower half, and that of number 16 + i above.

These are the types of llama.cpp's files in another order (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md),
with the names of those that have such a form; which type becomes which is in `workers/loader/ggml_types.py`. K-quants
store a scale as a product of two numbers of few bits: float32 holds that exactly. The product of a scale and a code is
exact in float32 too, so that a number is rounded once, where one is computed at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # numbers that are multiplied together: must divide a row
_AT_ONCE = 1024  # rows that are unpacked together, to be looked at once
ROWS = 16  # that backends may put in an order of their own


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to pack."""

    name: str
    bits: int  # of a code: 4, or 8
    has_least: bool
    scale_bytes: int = 2  # of a scale, and of a least number: 2 (float16), or 4 (float32)
    num_groups: int = 1  # of a block: 1, or of codes of 8 bits 2

    def num_numbers(self, row_bytes: int) -> int:
        """That a row of so many bytes holds."""
        return row_bytes // self.block_bytes * BLOCK

    def row_bytes(self, num_numbers: int) -> int:
        """What a row of so many numbers, whole blocks, is packed into."""
        return num_numbers // BLOCK * self.block_bytes

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scales and least numbers of packed rows, and their codes: [num_rows, bytes] uint8."""
        num_bytes = rows.shape[1] // self.block_bytes * self.num_scales * self.scale_bytes
        return rows[:, :num_bytes], rows[:, num_bytes:]

    @property
    def block_bytes(self) -> int:
        return BLOCK * self.bits // 8 + self.num_scales * self.scale_bytes

    @property
    def num_kinds(self) -> int:
        """Of what a group has beside its codes: a scale, and perhaps a least number."""
        return 2 if self.has_least else 1

    @property
    def num_scales(self) -> int:
        """And least numbers, of a block."""
        return self.num_kinds * self.num_groups

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scale_bytes == 2 else torch.float32


PACKINGS = {
    packing.name: packing
    for packing in (
        Packing("q4_0", 4, False),
        Packing("q4_1", 4, True),
        Packing("q5_1", 8, True),
        Packing("q8_0", 8, False),
        Packing("q2_k", 8, True, 4, 2),
        Packing("q4_k", 4, True, 4),
        Packing("q5_k", 8, True, 4),
        Packing("q6_k", 8, False, 4, 2),
        Packing("iq4_xs", 8, False, 4),
    )
}


IN_8_BITS = PACKINGS["q8_0"]  # what `pack` gives


def common(packings: Iterable[Packing | None]) -> Packing | None:
    """The smallest that holds the numbers of rows that are packed in any of some ways (`repack`), without rounding;
    None where some are not packed."""
    different = set(packings)
    if len(different) == 1:
        return different.pop()
    some = [packing for packing in different if packing is not None]
    if len(some) < len(different):
        return None
    wide = [packing for packing in some if packing.bits == 8]
    # (Without a least number, a code of 4 bits is a signed one of 8: it is as much less as 8 means.)
    has_least = any(packing.has_least for packing in some) or not wide
    bits, num_groups = 8 if wide else 4, max(packing.num_groups for packing in some)
    fit = (each for each in PACKINGS.values() if (each.bits, each.scale_bytes) == (bits, 4))
    return next(each for each in fit if (each.has_least, each.num_groups) == (has_least, num_groups))


def repack(rows: Tensor, packing: Packing, other: Packing) -> Tensor:
    """Rows in the way that `common` found for theirs and others: the same numbers."""
    if packing == other:
        return rows
    scales, least, codes = _parts_of(rows, packing)
    if packing.bits == 4 and least is None:
        if other.has_least:
            least = -8 * scales
        else:
            codes -= 8
    if other.has_least and least is None:
        least = torch.zeros_like(scales)
    repeats = other.num_groups // packing.num_groups
    scales = scales.repeat_interleave(repeats, dim=1)
    least = None if least is None else least.repeat_interleave(repeats, dim=1)
    return assemble(other, scales, least, codes)


def assemble(packing: Packing, scales: Tensor, least: Tensor | None, codes: Tensor) -> Tensor:
    """Packed rows: [num_rows, row_bytes] uint8.

    Args:
        scales: [num_rows, groups] float, which the packing holds exactly.
        least: likewise, where the packing has some.
        codes: [num_rows, numbers] int8; of 4 bits, 0 to 15.
    """
    parts = [part.to(packing.scale_dtype).view(torch.uint8) for part in (scales, least) if part is not None]
    if packing.bits == 4:
        lower, upper = codes.view(torch.uint8).view(len(codes), -1, 2, BLOCK // 2).unbind(2)
        codes = (lower | upper << 4).flatten(1)
    return torch.cat([*parts, codes.view(torch.uint8)], dim=1)


def panels_of(rows: Tensor, packing: Packing, panel: int) -> tuple[Tensor, Tensor]:
    """Scales [panel, block, which, row, bytes], those of all groups and then least numbers, and codes [panel, row,
    block, bytes] of packed rows."""
    num_blocks, num_panels = rows.shape[1] // packing.block_bytes, len(rows) // panel
    scales, codes = packing.parts(rows)
    shape = (num_panels, panel, packing.num_kinds, num_blocks, packing.num_groups, packing.scale_bytes)
    scales = scales.reshape(shape).permute(0, 3, 2, 4, 1, 5).flatten(2, 3)
    return scales, codes.reshape(num_panels, panel, num_blocks, -1)


def join_blocks(scales: Tensor, codes: Tensor) -> Tensor:
    """[panel, block, bytes] of both, each [panel, block, ...]."""
    return torch.cat([scales.flatten(2), codes.flatten(2)], dim=2)


def unpack(rows: Tensor, packing: Packing) -> Tensor:
    """[num_rows, row_bytes] uint8 -> [num_rows, num_numbers] float32."""
    scales, least, codes = _parts_of(rows, packing)
    scale, numbers = scales[..., None], codes.reshape(*scales.shape, BLOCK // packing.num_groups).float()
    if least is None and packing.bits == 4:
        least = -8 * scales
    numbers *= scale
    return (numbers if least is None else numbers.add_(least[..., None])).flatten(1)


def _parts_of(rows: Tensor, packing: Packing) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `assemble` takes."""
    scales, codes = packing.parts(rows)
    scale, *stored = scales.contiguous().view(packing.scale_dtype).float().chunk(packing.num_kinds, dim=1)
    if packing.bits == 8:
        codes = codes.contiguous().view(torch.int8)
    else:
        pairs = codes.reshape(len(rows), rows.shape[1] // packing.block_bytes, BLOCK // 2)
        codes = torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1).view(torch.int8)
    return scale, stored[0] if stored else None, codes


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
