"""Weights in the few bits per number that a file stores them in: some numbers of a row, side by side, share a scale.

    number = scale * code + least        least: stored, or that 8 is nothing (codes of 4 bits), or 32 (6 bits), or 0
                                         (8 bits, signed)
    number = scale * table[code]         codes of 4 bits that stand for whole numbers of 8 bits

Numbers come in blocks of 32, in which all or each half of them, a group, share a scale. A scale and a least number are
float16; or nested, as in llama.cpp's K-quants: a whole number of 8 bits times a float16 of 256 numbers, or of fewer.

A row is packed into bytes: its scales' float16, those of its least numbers where these are stored; if nested the whole
numbers of either, group by group; then its codes, block by block:

    4 bits    byte i holds the code of number i in its lower half, and above it that of number `fold` + i, which is in
              the same group: 16 bytes for 32 numbers of one, or 8 for either half of them
    6 bits    12 bytes for either half: byte i holds the code of number i, and above it two bits of that of number
              12 + i % 4, of which bytes 0 to 3 have the lowest
    8 bits    a byte each

These are the types of llama.cpp's files in another order (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md),
what matrices of several types have in common, and codes of 4 bits of which any one may mean nothing: the least number
is then so many times less one scale, nested. Which type becomes which is in `workers/loader/ggml_types.py`, and
`quantized.py` beside it. Of all of them, scales and their products with codes are exact in float32, so that a number is
rounded once, where one is computed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32  # numbers that are multiplied together
_AT_ONCE = 1024  # rows that are unpacked together, to be looked at once
ROWS = 16  # that backends may put in an order of their own


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to pack."""

    name: str
    bits: int  # of a code: 4, 6 or 8
    has_least: bool
    is_nested: bool = False
    num_groups: int = 1  # of a block: 1 or 2
    num_blocks: int = 8  # that share the float16 of nested scales
    table: tuple[int, ...] = ()  # whole numbers that codes stand for, where it is not themselves

    @property
    def unit(self) -> int:
        """Numbers that must divide a row."""
        return BLOCK * self.num_blocks if self.is_nested else BLOCK

    def num_numbers(self, row_bytes: int) -> int:
        """That a row of so many bytes holds."""
        return row_bytes // self._unit_bytes * self.unit

    def row_bytes(self, num_numbers: int) -> int:
        """What a row of so many numbers, whole units, is packed into."""
        return num_numbers // self.unit * self._unit_bytes

    def panel_block_bytes(self, num_rows: int) -> int:
        """What a block of a panel of so many rows takes, with its share of what blocks have together."""
        whole, rest = divmod(num_rows * self._unit_bytes * BLOCK, self.unit)
        assert rest == 0, f"a block of {num_rows} rows of {self.name} has no whole number of bytes"
        return whole

    @property
    def bits_per_number(self) -> float:
        """With its share of scales."""
        return 8 * self._unit_bytes / self.unit

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The float16 of packed rows, what is nested in them, and their codes: [num_rows, bytes] uint8."""
        num_units = rows.shape[1] // self._unit_bytes
        num_bytes = 2 * self.num_kinds * num_units
        num_nested = self.num_nested * num_units * self.unit // BLOCK
        halves, nested, codes = rows.tensor_split((num_bytes, num_bytes + num_nested), dim=1)
        return halves, nested, codes

    @property
    def num_kinds(self) -> int:
        """Of what a group has beside its codes: a scale, and perhaps a least number."""
        return 2 if self.has_least else 1

    @property
    def num_nested(self) -> int:
        """Whole numbers, of a byte each, that a block has beside its codes."""
        return self.num_kinds * self.num_groups if self.is_nested else 0

    @property
    def zero(self) -> int:
        """The code that means nothing where no least number is stored; 0 where a table says what codes are."""
        return 0 if self.bits == 8 or self.table else 1 << (self.bits - 1)

    @property
    def value_bits(self) -> int:
        """Of the whole number that a code is."""
        return 8 if self.table else self.bits

    @property
    def fold(self) -> int:
        """Numbers from one to that whose code is in the upper half of its byte, where codes have 4 bits."""
        return BLOCK // 2 // self.num_groups

    @property
    def code_bytes(self) -> int:
        """Of a block."""
        return BLOCK * self.bits // 8

    @property
    def _unit_bytes(self) -> int:
        return 2 * self.num_kinds + (self.code_bytes + self.num_nested) * (self.unit // BLOCK)


# Of IQ4, and twice the numbers of MXFP4.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# By name: that of a type that has this form, perhaps in fewer bits; or, of what several types have in common alone, the
# bits of a code, 1 where least numbers are stored, and how many numbers share a scale; z: codes that mean nothing.
PACKINGS = {
    packing.name: packing
    for packing in (
        Packing("q4_0", 4, False),
        Packing("q4_1", 4, True),
        Packing("q5_0", 6, False),
        Packing("q5_1", 6, True),
        Packing("q8_0", 8, False),
        Packing("8_1_32", 8, True),
        Packing("q2_k", 4, True, is_nested=True, num_groups=2),
        Packing("q3_k", 4, False, is_nested=True, num_groups=2),
        Packing("q4_k", 4, True, is_nested=True),
        Packing("q5_k", 6, True, is_nested=True),
        Packing("q6_k", 6, False, is_nested=True, num_groups=2),
        Packing("iq4_nl", 4, False, table=_IQ4),
        Packing("iq4_xs", 4, False, is_nested=True, table=_IQ4),
        Packing("mxfp4", 4, False, table=_MXFP4),
        Packing("k6_1_16", 6, True, is_nested=True, num_groups=2),
        Packing("k8_0_16", 8, False, is_nested=True, num_groups=2),
        Packing("k8_0_32", 8, False, is_nested=True),
        Packing("k8_1_16", 8, True, is_nested=True, num_groups=2),
        Packing("k8_1_32", 8, True, is_nested=True),
        Packing("z4_128", 4, True, is_nested=True, num_blocks=4),
        Packing("z4_32", 4, True, is_nested=True, num_blocks=1),
    )
}


IN_8_BITS = PACKINGS["q8_0"]  # what `pack` gives


def common(packings: Iterable[Packing | None]) -> Packing | None:
    """What holds the numbers of rows that are packed in any of some ways (`repack`), without rounding, in the fewest
    bits, unless scales are larger than any model's. None where there is none, or some are not packed."""
    different = set(packings)
    if len(different) == 1:
        return different.pop()
    some = [packing for packing in different if packing is not None]
    if len(some) < len(different) or len({(packing.is_nested, packing.unit) for packing in some}) > 1:
        return None
    return _plain(
        max(packing.value_bits for packing in some),
        any(packing.has_least for packing in some),
        max(packing.num_groups for packing in some),
        some[0],
    )


