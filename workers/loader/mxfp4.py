"""MXFP4: numbers of 4 bits, of which 32 share a power of two, as gpt-oss has its experts. The format is of
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

    number = 2^(scale - 127) * (0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign)

A checkpoint has blocks [experts, rows, blocks, 16], of which byte i holds number 2 i in its lower half and the next one
above it, and scales [experts, rows, blocks].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels.packed import BLOCK, PACKINGS, Packing, Parts, assemble

from ..layers.parameter import Index, TensorSource, whole

_PACKING = PACKINGS["mxfp4"]
_TWICE = torch.tensor(_PACKING.table, dtype=torch.int8)  # by code
_HALVED = 128  # the scale of twice a number
_LEAST, _LARGEST = _HALVED - 24, _HALVED + 15  # that float16 has


def float16_scales(scales: Tensor) -> Tensor:
    """What twice a number is multiplied by; 0 where float16 has no such number."""
    return _powers(scales).half().masked_fill_(_are_beyond(scales), 0.0)


def fit_float16(scales: Tensor, codes: Tensor) -> bool:
    """Whether all scales [..., blocks] that matter are numbers of float16. codes: [..., blocks, 32]; where all of a
    block stand for nothing, its scale does not matter."""
    beyond = _are_beyond(scales)
    return not bool(beyond.any()) or not bool(_TWICE[codes[beyond].long()].any())


def _are_beyond(scales: Tensor) -> Tensor:
    return (scales < _LEAST) | (scales > _LARGEST)


def _powers(scales: Tensor) -> Tensor:
    """What twice a number is multiplied by, float32."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - _HALVED)


@dataclass(frozen=True)
class MXFP4Source:
    """A matrix of each expert, [experts, rows, columns]."""

    blocks: TensorSource
    scales: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:2], self.scales.shape[2] * BLOCK)

    @cached_property
    def packing(self) -> Packing | None:
        """None where it does not hold all numbers. Looks at the scales, and at few blocks."""
        scales = self.scales.read(whole(self.scales.shape))
        for expert in range(len(scales)):
            own = scales[expert : expert + 1]
            if bool(_are_beyond(own).any()):
                codes = self._codes(slice(expert, expert + 1), *whole(self.scales.shape[1:]))
                if not fit_float16(own, codes):
                    return None
        return _PACKING

    def read(self, index: Index) -> Tensor:
        scales, codes = self._read(index)
        numbers = _TWICE[codes.long()].float() * _powers(scales)[..., None]
        first = index[2].start // BLOCK * BLOCK
        return numbers.flatten(2)[..., index[2].start - first : index[2].stop - first]

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`: of one expert."""
        scales, codes = self._read(index)
        return assemble(_PACKING, Parts(float16_scales(scales[0]), None, (), codes[0].flatten(1)))

    def _read(self, index: Index) -> tuple[Tensor, Tensor]:
        """Scales [experts, rows, blocks] and codes [experts, rows, blocks, 32] uint8, of whole blocks."""
        experts, rows, columns = index
        among = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        return self.scales.read((experts, rows, among)), self._codes(experts, rows, among)

    def _codes(self, experts: slice, rows: slice, among: slice) -> Tensor:
        """[experts, rows, blocks, 32]."""
        blocks = self.blocks.read((experts, rows, among, slice(0, BLOCK // 2)))
        return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
