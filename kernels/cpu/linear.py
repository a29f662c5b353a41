"""Linear layers on CPU: every weight is read once, at memory speed, until there is more to multiply than to read.

A step that decodes M requests multiplies M rows with each weight matrix. That is a matter of memory, not of
arithmetic, until M is some tens; the library's GEMM, made for large M, then reaches a fraction of the bandwidth. Two
kernels take its place:

    few_rows    a sum in all lanes of a vector, or in four of them
    many_rows   a sum in one lane, which is one row's, or in a matrix tile

Weights come in three precisions:

    float32     multiplied and added in float32
    bfloat16    x as well; products and sums in float32
    int8        x in 16 bits of its row's largest, or 8 where it may be rounded to that (`digits`), products and sums in
                whole numbers

Those that are packed (`kernels.packed`) are multiplied with x in float32 or bfloat16: in matrix tiles (`codes`); else,
in vectors, in bfloat16 by its dot products where they are fast (`dots`), otherwise by those of bytes, or by what AVX2
has for bytes and words (`byte_dots`: x in bfloat16 is rounded to 16 bits of the largest of those with one scale); and
without these in float32 (`panels`: the same sums of the same numbers; x in bfloat16 is widened). They are unpacked
part by part, in registers or into a core's caches. Where x may be rounded to 8 bits, one product of bytes takes the
place of two or three (`rounded_dots`).

A CPU on which no instruction for bfloat16 or int8 is faster than that multiplies them as float32. The library's product
of a prompt takes as long in float32, and two to six times as long in bfloat16 on x86; elsewhere that was not measured,
and those of more than MAX_ROWS are its, and so are weights of other sizes than `_fits` and `many_rows.fits` name. But
in float32 on x86 `few_rows` takes all rows of what `many_rows` does not take, and weights of nearly all sizes
(`few_rows.fits_float32`): with 1 to 512 rows it takes from a tenth to all of the library's time.

On x86, a row's result has the same bits whatever rows are beside it, where these kernels take the weight and both add
in one order (`tile_product`): of float32, of bfloat16 where it is multiplied as float32, and of int8 in digits, whose
sums are of whole numbers; and of packed weights, but in `codes` and `dots` for x in bfloat16. Otherwise it has them
among as many rows as one of them, or the library, takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packed import Packing
from . import byte_dots, codes, dots, few_rows, many_rows, matrix_tiles, panels, rounded_dots
from .byte_products import has_products
from .digits import MOST_DIGITS
from .elementwise import activate_and_mul
from .features import dots_are_fast
from .intrinsics import IS_X86
from .likeliest import likeliest
from .many_rows import BLOCK
from .recording import as_one_action
from .sampling import likeliest_tokens
from .tile_product import STEP_BYTES, TILE
from .tiles import FORMATS, TILE_ROWS, best_format
from .turned_tiles import products

MAX_ROWS_FEW = 48  # for `few_rows`, whatever the weight, but in float32 on x86
# The most rows for `few_rows`, by what multiplies more of them in `many_rows`.
FEW_ROWS = {"tdpbf16ps": 4, "tdpbssd": 4, "bfloat16 dot": MAX_ROWS_FEW, "int8 dot": 20, "float32": 24}
MAX_ROWS = sys.maxsize if IS_X86 else 64  # for `many_rows`
_COMPILED = (torch.float32, torch.bfloat16)
_WIDENED_ROWS = 4096  # of a weight at once


class _PackedKernel(Protocol):
    """A module that multiplies packed weights, in an order of their bytes that is its own."""

    DTYPES: tuple[torch.dtype, ...]

    def fits(self, out_features: int, in_features: int) -> bool: ...

    def lay_out(self, rows: Tensor, packing: Packing) -> Tensor: ...

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, packing: Packing, out_dtype: torch.dtype
    ) -> Tensor: ...


_GATED: dict[_PackedKernel, Callable[[Tensor, Tensor, Tensor | None, Packing, str], Tensor]] = {
    codes: codes.linear_gated,
    dots: dots.linear_gated,
    byte_dots: byte_dots.linear_gated,
    rounded_dots: rounded_dots.linear_gated,
}


class _Chooses(NamedTuple):
    """How a kernel multiplies some panels of a weight alone, to find the likeliest token."""

    multiply: Callable[..., None]
    has_pairs: bool  # its codes lie in pairs
    most_exact: int  # rows of x with which numbers of the weight are not rounded
    lost: dict[torch.dtype, float]  # see `likeliest`
    pays: Callable[[Packing, torch.dtype], bool]  # whether a bound takes less than what it stands for


_CHOOSING: dict[_PackedKernel, _Chooses] = {
    dots: _Chooses(
        dots.multiply,
        has_pairs=True,
        most_exact=dots.FEW_ROWS,
        lost={torch.bfloat16: 0.0},
        pays=lambda _packing, _dtype: True,
    ),
    byte_dots: _Chooses(
        byte_dots.multiply,
        has_pairs=False,
        most_exact=sys.maxsize,
        lost=byte_dots.LOST,
        pays=byte_dots.bounds_pay,
    ),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    if x.dtype not in _COMPILED or x.dtype != weight.dtype or len(x) == 0 or not _alike(x, bias):
        return F.linear(x, weight, bias)
    if IS_X86 and x.dtype == torch.float32:
        return _linear_float32(x, weight, bias)
    in_float32 = x.dtype == torch.float32 or _widens_bfloat16()
    name = "float32" if x.dtype == torch.float32 else _bfloat16()
    is_few = _fits(x, weight, name, sys.maxsize if in_float32 and IS_X86 else MAX_ROWS_FEW)
    if _is_many(x, weight) or (not is_few and many_rows.fits(weight) and len(x) <= MAX_ROWS):
        return many_rows.linear(x, weight, None, bias, least_rows=_from_rows(weight))
    if is_few:  # any number of rows in float32 of a weight that `many_rows` does not take: for the same bits
        return few_rows.linear(name, x, weight, None, bias, most_rows=_to_rows(weight))
    if x.dtype != torch.float32 and _widens_bfloat16() and len(x) > FEW_ROWS["float32"]:
        return _widened(x, weight, None, bias, torch.float32)
    return F.linear(x, weight, bias)


def _linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """On x86, where all that takes a weight takes any number of rows, and gives a row the same bits beside any."""
    if few_rows.is_padded(weight):
        columns = weight.stride(0)
        x = F.pad(x, (0, columns - x.shape[1]))
        weight = weight.as_strided((len(weight), columns), (columns, 1))
    if _is_many(x, weight):
        return many_rows.linear(x, weight, None, bias, least_rows=_from_rows(weight))
    if few_rows.fits_float32(weight):
        return few_rows.linear("float32", x, weight, None, bias, most_rows=_to_rows(weight) or sys.maxsize)
    return F.linear(x, weight, bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, in_int8: bool) -> Tensor:
    """See `ops.linear_int8`."""
    if x.dtype not in _COMPILED or len(x) == 0 or not _alike(x, bias):
        return _widened(x, weight, scales, bias, torch.float32)
    in_digits = _int8() == "int8 dot"
    whole = len(weight) // TILE * TILE
    if in_digits and 0 < whole < len(weight) and many_rows.fits(weight[:whole]):
        biases = (None, None) if bias is None else (bias[:whole], bias[whole:])
        most = linear_int8(x, weight[:whole], scales[:whole], biases[0], in_int8)
        return torch.cat([most, _widened(x, weight[whole:], scales[whole:], biases[1], torch.float32)], dim=1)
    if _is_many(x, weight):
        num_digits = 1 if in_int8 else MOST_DIGITS
        return many_rows.linear(x, weight, scales, bias, least_rows=_from_rows(weight), num_digits=num_digits)
    name = "int8 digit" if in_int8 else "int8 dot"
    if in_digits and _fits(x, weight, name, FEW_ROWS[products(torch.int8)[0]]):
        return few_rows.linear(name, x, weight, scales, bias, most_rows=_to_rows(weight))
    if x.dtype == torch.float32 and _fits(x, weight, "int8", FEW_ROWS["float32"]):
        return few_rows.linear("int8", x, weight, scales, bias, most_rows=_to_rows(weight))
    return _widened(x, weight, scales, bias, torch.float32)


def pays_in_int8(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """See `ops.pays_in_int8`."""
    is_whole = shape[0] % BLOCK == 0 and shape[1] % STEP_BYTES == 0
    return dtype in _COMPILED and is_whole and _int8() == "int8 dot"


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`. CPUs have no instruction that reads such numbers: less memory, not more speed."""
    return _widened(x, weight, scales, bias, x.dtype)


