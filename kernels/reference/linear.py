"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packed import BLOCK, ROWS, Packing, unpack
from .elementwise import activate_and_mul
from .sampling import likeliest_tokens


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def scaled(weight: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a matrix in 8 bits, with a scale for each row or parts of it: float32."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    return weight.float() * scales.T.repeat_interleave(weight.shape[1] // len(scales), dim=1)


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`."""
    return linear(x, scaled(weight, scales), bias)


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, in_int8: bool) -> Tensor:
    """See `ops.linear_int8`."""
    if in_int8:
        return linear(_rounded(x.float(), x.shape[1]), scaled(weight, scales), bias).to(x.dtype)
    return linear(x, weight.float() * scales[:, None], bias)


def linear_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, out_dtype: torch.dtype, in_int8: bool
) -> Tensor:
    """See `ops.linear_packed`."""
    x = _rounded(x.float(), BLOCK // packing.num_groups) if in_int8 else x.float()
    return linear(x, unpack(weight, packing), None if bias is None else bias.float()).to(out_dtype)


def linear_gated_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, activation: str, in_int8: bool
) -> Tensor:
    """See `ops.linear_gated_packed`."""
    return activate_and_mul(linear_packed(x, weight, packing, bias, torch.float32, in_int8), activation).to(x.dtype)


def bounds_packed(_packing: Packing, _dtype: torch.dtype) -> bool:
    """See `ops.bounds_packed`."""
    return False


def likeliest_packed(x: Tensor, weight: Tensor, packing: Packing, _lengths: Tensor) -> Tensor:
    """See `ops.likeliest_packed`."""
    return likeliest_tokens(linear_packed(x, weight, packing, None, torch.float32, in_int8=False))


def lay_out_packed(rows: Tensor, _packing: Packing, _dtype: torch.dtype, _in_int8: bool) -> Tensor:
    """See `ops.lay_out_packed`: as they are."""
    return rows


def look_up_packed(token_ids: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """See `ops.look_up_packed`."""
    return unpack(rows.index_select(0, token_ids), packing).to(dtype)


def looks_up_packed(_dtype: torch.dtype) -> bool:
    """See `ops.looks_up_packed`."""
    return True


def fits_packed(shape: tuple[int, int], packing: Packing, _dtype: torch.dtype, _in_int8: bool) -> bool:
    """See `ops.fits_packed`."""
    return shape[0] % ROWS == 0 and shape[1] % packing.unit == 0


def pays_in_int8(_shape: tuple[int, int], _dtype: torch.dtype) -> bool:
    """See `ops.pays_in_int8`."""
    return True


def _rounded(x: Tensor, size: int) -> Tensor:
    """To whole multiples of 1/127 of the largest of each group of so many numbers of a row."""
    blocks = x.reshape(len(x), x.shape[1] // size, size)
    units = blocks.abs().amax(dim=-1, keepdim=True).clamp_(min=2.0**-100).div_(127)
    return blocks.div(units).round_().mul_(units).reshape(x.shape)
