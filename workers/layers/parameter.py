"""A parameter that knows which checkpoint tensors fill it, and which part of each its rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels import fp8, ops
from quire.kernels.elementwise import activate_and_mul
from quire.kernels.packed import IN_8_BITS, ROWS, Packing, common, pack, repack
from quire.kernels.packed import lengths as packed_lengths
from quire.kernels.sampling import likeliest_tokens

from ..models.spec import WHOLE

Index = tuple[slice, ...]

_LAID_AT_ONCE = 1 << 22  # numbers that are put in the order of a kernel together


class TensorSource(Protocol):
    """A tensor of a checkpoint that has not been read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: Index) -> Tensor:
        """The part that `index` (one slice per dimension, with bounds and step 1) cuts out, touching little else."""
        ...


class PackedSource(TensorSource, Protocol):
    """One that is packed in its file."""

    packing: Packing

    def read_packed(self, index: Index) -> Tensor:
        """The part that `index` cuts out, in whole units of its packing: [num_rows, row_bytes] uint8. See
        `kernels.packed`."""
        ...


class ScaledSource(TensorSource, Protocol):
    """A matrix that may be in 8 bits in its file, with a scale for each row, or for some columns of it."""

    eight_bits: torch.dtype | None  # int8 or float8_e4m3fn; None where it is not so
    scale_columns: int | None  # of a row, that share a scale; None: all

    def read_scaled(self, index: Index) -> tuple[Tensor, Tensor]:
        """The part that `index` cuts out between such columns, as it is stored, and the scales of each row of it:
        [num_rows, 1 or more] float32."""
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
    scales: Tensor | None = None  # what its rows are to be multiplied by, where they lie in 8 bits

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
        self.fill(source.read(place.source), place.target)

    def fill(self, values: Tensor, target: Index | None = None) -> None:
        """Store `values`, converting the dtype, in a part of the parameter or in all of it."""
        self.data[target or whole(tuple(self.shape))].copy_(values)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features], by this matrix [out_features, in_features]."""
        return ops.linear(x, self, bias)

    def linear_gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """[num_rows, in_features] -> [num_rows, out_features / 2]: `activate_and_mul` of `linear`."""
        return activate_and_mul(self.linear(x, bias), activation)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`linear`, in float32 if that is what the kernel has before it rounds."""
        return self.linear(x, bias)

    def likeliest(self, x: Tensor) -> Tensor:
        """`likeliest_tokens` of `logits`: [num_rows] int64."""
        return likeliest_tokens(self.logits(x).float())

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size], rows of this matrix."""
        return F.embedding(token_ids, self)

    @property
    def matrices(self) -> ops.ExpertMatrices:
        """Where it is one for each expert."""
        return ops.ExpertMatrices(self.data, self.scales)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Of the numbers in it, however they are stored."""
        return tuple(self.shape)

    @property
    def num_bytes(self) -> int:
        """That they take."""
        return self.nbytes


class _Packed(ShardedParameter):
    """A matrix, or one per expert, whose rows are packed: [..., num_rows, row_bytes] uint8."""

    packing: Packing

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.packing.num_numbers(self.shape[-1]))


class PackedRows(_Packed):
    """A matrix as packed as in its file, or as what is multiplied is, row by row in its order, whose rows are looked up
    and never multiplied."""

    computed: torch.dtype  # of the numbers that are looked up

    @classmethod
    def like(cls, parameter: ShardedParameter, packing: Packing) -> Self:
        """Room for the same pieces, all of whose columns each of them has."""
        num_rows, num_columns = parameter.shape
        made = cls(torch.zeros(num_rows, packing.row_bytes(num_columns), dtype=torch.uint8), parameter.pieces)
        made.packing, made.computed = packing, parameter.dtype
        return made

    def weight_loader(self, source: TensorSource, piece: str = WHOLE) -> None:
        place, packed = self.pieces[piece], cast(PackedSource, source)
        self.data[place.target[0]] = repack(packed.read_packed(place.source), packed.packing, self.packing)

    def embed(self, token_ids: Tensor) -> Tensor:
        return ops.look_up_packed(token_ids, self.data, self.packing, self.computed)