def linear_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, out_dtype: torch.dtype, in_int8: bool
) -> Tensor:
    """See `ops.linear_packed`."""
    if len(x) == 0:
        return x.new_empty(0, len(weight), dtype=out_dtype)
    return _packed_kernel(packing, x.dtype, in_int8).linear(x, weight, bias, packing, out_dtype)


def linear_gated_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, activation: str, in_int8: bool
) -> Tensor:
    """See `ops.linear_gated_packed`."""
    gated = _GATED.get(_packed_kernel(packing, x.dtype, in_int8))
    if gated is not None and len(x) > 0 and codes.fits_gated(len(weight), activation):
        return gated(x, weight, bias, packing, activation)
    return activate_and_mul(linear_packed(x, weight, packing, bias, x.dtype, in_int8), activation)


def bounds_packed(packing: Packing, dtype: torch.dtype) -> bool:
    """See `ops.bounds_packed`."""
    way = _CHOOSING.get(_packed_kernel(packing, dtype, in_int8=False))
    return way is not None and not packing.has_least and not packing.table and way.pays(packing, dtype)


def likeliest_packed(x: Tensor, weight: Tensor, packing: Packing, lengths: Tensor) -> Tensor:
    """See `ops.likeliest_packed`."""
    if not bounds_packed(packing, x.dtype) or len(x) == 0:
        return likeliest_tokens(linear_packed(x, weight, packing, None, torch.float32, in_int8=False))
    return choose_likeliest(_packed_kernel(packing, x.dtype, in_int8=False), x, weight, packing, lengths)


