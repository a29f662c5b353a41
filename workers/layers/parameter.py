"""A parameter that knows which checkpoint tensors fill it, and which part of each its rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

WHOLE = ""  # the piece of a parameter that one checkpoint tensor fills

Index = tuple[slice, ...]


class TensorSource(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Index) -> Tensor:
        """The part that `index` (one slice per dimension, with bounds and step 1) cuts out, touching little else."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of one checkpoint tensor in a parameter.

    checkpoint q_proj  [9 * 64, hidden]        parameter qkv of rank 1 (heads 6-8 and KV head 2)
    rows   0..383                              rows   0..191  <- piece "q", source rows 384..575
    rows 384..575  ---- read -------------->   rows 192..255  <- piece "k"
                                               rows 256..319  <- piece "v"
    """

    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    source: Index  # what this rank reads of it
    target: Index  # where that goes in the parameter


class ShardedParameter(nn.Parameter):
    """One rank's share of a weight. `pieces` says, by name, what fills it; what no piece covers is zero."""

    pieces: Mapping[str, Piece]

    def __new__(cls, data: Tensor, pieces: Mapping[str, Piece]) -> ShardedParameter:
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.pieces = pieces
        return parameter

    def weight_loader(self, source: TensorSource, piece: str = WHOLE) -> None:
        """Read this rank's part of one checkpoint tensor into its place, converting the dtype.

        Raises `ValueError` when the tensor has another shape than the piece expects, before anything is read.
        """
        place = self.pieces[piece]
        if source.shape != place.shape:
            raise ValueError(f"shape {list(source.shape)}, expected {list(place.shape)}")
        with torch.no_grad():
            self.data[place.target].copy_(source.read(place.source))


def replicated(shape: tuple[int, ...]) -> dict[str, Piece]:
    """The pieces of a parameter that every rank holds whole."""
    return {WHOLE: Piece(shape, whole(shape), whole(shape))}


def whole(shape: tuple[int, ...]) -> Index:
    """The index of everything."""
    return tuple(slice(0, size) for size in shape)


def rows(part: range, shape: tuple[int, ...]) -> Index:
    """The index of some rows (dimension 0) and everything else."""
    return (slice(part.start, part.stop), *whole(shape[1:]))