def without_table(packing: Packing) -> Packing:
    """What holds the same numbers, for kernels that look nothing up."""
    if not packing.table:
        return packing
    found = _plain(packing.value_bits, packing.has_least, packing.num_groups, packing)
    assert found is not None
    return found


def _plain(bits: int, has_least: bool, num_groups: int, like: Packing) -> Packing | None:
    """The one without a table that has this form, and scales as another has them."""
    for each in PACKINGS.values():
        form = each.bits, each.has_least, each.num_groups, each.is_nested, each.unit
        if form == (bits, has_least, num_groups, like.is_nested, like.unit) and not each.table:
            return each
    return None


class Parts(NamedTuple):
    """Of packed rows."""

    scales: Tensor  # [num_rows, groups, or units where they are nested] float16
    least: Tensor | None  # likewise, where least numbers are stored
    nested: tuple[Tensor, ...]  # what scales, and least numbers, are multiplied by: [num_rows, groups] int8
    codes: Tensor  # [num_rows, numbers] int8; of 4 and 6 bits, from 0 on


def assemble(packing: Packing, parts: Parts) -> Tensor:
    """[num_rows, row_bytes] uint8."""
    num_rows, given = len(parts.codes), (parts.scales, parts.least)
    flat = [part.flatten().contiguous() for part in given if part is not None]
    codes = _joined(parts.codes.view(torch.uint8).reshape(num_rows, -1, BLOCK), packing).flatten(1)
    halves = [part.view(torch.uint8).view(num_rows, -1) for part in flat]
    return torch.cat([*halves, *(part.view(torch.uint8) for part in parts.nested), codes], dim=1)


