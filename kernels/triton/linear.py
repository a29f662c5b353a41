"""Linear layers on a GPU.

Weights in the dtype of the model are the vendor's GEMM's, which a kernel of ours would have to beat first; in 16 bits
ours does for one row. Weights in 8 bits are read as they are, by a kernel that widens a tile on its way to the matrix
instruction: half the bytes of bfloat16 where bytes are what a step waits for. Packed ones: `packed`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tiles
from .chain import chained
from .linear_kernels import row_kernel, weight8_kernel
from .numbers import PLAIN, dot_options, e4m3_format, group_options
from .sizes import cdiv, next_power_of_2


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear`."""
    fits = x.dtype == weight.dtype and x.shape[1] == weight.shape[1] and x.stride(1) == weight.stride(1) == 1
    if len(x) != 1 or x.dtype == torch.float32 or not fits:
        return F.linear(x, weight, bias)
    out_features, in_features = weight.shape
    out = x.new_empty(1, out_features)
    tile = tiles.row(x.device, out_features)
    row_kernel[(cdiv(out_features, tile.block_n),)](
        out, x, weight, weight if bias is None else bias, out_features, in_features, weight.stride(0),
        HAS_BIAS=bias is not None, BLOCK_N=tile.block_n,
        BLOCK_K=min(tile.block_k, next_power_of_2(in_features)), num_warps=tile.num_warps, **chained(x.device),
    )  # fmt: skip
    return out


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, _in_int8: bool) -> Tensor:
    """See `ops.linear_int8`. Nothing is rounded."""
    return _linear_weight8(x, weight, scales, bias, PLAIN.value)


def pays_in_int8(_shape: tuple[int, int], _dtype: torch.dtype) -> bool:
    """See `ops.pays_in_int8`."""
    return False


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.linear_fp8`."""
    return _linear_weight8(x, weight.view(torch.uint8), scales, bias, e4m3_format(x.device))


def _linear_weight8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, weight_format: int) -> Tensor:
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    out = x.new_empty(num_rows, out_features)
    if num_rows == 0:
        return out
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("the last dimensions of x and weight must be contiguous")
    tile = tiles.gemm(x.device, "weight8", num_rows=num_rows, dtype=x.dtype)
    grid = (cdiv(num_rows, tile.block_m) * cdiv(out_features, tile.block_n),)
    weight8_kernel[grid](
        out, x, weight, scales, scales if bias is None else bias,
        num_rows, out_features, in_features, x.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, WEIGHT_FORMAT=weight_format,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **group_options(scales, 1, in_features, tile.block_k),
        **dot_options(x.dtype), **chained(x.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
