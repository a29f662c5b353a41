"""Checkpoint tensors seen as the tensors that a model wants: transposed, or as one of several pieces in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from quire.kernels.packed import Packing

from ..layers.parameter import Index, PackedSource, ScaledSource, TensorSource


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix with rows and columns exchanged; a vector as it is."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    def read(self, index: Index) -> Tensor:
        return self.source.read(index[::-1]).t()


@dataclass(frozen=True, slots=True)
class RowsOfGroups:
    """The rows `part` of each group of `group_size` rows, one group after the other.

    group_size 4, part 2..2:   rows 0 1 [2] 3 | 4 5 [6] 7   are rows 0, 1 of this view
    """

    source: TensorSource
    group_size: int
    part: range

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0] // self.group_size * len(self.part), *self.source.shape[1:])

    @property
    def packing(self) -> Packing | None:
        """How it stays packed, if kernels know it."""
        return getattr(self.source, "packing", None)

    @property
    def eight_bits(self) -> torch.dtype | None:
        """See `ScaledSource`."""
        return getattr(self.source, "eight_bits", None)

    @property
    def scale_columns(self) -> int | None:
        """See `ScaledSource`."""
        return getattr(self.source, "scale_columns", None)

    def read(self, index: Index) -> Tensor:
        return self._rows(self.source.read, index)

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`."""
        return self._rows(cast(PackedSource, self.source).read_packed, index)

    def read_scaled(self, index: Index) -> tuple[Tensor, Tensor]:
        """See `ScaledSource`."""
        read = cast(ScaledSource, self.source).read_scaled
        return self._rows(lambda part: read(part)[0], index), self._rows(lambda part: read(part)[1], index)

    def _rows(self, read: Callable[[Index], Tensor], index: Index) -> Tensor:
        """Of what `read` reads of rows in order."""
        wanted, size = index[0], len(self.part)
        first, last = wanted.start // size, -(-wanted.stop // size)
        if last - first <= 1:  # inside one group: nothing else is touched
            start = first * self.group_size + self.part.start - first * size
            return read((slice(start + wanted.start, start + wanted.stop), *index[1:]))
        groups = read((slice(first * self.group_size, last * self.group_size), *index[1:]))
        grouped = groups.view(last - first, self.group_size, *groups.shape[1:])
        rows = grouped[:, self.part.start : self.part.stop].flatten(0, 1)
        return rows[wanted.start - first * size : wanted.stop - first * size]


@dataclass(frozen=True, slots=True)
class _Turned:
    """A matrix of each expert with rows and columns exchanged."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0], self.source.shape[2], self.source.shape[1])

    def read(self, index: Index) -> Tensor:
        return self.source.read((index[0], index[2], index[1])).transpose(1, 2)


def turned(source: TensorSource) -> TensorSource:
    """[experts, rows, columns] as [experts, columns, rows]; twice, it is what it was."""
    return source.source if isinstance(source, _Turned) else _Turned(source)


@dataclass(frozen=True, slots=True)
class OfExpert:
    """Some rows of one expert's matrix in a tensor [experts, rows, columns], or of its vector in [experts, rows]."""

    source: TensorSource
    expert: int
    rows: range

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.source.shape[2:])

    @property
    def packing(self) -> Packing | None:
        """How it stays packed, if kernels know it."""
        return getattr(self.source, "packing", None)

    def read(self, index: Index) -> Tensor:
        return self.source.read(self._in_source(index))[0, :: self.rows.step]

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`."""
        return cast(PackedSource, self.source).read_packed(self._in_source(index))[:: self.rows.step]

    def _in_source(self, index: Index) -> Index:
        """From the first row to the last, with what is between them."""
        wanted = self.rows[index[0].start : index[0].stop]
        return slice(self.expert, self.expert + 1), slice(wanted[0], wanted[-1] + 1), *index[1:]