def take_apart(rows: Tensor, packing: Packing) -> Parts:
    """What `assemble` took."""
    halves, nested, codes = packing.parts(rows)
    scales, *least = halves.contiguous().view(torch.float16).chunk(packing.num_kinds, dim=1)
    whole = nested.contiguous().view(torch.int8).chunk(packing.num_kinds, dim=1) if packing.is_nested else ()
    blocks = codes.reshape(len(rows), codes.shape[1] // packing.code_bytes, packing.code_bytes)
    codes = codes_of(blocks, packing).flatten(1).view(torch.int8)
    return Parts(scales, least[0] if least else None, tuple(whole), codes)


def codes_of(blocks: Tensor, packing: Packing) -> Tensor:
    """Of blocks' bytes, [..., code_bytes] uint8, the codes: [..., BLOCK] uint8."""
    if packing.bits == 8:
        return blocks
    if packing.bits == 6:
        threes = blocks.reshape(*blocks.shape[:-1], 2, 3, 4)
        last = in_bytes((threes >> 6).unbind(-2), 2)
        return torch.cat([threes & 63, last[..., None, :]], dim=-2).flatten(-3)
    folded = blocks.reshape(*blocks.shape[:-1], packing.num_groups, packing.fold)
    return torch.cat([folded & 15, folded >> 4], dim=-1).flatten(-2)


def _joined(codes: Tensor, packing: Packing) -> Tensor:
    """What `codes_of` took apart."""
    if packing.bits == 8:
        return codes
    if packing.bits == 6:
        fours = codes.view(*codes.shape[:-1], 2, 4, 4)
        shifts = torch.arange(0, 6, 2, dtype=torch.uint8)[:, None]
        return (fours[..., :3, :] | (fours[..., 3:, :] >> shifts) << 6).flatten(-3)
    lower, upper = codes.view(*codes.shape[:-1], packing.num_groups, 2, packing.fold).unbind(-2)
    return (lower | upper << 4).flatten(-2)


def in_bytes(fields: Sequence[Tensor], bits: int) -> Tensor:
    """Of some numbers of so few bits, uint8, one behind the other in a byte, the first one lowest."""
    joined = fields[0].clone()
    for i, field in enumerate(fields[1:], 1):
        joined |= field << bits * i
    return joined


def repack(rows: Tensor, packing: Packing, other: Packing) -> Tensor:
    """Rows in the way that `common` found for theirs and others: the same numbers. Raises `ValueError` where a least
    number has to be stored that is no float16: with scales from 2048 on, or 8192 of codes of 4 bits."""
    if packing == other:
        return rows
    scales, least, nested, codes = take_apart(rows, packing)
    codes = _values(codes, packing)
    if not packing.has_least and (other.bits == 8 or not other.has_least):
        codes = codes + (other.zero - packing.zero)
    if other.has_least and least is None:
        least = torch.zeros_like(scales) if other.bits == 8 else -packing.zero * scales
        if (too_large := scales[least.isinf() & scales.isfinite()].abs()).numel() > 0:
            raise ValueError(
                f"scales of up to {too_large.amax():g}, which are too large for least numbers as {other.name} has them"
            )
        nested = (*nested, *nested)
    repeats = other.num_groups // packing.num_groups
    nested = tuple(part.repeat_interleave(repeats, dim=1) for part in nested)
    return assemble(other, Parts(scales, least, nested, codes))


def _values(codes: Tensor, packing: Packing) -> Tensor:
    """The whole numbers that codes are, int8."""
    if not packing.table:
        return codes
    table = torch.tensor(packing.table, dtype=torch.int8, device=codes.device)
    return table.index_select(0, codes.flatten().long()).view(codes.shape)


def lay_panels(rows: Tensor, packing: Packing, panel: int, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Packed rows, whole panels of so many, as as many bytes: panel by panel; in a panel block by block, scales, least
    numbers and codes, of either first the float16 or whole numbers of all rows. Nested ones have the float16 that
    blocks share before the first of them.

    `order`: of codes [panel, row, block, bytes], what a kernel reads: [panel, block, ...].
    """
    num_panels, (halves, nested, codes) = len(rows) // panel, packing.parts(rows)
    num_units = packing.num_numbers(rows.shape[1]) // packing.unit
    per_unit = packing.unit // BLOCK
    shared = halves.reshape(num_panels, panel, packing.num_kinds, num_units, 2).permute(0, 3, 2, 1, 4).flatten(2)
    laid = [order(codes.reshape(num_panels, panel, num_units * per_unit, -1)).flatten(2)]
    if packing.is_nested:
        shape = (num_panels, panel, packing.num_kinds, num_units * per_unit, packing.num_groups)
        laid.insert(0, nested.reshape(shape).permute(0, 3, 2, 4, 1).flatten(2))
    blocks = torch.cat(laid, dim=2)
    return torch.cat([shared, blocks.reshape(num_panels, num_units, -1)], dim=2).view(rows.shape)


def unpack(rows: Tensor, packing: Packing) -> Tensor:
    """[num_rows, row_bytes] uint8 -> [num_rows, num_numbers] float32."""
    parts = take_apart(rows, packing)
    num_groups = packing.num_numbers(rows.shape[1]) // BLOCK * packing.num_groups
    scales, least = (None if part is None else part.float() for part in (parts.scales, parts.least))
    assert scales is not None
    if packing.is_nested:
        each = packing.num_blocks * packing.num_groups
        scales = scales.repeat_interleave(each, dim=1) * parts.nested[0]
        least = None if least is None else least.repeat_interleave(each, dim=1) * parts.nested[1]
    if packing.zero and least is None:
        least = -packing.zero * scales
    numbers = _values(parts.codes, packing).reshape(len(rows), num_groups, BLOCK // packing.num_groups).float()
    numbers *= scales[..., None]
    return (numbers if least is None else numbers.add_(least[..., None])).flatten(1)


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
