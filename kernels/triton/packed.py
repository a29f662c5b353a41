"""Linear layers with packed weights on a GPU.

A weight is read as it lies in memory, in 4 to 9 bits a number, and unpacked in registers: by a kernel for one row of x,
or by one that multiplies tiles. For many rows it is unpacked into memory first, for the vendor's GEMM. What is
multiplied are the numbers that the weight would have unpacked in the dtype of x; with one row they are not even rounded
to that.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packed import BLOCK, ROWS, Packing, codes_of, in_bytes, lay_panels, unpack
from . import tiles
from .chain import chained
from .elementwise import activate_and_mul
from .numbers import dot_options
from .packed_kernels import form_of, packed_kernel, packed_row_kernel, unpack_kernel
from .sampling import likeliest_tokens
from .sizes import cdiv, next_power_of_2

MOST_ROWS = 128  # of x: with more, the third tile of rows would unpack a weight again (estimated, not measured)
_BLOCKS = 8  # that a program unpacks into memory
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, out_dtype: torch.dtype, _in_int8: bool
) -> Tensor:
    """See `ops.linear_packed`. Nothing is rounded to 8 bits."""
    num_rows, num_panels, num_blocks = len(x), len(weight) // ROWS, x.shape[1] // BLOCK
    if num_rows > MOST_ROWS and out_dtype == x.dtype:  # else, of logits, the vendor's GEMM would round results
        return F.linear(x, unpacked(weight, packing, x.dtype), bias)
    out = torch.empty(num_rows, len(weight), dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    if x.stride(1) != 1:
        raise ValueError("the last dimension of x must be contiguous")
    float16s, added, has_bias = weight.view(torch.float16), weight if bias is None else bias, bias is not None
    if num_rows == 1:
        row_tile = tiles.packed_row(x.device)
        panels = row_tile.block_n // ROWS
        packed_row_kernel[(cdiv(num_panels, panels),)](
            out, x, weight, float16s, added, num_panels, num_blocks, HAS_BIAS=has_bias, PANELS=panels,
            BLOCKS=_blocks(row_tile.block_k, num_blocks), NUM_STAGES=3, FORM=form_of(packing), **chained(x.device),
            num_warps=row_tile.num_warps,
        )  # fmt: skip
        return out
    tile = tiles.gemm(x.device, "packed", num_rows=num_rows, dtype=x.dtype)
    panels = tile.block_n // ROWS
    packed_kernel[(cdiv(num_rows, tile.block_m) * cdiv(num_panels, panels),)](
        out, x, weight, float16s, added, num_rows, num_panels, num_blocks, x.stride(0), HAS_BIAS=has_bias,
        BLOCK_M=tile.block_m, PANELS=panels, BLOCKS=_blocks(tile.block_k, num_blocks), FORM=form_of(packing),
        **dot_options(x.dtype), **chained(x.device), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def linear_gated_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, activation: str, in_int8: bool
) -> Tensor:
    """See `ops.linear_gated_packed`."""
    return activate_and_mul(linear_packed(x, weight, packing, bias, x.dtype, in_int8), activation)


def bounds_packed(_packing: Packing, _dtype: torch.dtype) -> bool:
    """See `ops.bounds_packed`."""
    return False


def likeliest_packed(x: Tensor, weight: Tensor, packing: Packing, _lengths: Tensor) -> Tensor:
    """See `ops.likeliest_packed`."""
    return likeliest_tokens(linear_packed(x, weight, packing, None, torch.float32, False))


def fits_packed(shape: tuple[int, int], packing: Packing, dtype: torch.dtype, in_int8: bool) -> bool:
    """See `ops.fits_packed`. What is rounded to 8 bits anyway has a scale per row here."""
    return not in_int8 and dtype in _DTYPES and shape[0] % ROWS == 0 and shape[1] % packing.unit == 0


def lay_out_packed(rows: Tensor, packing: Packing, _dtype: torch.dtype, _in_int8: bool) -> Tensor:
    """See `ops.lay_out_packed`, and `packed_kernels`."""
    return lay_panels(rows, packing, ROWS, partial(_laid, packing))


def look_up_packed(token_ids: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """See `ops.look_up_packed`."""
    return unpack(rows.index_select(0, token_ids), packing).to(dtype)


def looks_up_packed(_dtype: torch.dtype) -> bool:
    """See `ops.looks_up_packed`: never."""
    return False


def unpacked(weight: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight in the order of `lay_out_packed`: [out_features, in_features], a new tensor."""
    num_rows, num_columns = len(weight), packing.num_numbers(weight.shape[1])
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.device)
    num_blocks = num_columns // BLOCK
    unpack_kernel[(num_rows // ROWS, cdiv(num_blocks, _BLOCKS))](
        out, weight, weight.view(torch.float16), num_blocks, BLOCKS=_BLOCKS, FORM=form_of(packing),
        **chained(weight.device),
    )  # fmt: skip
    return out


def _blocks(block_k: int, num_blocks: int) -> int:
    """Of a tile: no more than a row has, rounded up."""
    return min(block_k // BLOCK, next_power_of_2(num_blocks))


def _laid(packing: Packing, blocks: Tensor) -> Tensor:
    """Codes [panel, row, block, bytes] -> [panel, block, bytes of all rows]."""
    codes = codes_of(blocks.transpose(1, 2).contiguous(), packing)  # [panel, block, row, BLOCK]
    lower, upper = codes.tensor_split(2, dim=-1)
    if packing.bits == 8:
        return torch.stack([lower, upper], dim=2).flatten(2)
    laid = [in_bytes((lower & 15, upper & 15), 4).flatten(2)]
    if packing.bits == 6:
        laid.append(in_bytes((codes >> 4).tensor_split(4, dim=-1), 2).flatten(2))
    return torch.cat(laid, dim=-1)
