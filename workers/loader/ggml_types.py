"""Quantized types of GGUF files in the ways that `kernels.packed` has, by the numbers that they stand for.

A type has blocks of 32 numbers, or of 256 that share a scale of scales. What is the same number is the same code and
scale here, so that nothing is rounded: a scale that is a product of two becomes float32, and codes of 5 and 6 bits take
8. Layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Types that are not here (IQ1 to IQ3 look up
several numbers at once) are unpacked by the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from quire.kernels.packed import PACKINGS, Packing

_LOOKED_UP = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # what codes of IQ4 mean


class Parts(NamedTuple):
    """Of some blocks, what `packed.assemble` takes."""

    scales: Tensor  # [num_blocks, groups] float32
    least: Tensor | None
    codes: Tensor  # [num_blocks, numbers] int8


class Stored(NamedTuple):
    """How a type is packed here, and what takes its blocks, [num_blocks, bytes] uint8, apart. None: a block has its
    float16 and then its codes as a packed row has them."""

    packing: Packing
    split: Callable[[Tensor], Parts] | None = None


def _fields(data: Tensor, bits: int, run: int) -> Tensor:
    """[n, bytes] -> [n, 8 / bits times as many] uint8: of each `run` bytes the lowest bits, then the ones above."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, run) >> shifts) & (1 << bits) - 1).flatten(1)


def _float16(blocks: Tensor, start: int) -> Tensor:
    """[num_blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _signed(codes: Tensor, less: int = 0) -> Tensor:
    return codes.view(torch.int8) - less


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(_LOOKED_UP, dtype=torch.int8)[codes.long()]


def _q5_0(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
    return Parts(_float16(blocks, 0), None, _signed(codes, 16))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return Parts(_float16(blocks, 0), _float16(blocks, 2), _signed(codes))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_float16(blocks, 0), None, _looked_up(_fields(blocks[:, 2:], 4, 16)))


def _iq4_xs(blocks: Tensor) -> Parts:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return Parts(_float16(blocks, 0) * _signed(scales, 32), None, _looked_up(_fields(blocks[:, 8:], 4, 16)))


def _q2_k(blocks: Tensor) -> Parts:
    both, scale, least = blocks[:, :16], _float16(blocks, 80), _float16(blocks, 82)
    return Parts(scale * (both & 15), -(least * (both >> 4)), _signed(_fields(blocks[:, 16:80], 2, 32)))


def _q3_k(blocks: Tensor) -> Parts:
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    return Parts(_float16(blocks, 108) * _signed(scales, 32), None, _signed(codes, 4))


def _scales_and_least(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K, each [num_blocks, 8]: of 6 bits, those of the last four are in what is left of the others."""
    scale, least, both = blocks[:, 4:16].chunk(3, dim=1)
    scales = torch.cat([scale & 63, both & 15 | scale >> 6 << 4], dim=1)
    return _float16(blocks, 0) * scales, -(
        _float16(blocks, 2) * torch.cat([least & 63, both >> 4 | least >> 6 << 4], 1)
    )


def _q4_k(blocks: Tensor) -> Parts:
    return Parts(*_scales_and_least(blocks), _signed(_fields(blocks[:, 16:], 4, 32)))


def _q5_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return Parts(*_scales_and_least(blocks), _signed(codes))


def _q6_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return Parts(_float16(blocks, 208) * blocks[:, 192:208].view(torch.int8), None, _signed(codes, 32))


TYPES: Mapping[int, Stored] = {
    Type.Q4_0: Stored(PACKINGS["q4_0"]),
    Type.Q4_1: Stored(PACKINGS["q4_1"]),
    Type.Q8_0: Stored(PACKINGS["q8_0"]),
    Type.Q5_0: Stored(PACKINGS["q8_0"], _q5_0),
    Type.Q5_1: Stored(PACKINGS["q5_1"], _q5_1),
    Type.IQ4_NL: Stored(PACKINGS["q8_0"], _iq4_nl),
    Type.IQ4_XS: Stored(PACKINGS["iq4_xs"], _iq4_xs),
    Type.Q2_K: Stored(PACKINGS["q2_k"], _q2_k),
    Type.Q3_K: Stored(PACKINGS["q6_k"], _q3_k),
    Type.Q4_K: Stored(PACKINGS["q4_k"], _q4_k),
    Type.Q5_K: Stored(PACKINGS["q5_k"], _q5_k),
    Type.Q6_K: Stored(PACKINGS["q6_k"], _q6_k),
}