class PackedParameter(_Packed):
    """A matrix, or one per expert, as packed as in its file, or in what its pieces have in `common`, whose numbers are
    those that it would have unpacked; or packed as it is read (`IN_8_BITS`). In memory, each row is `packing.row_bytes`
    long; the order of bytes is a backend's (`ops.lay_out_packed`)."""

    x_dtype: torch.dtype  # of what it is multiplied with
    in_int8: bool  # which may be rounded to 8 bits: see `ops.linear_packed`
    rows: PackedRows | None = None  # the same rows, where they are looked up as well
    lengths: Tensor | None = None  # of a head's rows, where `ops.likeliest_packed` takes them

    @classmethod
    def like(
        cls,
        parameter: ShardedParameter,
        packing: Packing,
        device: torch.device,
        *,
        is_head: bool,
        is_looked_up: bool,
        in_int8: bool,
    ) -> Self:
        """Room for the same pieces, which have a form that `can_pack` allows, for a model that will be on a device."""
        *others, num_rows, num_columns = parameter.shape
        made = cls(torch.zeros(*others, num_rows, packing.row_bytes(num_columns), dtype=torch.uint8), parameter.pieces)
        made.packing, made.x_dtype, made.in_int8 = packing, parameter.dtype, in_int8
        made.rows = PackedRows.like(parameter, packing) if is_looked_up else None
        if is_head and ops.bounds_packed(packing, parameter.dtype, device):
            made.lengths = torch.zeros(2, num_rows, dtype=torch.float32)
        return made

    @staticmethod
    def can_pack(parameter: ShardedParameter, packing: Packing, device: torch.device, *, in_int8: bool) -> bool:
        """Whether its pieces can be cut out in whole units, and it pays to multiply them so on a device."""
        pieces, (num_rows, num_columns) = parameter.pieces.values(), parameter.shape[-2:]
        ends = [(piece.target[-2].stop, ROWS) for piece in pieces]
        ends += [(end, packing.unit) for piece in pieces for end in (piece.source[1].start, piece.source[1].stop)]
        fits = ops.fits_packed((num_rows, num_columns), packing, parameter.dtype, device, in_int8=in_int8)
        return fits and all(end % size == 0 for end, size in ends)

    def weight_loader(self, source: TensorSource, piece: str = WHOLE) -> None:
        stored: Packing | None = getattr(source, "packing", None)
        if common([stored, self.packing]) != self.packing:
            super().weight_loader(source, piece)  # which reads numbers, and fills
            return
        assert stored is not None
        if self.rows is not None:
            self.rows.weight_loader(source, piece)
        place, packed = self.pieces[piece], cast(PackedSource, source)
        self._fill_rows(repack(packed.read_packed(place.source), stored, self.packing), place.target[:-1])

    def fill(self, values: Tensor, target: Index | None = None) -> None:
        """Pack `values`, whole rows, into a part of the parameter or all of it. Raises `ValueError` like `pack`."""
        assert self.packing == IN_8_BITS
        assert self.rows is None
        self._fill_rows(pack(values), (slice(None),) if target is None else target[:-1])

    def _fill_rows(self, rows: Tensor, target: Index) -> None:
        if self.lengths is not None:
            self.lengths[:, target[0]] = packed_lengths(rows, self.packing)
        # On the device of the matrix, in parts: they take several times their memory on the way.
        laid = torch.empty(rows.shape, dtype=torch.uint8, device=self.data.device) if len(rows) else rows
        step = max(1, _LAID_AT_ONCE // self.matrix_shape[-1] // ROWS) * ROWS
        for start in range(0, len(rows), step):
            part = rows[start : start + step].to(self.data.device)
            laid[start : start + step] = ops.lay_out_packed(part, self.packing, self.x_dtype, in_int8=self.in_int8)
        self.data[target] = laid

    @property
    def matrices(self) -> ops.ExpertMatrices:
        return ops.ExpertMatrices(self.data, None, self.packing, self.in_int8)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear_packed(x, self.data, self.packing, bias, in_int8=self.in_int8)

    def linear_gated(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return ops.linear_gated_packed(x, self.data, self.packing, bias, activation, in_int8=self.in_int8)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear_packed(x, self.data, self.packing, bias, out_dtype=torch.float32, in_int8=self.in_int8)

    def likeliest(self, x: Tensor) -> Tensor:
        if self.lengths is None:
            return super().likeliest(x)
        return ops.likeliest_packed(x, self.data, self.packing, self.lengths)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.rows is not None
        return self.rows.embed(token_ids)

    @property
    def num_bytes(self) -> int:
        return self.nbytes + sum(each.nbytes for each in (self.rows, self.lengths) if each is not None)


class ScaledParameter(ShardedParameter):
    """A matrix, or one per expert, held in 8 bits. Row r of it is `self[r] * scales[r]`, or each part of it times a
    scale of its own.

    Scales are those that the largest values need (symmetric, per output channel), or those of the file, where the
    matrix is stored so. What multiplies the matrix stays as precise as it was, or nearly so.
    """

    stored_as: ClassVar[torch.dtype]
    largest: ClassVar[float]  # what a row's largest value is stored as

    scales: Tensor  # [..., out_features] float32; or [..., groups, out_features]
    computed: torch.dtype  # of what multiplies the matrix

    @classmethod
    def like(cls, parameter: ShardedParameter, device: torch.device, scale_columns: int | None = None) -> Self:
        """Room for the same pieces, on a device; see `ScaledSource` and `can_scale`."""
        *others, num_rows, num_columns = parameter.shape
        groups = [] if scale_columns is None else [num_columns // scale_columns]
        made = cls(torch.zeros(parameter.shape, dtype=cls.stored_as, device=device), parameter.pieces)
        made.scales = torch.ones(*others, *groups, num_rows, dtype=torch.float32, device=device)
        made.computed = parameter.dtype
        return made

    @staticmethod
    def can_scale(parameter: ShardedParameter, scale_columns: int | None) -> bool:
        """Whether its pieces are cut between columns that share a scale, and kernels multiply so."""
        if scale_columns is None:
            return True
        ends = [end for piece in parameter.pieces.values() for end in (piece.source[1].start, piece.source[1].stop)]
        return scale_columns % 16 == 0 and all(end % scale_columns == 0 for end in ends)

    def weight_loader(self, source: TensorSource, piece: str = WHOLE) -> None:
        stored, place = cast(ScaledSource, source), self.pieces[piece]
        is_alike = getattr(source, "eight_bits", None) == self.stored_as and stored.scale_columns == self._scale_columns
        if not is_alike:
            super().weight_loader(source, piece)
            return
        codes, scales = stored.read_scaled(place.source)
        self.data[place.target].copy_(codes)
        self._scales_by_row[place.target[:-1]].copy_(scales)

    def fill(self, values: Tensor, target: Index | None = None) -> None:
        target = target or whole(tuple(self.shape))
        groups = values.float().reshape(*values.shape[:-1], self._scales_by_row.shape[-1], -1)
        scales = groups.abs().amax(dim=-1).div_(self.largest).clamp_(min=torch.finfo(torch.float32).tiny)
        self.data[target].copy_(self._rounded(groups / scales[..., None]).flatten(-2))
        self._scales_by_row[target[:-1]].copy_(scales)

    def embed(self, token_ids: Tensor) -> Tensor:
        # As bytes: not every backend selects rows of a type that it does not compute with.
        stored = self.data.view(torch.uint8).index_select(0, token_ids).view(self.stored_as)
        scales = self._scales_by_row.index_select(0, token_ids)
        groups = stored.float().view(*scales.shape, -1)
        return (groups * scales[..., None]).flatten(1).to(self.computed)

    @property
    def num_bytes(self) -> int:
        return self.nbytes + self.scales.nbytes

    @property
    def _scales_by_row(self) -> Tensor:
        """[..., out_features, groups], of which there is at least one."""
        return self.scales[..., None] if self.scales.dim() < self.dim() else self.scales.transpose(-1, -2)

    @property
    def _scale_columns(self) -> int | None:
        return None if self.scales.dim() < self.dim() else self.shape[-1] // self.scales.shape[-2]

    @staticmethod
    def _rounded(values: Tensor) -> Tensor:
        """What is stored of numbers up to `largest`."""
        raise NotImplementedError


class Int8Parameter(ScaledParameter):
    """Evenly spaced: an element is off by at most half of its row's scale.

    On CPUs that multiply bytes, what multiplies the matrix is rounded to 16 bits of its row's largest, or to 8.
    """

    stored_as = torch.int8
    largest = 127.0  # -128 is left out, so that the scale is the same on both sides

    in_int8: bool = False  # see `ops.linear_int8`

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear_int8(x, self.data, self.scales, bias, in_int8=self.in_int8)

    def logits(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """On a CPU in float32: bfloat16 has the same digits so, and has an eighth for the last bit of a logit of 20."""
        if x.device.type != "cpu":
            return self.linear(x, bias)
        return self.linear(x.float(), None if bias is None else bias.float())

    @staticmethod
    def _rounded(values: Tensor) -> Tensor:
        return values.round()


class Fp8Parameter(ScaledParameter):
    """e4m3, with 3 bits of mantissa: small elements are as precise, for their size, as large ones."""

    stored_as = fp8.DTYPE
    largest = fp8.LARGEST

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear_fp8(x, self.data, self.scales, bias)

    @staticmethod
    def _rounded(values: Tensor) -> Tensor:
        return fp8.quantize(values, 1.0)


def num_weights(parameters: Iterable[nn.Parameter]) -> int:
    """Numbers in them, however they are stored; of our own layers those that a checkpoint has, without padding."""
    return sum(_num_filled(p) if isinstance(p, ShardedParameter) else p.numel() for p in parameters)


def _num_filled(parameter: ShardedParameter) -> int:
    return sum(math.prod(part.stop - part.start for part in p.target) for p in parameter.pieces.values())


def num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """That they take in memory."""
    return sum(p.num_bytes if isinstance(p, ShardedParameter) else p.nbytes for p in parameters)


def replicated(shape: tuple[int, ...]) -> dict[str, Piece]:
    """The pieces of a parameter that every rank holds whole."""
    return {WHOLE: Piece(shape, whole(shape), whole(shape))}


def whole(shape: tuple[int, ...]) -> Index:
    """The index of everything."""
    return tuple(slice(0, size) for size in shape)


def rows(part: range, shape: tuple[int, ...]) -> Index:
    """The index of some rows (dimension 0) and everything else."""
    return (slice(part.start, part.stop), *whole(shape[1:]))
