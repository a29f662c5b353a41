"""Quantized types of GGUF files in the ways that `kernels.packed` has, by the numbers that they stand for.

A type has blocks of 32 numbers, or of 256 whose scales are nested. What is the same number is the same code and scale
here, so that nothing is rounded; codes of 2 and 3 bits take 4, those of 5 bits 6.
Layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Types that are not here (IQ1 to IQ3 look up
several numbers at once) are unpacked by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from quire.kernels.packed import PACKINGS, Packing, Parts

from .mxfp4 import fit_float16, float16_scales


class Stored(NamedTuple):
    """How a type is packed here, and what takes its blocks, [num_blocks, bytes] uint8, apart: each is a row. None: a
    block has its float16 and then its codes as a packed row has them."""

    packing: Packing
    split: Callable[[Tensor], Parts] | None = None


def _fields(data: Tensor, bits: int, run: int) -> Tensor:
    """[n, bytes] -> [n, 8 / bits times as many] uint8: of each `run` bytes the lowest bits, then the ones above."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, run) >> shifts) & (1 << bits) - 1).flatten(1)


def _float16(blocks: Tensor, start: int, sign: int = 1) -> Tensor:
    """[num_blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16) * sign


def _signed(codes: Tensor, less: int = 0) -> Tensor:
    return codes.contiguous().view(torch.int8) - less


def _moved(codes: Tensor, zero: int, packing: Packing) -> Tensor:
    """Codes of which `zero` means nothing, as those of a packing."""
    return _signed(codes, zero - packing.zero)


def _q5_0(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
    return Parts(_float16(blocks, 0), None, (), _moved(codes, 16, PACKINGS["q5_0"]))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return Parts(_float16(blocks, 0), _float16(blocks, 2), (), _signed(codes))


def _mxfp4(blocks: Tensor) -> Parts:
    """Raises `ValueError` where a scale that matters is no number of float16."""
    scales, codes = blocks[:, :1], _fields(blocks[:, 1:], 4, 16)
    if not fit_float16(scales, codes[:, None]):
        raise ValueError("scales that are too small or too large to be packed")
    return Parts(float16_scales(scales), None, (), _signed(codes))


def _iq4_xs(blocks: Tensor) -> Parts:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return Parts(_float16(blocks, 0), None, (_signed(scales, 32),), _signed(_fields(blocks[:, 8:], 4, 16)))


def _q2_k(blocks: Tensor) -> Parts:
    scales, least = _signed(blocks[:, :16] & 15), _signed(blocks[:, :16] >> 4)
    codes = _fields(blocks[:, 16:80], 2, 32)
    return Parts(_float16(blocks, 80), _float16(blocks, 82, -1), (scales, least), _signed(codes))


def _q3_k(blocks: Tensor) -> Parts:
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return Parts(_float16(blocks, 108), None, (_signed(scales, 32),), _moved(codes, 4, PACKINGS["q3_k"]))


def _with_least(blocks: Tensor, codes: Tensor) -> Parts:
    """Q4_K and Q5_K: of 8 scales and 8 least numbers of 6 bits, the last four are in what the others leave."""
    scale, least, both = blocks[:, 4:16].chunk(3, dim=1)
    scales = torch.cat([scale & 63, both & 15 | scale >> 6 << 4], dim=1)
    leasts = torch.cat([least & 63, both >> 4 | least >> 6 << 4], dim=1)
    nested = (_signed(scales), _signed(leasts))
    return Parts(_float16(blocks, 0), _float16(blocks, 2, -1), nested, _signed(codes))


def _q4_k(blocks: Tensor) -> Parts:
    return _with_least(blocks, _fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Parts:
    return _with_least(blocks, _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4)


def _q6_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return Parts(_float16(blocks, 208), None, (_signed(blocks[:, 192:208]),), _moved(codes, 32, PACKINGS["q6_k"]))


TYPES: Mapping[int, Stored] = {
    Type.Q4_0: Stored(PACKINGS["q4_0"]),
    Type.Q4_1: Stored(PACKINGS["q4_1"]),
    Type.Q8_0: Stored(PACKINGS["q8_0"]),
    Type.Q5_0: Stored(PACKINGS["q5_0"], _q5_0),
    Type.Q5_1: Stored(PACKINGS["q5_1"], _q5_1),
    Type.IQ4_NL: Stored(PACKINGS["iq4_nl"]),
    Type.MXFP4: Stored(PACKINGS["mxfp4"], _mxfp4),
    Type.IQ4_XS: Stored(PACKINGS["iq4_xs"], _iq4_xs),
    Type.Q2_K: Stored(PACKINGS["q2_k"], _q2_k),
    Type.Q3_K: Stored(PACKINGS["q3_k"], _q3_k),
    Type.Q4_K: Stored(PACKINGS["q4_k"], _q4_k),
    Type.Q5_K: Stored(PACKINGS["q5_k"], _q5_k),
    Type.Q6_K: Stored(PACKINGS["q6_k"], _q6_k),
}