def choose_likeliest(kernel: _PackedKernel, x: Tensor, weight: Tensor, packing: Packing, lengths: Tensor) -> Tensor:
    """`likeliest_packed` by one of the kernels that can multiply some panels alone."""
    way = _CHOOSING[kernel]

    def multiply(logits: Tensor, chosen: Tensor) -> None:
        way.multiply(x, weight, None, packing, logits, chosen=chosen)

    rounds = len(x) > way.most_exact
    lost = way.lost[x.dtype]
    return likeliest(x, weight, packing, lengths, multiply, has_pairs=way.has_pairs, rounds=rounds, lost=lost)


def lay_out_packed(rows: Tensor, packing: Packing, dtype: torch.dtype, in_int8: bool) -> Tensor:
    """See `ops.lay_out_packed`."""
    return _packed_kernel(packing, dtype, in_int8).lay_out(rows, packing)


def fits_packed(shape: tuple[int, int], packing: Packing, dtype: torch.dtype, in_int8: bool) -> bool:
    """See `ops.fits_packed`."""
    kernel = _packed_kernel(packing, dtype, in_int8)
    is_whole = shape[1] % packing.unit == 0
    looks_up = kernel is not panels or not packing.table
    # Matrix tiles of bytes (`linear_int8`) are faster than those of codes, but hardly where these have 4 bits.
    pays_in_tiles = kernel is codes and packing.bits == 4 and dtype == torch.bfloat16
    is_meant = not in_int8 or kernel is rounded_dots or pays_in_tiles
    return dtype in kernel.DTYPES and is_whole and looks_up and is_meant and kernel.fits(*shape)


@cache
def _packed_kernel(packing: Packing, dtype: torch.dtype, in_int8: bool) -> _PackedKernel:
    """The fastest on this CPU for x of a dtype, which may be rounded to 8 bits (`in_int8`), or not. (A matrix tile sums
    up all products of a block, whose groups may have different scales.)"""
    in_tiles = matrix_tiles.are_available()
    if in_tiles and packing.num_groups == 1:
        return codes
    if in_int8 and has_products() and not in_tiles:
        return rounded_dots
    if dtype == torch.bfloat16 and dots_are_fast():
        return dots
    return byte_dots if has_products() else panels


def _widened(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplied in `dtype`, after a copy of each part of the weight. One action, as a graph would keep the copies."""
    out = x.new_empty(x.shape[0], weight.shape[0])

    def multiply(x: Tensor, out: Tensor) -> None:
        wide_x = x.to(dtype)
        for start in range(0, weight.shape[0], _WIDENED_ROWS):
            rows = slice(start, start + _WIDENED_ROWS)
            wide = weight[rows].to(dtype)
            if scales is not None:
                own = scales[..., rows].to(dtype)
                groups = wide.view(len(wide), 1 if scales.dim() == 1 else len(scales), -1)  # that share a scale
                groups *= own.view(-1, own.shape[-1]).T[..., None]
            product = F.linear(wide_x, wide)
            out[:, rows] = product if bias is None else product.add_(bias[rows].to(dtype))

    as_one_action(multiply, x.contiguous(), out)
    return out


def _is_many(x: Tensor, weight: Tensor) -> bool:
    """Whether `many_rows` is the fastest for so many rows."""
    if not many_rows.fits(weight):
        return False
    return _least_many(weight) <= len(x) <= MAX_ROWS


def _least_many(weight: Tensor) -> int:
    return FEW_ROWS[products(weight.dtype)[0]] + 1


def _from_rows(weight: Tensor) -> int | None:
    """From how many rows on it is always `many_rows`, on a CPU where it is."""
    return _least_many(weight) if sys.maxsize == MAX_ROWS else None


def _to_rows(weight: Tensor) -> int | None:
    """Up to how many rows it is always `few_rows`, where that takes some, on a CPU where `many_rows` takes the rest."""
    return _least_many(weight) - 1 if sys.maxsize == MAX_ROWS and many_rows.fits(weight) else None


@cache
def _bfloat16() -> str:
    return "bfloat16 dot" if dots_are_fast() else "bfloat16"


def _widens_bfloat16() -> bool:
    return products(torch.bfloat16)[:1] == ("float32",)


@cache
def _int8() -> str:
    return best_format("int8 dot", "int8")


def _alike(x: Tensor, bias: Tensor | None) -> bool:
    return bias is None or bias.dtype == x.dtype


def _fits(x: Tensor, weight: Tensor, name: str, max_rows: int) -> bool:
    form = FORMATS[name]
    out_features = weight.shape[0]
    fits_rows = out_features % TILE_ROWS == 0 and out_features >= form.largest[1] and weight.is_contiguous()
    return 0 < x.shape[0] <= max_rows and x.shape[1] % form.step == 0 and fits_rows
