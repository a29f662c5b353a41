# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""The kernels of packed weights (`..packed`), which are unpacked on their way to a sum and lie in memory packed.

Rows lie in panels of 16, block by block (`packed.lay_out_packed`), so that what a program reads of a panel lies side by
side. Of a block, a panel has

    float16   a scale of each row, then a least number of each: of non-nested packings; else before the first of the
              blocks that share them
    bytes     of nested ones whole numbers: those of scales, group by group, then those of least numbers, row by row
    codes     4 bits   row by row 16 bytes: byte i has the code of number i below that of number 16 + i
              6 bits   of each the lower 4 so, then row by row 8 bytes: byte i has the upper 2 of numbers i, 8 + i, ...
              8 bits   of all rows the numbers 0 to 15, then 16 to 31

So a block comes in halves of 16 numbers each, which are groups where there are two. Both have their own products with
x: nothing has to be put in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from ..packed import BLOCK, Packing
from ..packed import ROWS as PANEL
from .chain import wait_for_others
from .numbers import dot

ROWS = tl.constexpr(PANEL)
HALF = tl.constexpr(BLOCK // 2)  # numbers of half a block
CODES = tl.constexpr(PANEL * BLOCK // 2)  # of one of either, a byte each
E2M1_UNIT = tl.constexpr(32768.0)  # what `looked_up` leaves to scales


@dataclass(frozen=True, slots=True)
class Form:
    """All that a kernel has to know of a packing. Compiled kernels are kept on disk by these values."""

    bits: int
    has_least: bool
    is_nested: bool
    num_groups: int
    num_kinds: int
    num_sharing: int  # blocks that share float16
    num_nested: int
    code_bytes: int
    zero: int
    is_e2m1: bool
    words: tuple[int, ...]  # of a table, four whole numbers each, as the bytes of an int32


@cache
def form_of(packing: Packing) -> Form:
    table = bytes(number & 255 for number in packing.table)
    words = tuple(int.from_bytes(table[i : i + 4], "little", signed=True) for i in range(0, len(table), 4))
    return Form(
        packing.bits,
        packing.has_least,
        packing.is_nested,
        packing.num_groups,
        packing.num_kinds,
        packing.unit // BLOCK,
        packing.num_nested,
        packing.code_bytes,
        0 if packing.has_least else packing.zero,
        packing.name == "mxfp4",
        words,
    )


@triton.constexpr_function
def of(form: Form, name: str):
    """A field of a form, known when a kernel is compiled."""
    return getattr(form, name)


@triton.constexpr_function
def word_of(form: Form, index: int) -> int:
    return form.words[index]


@triton.constexpr_function
def has_table(form: Form) -> bool:
    return form.words != ()


@triton.jit
def looked_up(code, FORM: tl.constexpr):
    """What codes of 4 bits, int32, stand for, float32; of e2m1, that in `E2M1_UNIT`."""
    if of(FORM, "is_e2m1"):
        # Its bits are where a float16 has its sign, the end of its exponent, and the first bit of its mantissa.
        bits = ((code & 8) << 12) | ((code & 7) << 9)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = tl.where((code & 4) != 0, word_of(FORM, 1), word_of(FORM, 0))
        high = tl.where((code & 4) != 0, word_of(FORM, 3), word_of(FORM, 2))
        word = tl.where((code & 8) != 0, high, low)
        number = ((word << (24 - 8 * (code & 3))) >> 24).to(tl.float32)
    return number


@triton.jit
def _less(code, ZERO: tl.constexpr):
    """Codes of up to 8 bits, int32, less a constant, float32: as the last bits of 2^23, without a slow conversion."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _place(panel, block, num_blocks, FORM: tl.constexpr):
    """Where blocks of panels begin, [panels, blocks] int64: first what they share with others, then their own."""
    SHARING: tl.constexpr = of(FORM, "num_sharing")
    SHARED_BYTES: tl.constexpr = 2 * ROWS * of(FORM, "num_kinds")
    BLOCK_BYTES: tl.constexpr = ROWS * (of(FORM, "num_nested") + of(FORM, "code_bytes"))
    unit = (panel * (num_blocks // SHARING))[:, None] + (block // SHARING)[None, :]
    shared = unit * (SHARED_BYTES + SHARING * BLOCK_BYTES)
    return shared, shared + SHARED_BYTES + ((block % SHARING) * BLOCK_BYTES)[None, :]


@triton.jit
def whole_numbers(weight, own, FORM: tl.constexpr):
    """What is multiplied by scales: two halves [panels, blocks, ROWS, HALF], float32.

    weight: the first byte of a matrix; own: see `_place`.
    """
    SHAPE: tl.constexpr = (own.shape[0], own.shape[1], ROWS, HALF)
    codes_at = weight + (own + ROWS * of(FORM, "num_nested"))[:, :, None]
    first = tl.reshape(tl.load(codes_at + tl.arange(0, CODES)), SHAPE)
    if of(FORM, "bits") == 8:
        second = tl.reshape(tl.load(codes_at + CODES + tl.arange(0, CODES)), SHAPE)
        lower = _less((first ^ 128).to(tl.int32), 128)
        upper = _less((second ^ 128).to(tl.int32), 128)
    else:
        low_code = first.to(tl.int32) & 15
        high_code = first.to(tl.int32) >> 4
        if of(FORM, "bits") == 6:
            more = tl.load(codes_at + CODES + tl.arange(0, CODES // 2))
            more = tl.reshape(more, (own.shape[0], own.shape[1], ROWS, 1, HALF // 2)).to(tl.int32)
            more = tl.reshape(more >> (2 * tl.arange(0, 2)[:, None]), SHAPE)
            low_code = low_code | ((more & 3) << 4)
            high_code = high_code | (((more >> 4) & 3) << 4)
        if has_table(FORM):
            lower = looked_up(low_code, FORM)
            upper = looked_up(high_code, FORM)
        else:
            lower = _less(low_code, of(FORM, "zero"))
            upper = _less(high_code, of(FORM, "zero"))
    return lower, upper


@triton.jit
def _factor(float16s, weight, shared, own, KIND: tl.constexpr, FORM: tl.constexpr):
    """Scales (KIND 0) or least numbers (1) of both halves, [panels, blocks, ROWS] float32.

    float16s: the first byte of a matrix, for numbers of two bytes.
    """
    GROUPS: tl.constexpr = of(FORM, "num_groups")
    row = tl.arange(0, ROWS)
    lower = tl.load(float16s + (shared // 2)[:, :, None] + KIND * ROWS + row).to(tl.float32)
    if of(FORM, "is_e2m1"):
        lower = lower * E2M1_UNIT
    upper = lower
    if of(FORM, "is_nested"):
        at = weight + own[:, :, None] + KIND * GROUPS * ROWS + row
        if GROUPS == 2:
            upper = lower * tl.load(at + ROWS).to(tl.int8, bitcast=True).to(tl.float32)
        lower = lower * tl.load(at).to(tl.int8, bitcast=True).to(tl.float32)
        if GROUPS == 1:
            upper = lower
    return lower, upper


@triton.jit
def numbers(weight, float16s, panel, block, num_blocks, FORM: tl.constexpr):
    """The numbers of blocks, each in panels: two halves [panels, blocks, ROWS, HALF], float32.

    panel: [panels] int64; block: [blocks] int32, each one of the `num_blocks` of a row.
    """
    shared, own = _place(panel, block, num_blocks, FORM)
    lower, upper = whole_numbers(weight, own, FORM)
    lower_scale, upper_scale = _factor(float16s, weight, shared, own, 0, FORM)
    lower = lower * lower_scale[:, :, :, None]
    upper = upper * upper_scale[:, :, :, None]
    if of(FORM, "has_least"):
        lower_least, upper_least = _factor(float16s, weight, shared, own, 1, FORM)
        lower += lower_least[:, :, :, None]
        upper += upper_least[:, :, :, None]
    return lower, upper


@triton.jit
def _as_rows(half, DTYPE: tl.constexpr):
    """[panels, blocks, ROWS, HALF] -> [panels * ROWS, blocks * HALF]."""
    SHAPE: tl.constexpr = (half.shape[0] * half.shape[2], half.shape[1] * half.shape[3])
    return tl.reshape(tl.permute(half.to(DTYPE), (0, 2, 1, 3)), SHAPE)


@triton.jit
def packed_sums(
    x_rows,  # [rows] pointers to the first number of each
    used,  # [rows], whether it is one
    weight,
    float16s,
    panel,  # [panels] int64
    num_blocks,
    BLOCKS: tl.constexpr,  # at a time
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The products of rows of x with panels, [rows, panels * ROWS] float32."""
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    SHAPE: tl.constexpr = (x_rows.shape[0], BLOCKS * HALF)
    acc = tl.zeros([panel.shape[0] * ROWS, x_rows.shape[0]], tl.float32)
    for first_block in range(0, num_blocks, BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)
        # What is behind the last block is the last one again, times zero.
        lower, upper = numbers(weight, float16s, panel, tl.minimum(block, num_blocks - 1), num_blocks, FORM)
        at = x_rows[:, None, None] + (block * (2 * HALF))[None, :, None] + tl.arange(0, HALF)
        mask = used[:, None, None] & (block < num_blocks)[None, :, None]
        # Features come first: a matrix instruction takes its first operand from registers, where these were unpacked.
        a = tl.trans(tl.reshape(tl.load(at, mask=mask, other=0.0), SHAPE))
        acc = dot(_as_rows(lower, DTYPE), a, acc, PRECISION, UPCAST)
        a = tl.trans(tl.reshape(tl.load(at + HALF, mask=mask, other=0.0), SHAPE))
        acc = dot(_as_rows(upper, DTYPE), a, acc, PRECISION, UPCAST)
    return tl.trans(acc)


@triton.jit(do_not_specialize=["num_panels", "num_blocks"])
def packed_row_kernel(
    out,  # [out_features]
    x,  # [32 * num_blocks]
    weight,  # panels, bytes
    float16s,  # the same
    bias,  # [out_features], or anything
    num_panels,
    num_blocks,
    HAS_BIAS: tl.constexpr,
    PANELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One row of x. A program takes PANELS panels, BLOCKS blocks at a time."""
    wait_for_others(CHAINED)
    own = tl.program_id(0) * PANELS + tl.arange(0, PANELS)
    panel = tl.minimum(own, num_panels - 1).to(tl.int64)
    acc = tl.zeros([PANELS, BLOCKS, ROWS], tl.float32)
    for first_block in tl.range(0, num_blocks, BLOCKS, num_stages=NUM_STAGES):
        block = first_block + tl.arange(0, BLOCKS)
        shared, at = _place(panel, tl.minimum(block, num_blocks - 1), num_blocks, FORM)
        lower, upper = whole_numbers(weight, at, FORM)
        x_at = x + block[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
        inside = (block < num_blocks)[:, None]
        a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_at + HALF, mask=inside, other=0.0).to(tl.float32)
        lower_scale, upper_scale = _factor(float16s, weight, shared, at, 0, FORM)
        acc += tl.sum(lower * a[None, :, None, :], axis=3) * lower_scale
        acc += tl.sum(upper * b[None, :, None, :], axis=3) * upper_scale
        if of(FORM, "has_least"):
            lower_least, upper_least = _factor(float16s, weight, shared, at, 1, FORM)
            acc += tl.sum(a, axis=1)[None, :, None] * lower_least
            acc += tl.sum(b, axis=1)[None, :, None] * upper_least
    total = tl.sum(acc, axis=1)
    feature = own[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    is_used = (own < num_panels)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=is_used, other=0.0).to(tl.float32)
    tl.store(out + feature, total.to(out.dtype.element_ty), mask=is_used)


@triton.jit(do_not_specialize=["num_rows", "num_panels", "num_blocks"])
def packed_kernel(
    out,  # [num_rows, 16 * num_panels], contiguous
    x,  # [num_rows, 32 * num_blocks]
    weight,  # panels, bytes
    float16s,  # the same
    bias,  # [16 * num_panels], or anything
    num_rows,
    num_panels,
    num_blocks,
    x_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PANELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program takes BLOCK_M rows of x and PANELS panels, BLOCKS blocks at a time."""
    wait_for_others(CHAINED)
    # Neighbours share panels, as in `weight8_kernel`.
    tiles_of_rows = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % tiles_of_rows * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.program_id(0) // tiles_of_rows * PANELS + tl.arange(0, PANELS)
    used = row < num_rows
    panel = tl.minimum(own, num_panels - 1).to(tl.int64)
    x_rows = x + row.to(tl.int64) * x_stride
    acc = packed_sums(x_rows, used, weight, float16s, panel, num_blocks, BLOCKS, FORM, PRECISION, UPCAST)
    feature = tl.program_id(0) // tiles_of_rows * PANELS * ROWS + tl.arange(0, PANELS * ROWS)
    is_real = feature < num_panels * ROWS
    if HAS_BIAS:
        acc += tl.load(bias + feature, mask=is_real, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * (num_panels * ROWS) + feature[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=used[:, None] & is_real[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def unpack_kernel(
    out,  # [16 * num_panels, 32 * num_blocks], contiguous
    weight,  # panels, bytes
    float16s,  # the same
    num_blocks,
    BLOCKS: tl.constexpr,
    FORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The numbers of panel `program_id(0)`, in BLOCKS blocks."""
    wait_for_others(CHAINED)
    panel = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    lower, upper = numbers(weight, float16s, panel, tl.minimum(block, num_blocks - 1), num_blocks, FORM)
    row = panel[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    k = block[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    at = out + row[:, None, :, None] * (num_blocks * 2 * HALF) + k[None, :, None, :]
    mask = (block < num_blocks)[None, :, None, None]
    tl.store(at, lower.to(out.dtype.element_ty), mask=mask)
    tl.store(at + HALF, upper.to(out.dtype.element_ty), mask=mask)
