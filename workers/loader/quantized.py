"""Tensors of a checkpoint that is quantized, seen as the matrices that they stand for.

    number = (code - zero) * scale

Codes lie in words of 32 bits, or in 8 bits each. A scale, and perhaps a zero, is shared by a block of numbers: some of
a row (a group), a row, or a rectangle.

    AWQ                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; numbers of a word in an
                         order of their own: https://github.com/casper-hansen/AutoAWQ
    GPTQ                 qweight [in / 8, out], qzeros and scales like these; g_idx [in] says each input's group, where
                         it is not simply the next: https://github.com/ModelCloud/GPTQModel
    compressed-tensors   weight_packed [out, in / 8] or weight, weight_scale [out, groups], weight_zero_point
                         [out / 8, groups], weight_g_idx: https://github.com/vllm-project/compressed-tensors
    FP8                  weight, and weight_scale or weight_scale_inv, of all of it, of rows, or of blocks of 128 by 128
    MXFP4                of experts that a checkpoint otherwise has as [experts, in, out]: see `mxfp4`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from quire.engine.errors import ConfigError
from quire.engine.stored_quantization import StoredQuantization
from quire.kernels import fp8
from quire.kernels.packed import BLOCK, PACKINGS, Packing, Parts, assemble

from ..layers.parameter import Index, TensorSource, whole
from .mxfp4 import MXFP4Source
from .safetensors import SafetensorsSource, open_safetensors
from .views import Transposed, turned

_WORD = 32  # bits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the numbers of a word, in its fields from the lowest on
_IN_8_BITS = {"I8": torch.int8, "F8_E4M3": fp8.DTYPE}
_AT_ONCE = 1 << 24  # numbers that are taken apart together
_MX_BLOCKS = "_blocks"
# What a matrix may have beside its codes. The last ones say how activations are rounded, which they are not here.
_BESIDE = (
    *("qzeros", "scales", "g_idx"),
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "activation_scale", "input_zero_point", "output_scale", "output_zero_point"),
)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Numbers of a few bits in words, along one dimension: number i of a word is in the field `places[i]`."""

    words: TensorSource
    bits: int
    dim: int
    size: int  # of that dimension, in numbers
    places: tuple[int, ...] | None = None  # None: in their order
    less: int = 0  # than they are, in as many bits

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.words.shape
        return (self.size, columns) if self.dim == 0 else (rows, self.size)

    def read(self, index: Index) -> Tensor:
        """uint8."""
        per_word, cut = _WORD // self.bits, index[self.dim]
        first = cut.start // per_word
        among = slice(first, -(-cut.stop // per_word))
        words = self.words.read((among, index[1]) if self.dim == 0 else (index[0], among))
        in_bytes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        fields = ((in_bytes[..., None] >> shifts) & (1 << self.bits) - 1).flatten(-2)
        if self.places is not None:
            fields = fields[..., self.places]
        numbers = fields.movedim(-1, self.dim + 1).flatten(self.dim, self.dim + 1)
        wanted = numbers.narrow(self.dim, cut.start - first * per_word, cut.stop - cut.start)
        return (wanted + self.less) & (1 << self.bits) - 1 if self.less else wanted


@dataclass(frozen=True, slots=True)
class _AsMatrix:
    """One number for all of a matrix, or one for each row, whatever dimensions it is stored with: [1 or rows, 1]."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0] if self.source.shape else 1, 1)

    def read(self, index: Index) -> Tensor:
        return self.source.read(whole(self.source.shape)).reshape(self.shape)[index]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Columns of a matrix in another order, some several times."""

    source: TensorSource
    columns: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.shape[0], len(self.columns))

    def read(self, index: Index) -> Tensor:
        return self.source.read((index[0], slice(0, self.source.shape[1])))[:, self.columns[index[1]]]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """What blocks of a matrix share."""

    source: TensorSource  # [blocks of rows, blocks of columns]
    rows: int  # of a block
    columns: int

    def read(self, index: Index, step: int = 1) -> Tensor:
        """Of each row, and each `step`-th column, that `index` cuts out. One dimension of 1 stands for any number."""
        (first, last), (start, stop) = ((cut.start, cut.stop) for cut in index)
        top, left = first // self.rows, start // self.columns
        own = self.source.read((slice(top, -(-last // self.rows)), slice(left, -(-stop // self.columns))))
        if self.rows > 1 and len(own) > 1:
            own = own[torch.arange(first, last) // self.rows - top]
        if step != self.columns and own.shape[1] > 1:
            own = own[:, torch.arange(start, stop, step) // self.columns - left]
        return own

    def read_all(self) -> Tensor:
        return self.source.read(whole(self.source.shape))


def _in_parts(rows: slice, row_size: int) -> Iterator[tuple[slice, slice]]:
    """Rows in parts that are not too large, and their places among them."""
    step = max(1, _AT_ONCE // row_size)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        yield slice(start, stop), slice(start - rows.start, stop - rows.start)


@dataclass(frozen=True)
class QuantizedSource:
    """A matrix that several tensors stand for: [out_features, in_features]."""

    codes: TensorSource
    scales: _Blocks
    zeros: _Blocks | None = None
    zero: int = 0  # that all codes have beside their own
    bits: int = 8

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def read(self, index: Index) -> Tensor:
        """float32; exactly the numbers, but for the rounding of a product of a code and a scale in float32."""
        rows, columns = index
        numbers = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        for part, own in _in_parts(rows, self.shape[1]):
            found = numbers[own].copy_(self.codes.read((part, columns)))
            found -= self.zero
            if self.zeros is not None:
                found -= self.zeros.read((part, columns))
            found *= self.scales.read((part, columns))
        return numbers

    @cached_property
    def packing(self) -> Packing | None:
        """How it stays packed, without rounding anything, if kernels know it. Reads scales and zeros, which are few."""
        group, size = min(self.scales.columns, self.shape[1]), self.shape[1]
        if self._eight_bits == fp8.DTYPE or (group % BLOCK and group < size) or not self._has_short_scales():
            return None
        zero, symmetric = self._common_zero, PACKINGS["q4_0"]
        if self.bits == 8:
            return PACKINGS["q8_0"] if zero == (128 if self._eight_bits is None else 0) else None
        if zero is not None and zero <= symmetric.zero <= zero + 16 - (1 << self.bits):
            return symmetric
        large = PACKINGS["z4_128"]
        return large if group % large.unit == 0 else PACKINGS["z4_32"]

    def read_packed(self, index: Index) -> Tensor:
        """See `PackedSource`."""
        packing, (rows, columns) = self.packing, index
        assert packing is not None
        packed = torch.empty(rows.stop - rows.start, packing.row_bytes(columns.stop - columns.start), dtype=torch.uint8)
        for part, own in _in_parts(rows, self.shape[1]):
            packed[own] = self._packed((part, columns), packing)
        return packed

    def _packed(self, index: Index, packing: Packing) -> Tensor:
        codes = self.codes.read(index).view(torch.int8)
        num_rows, num_columns = codes.shape
        scales = self.scales.read(index, packing.unit).half().expand(num_rows, num_columns // packing.unit)
        if not packing.has_least:
            assert self._common_zero is not None
            # What is not signed wraps around to what is.
            return assemble(packing, Parts(scales, None, (), codes + (packing.zero - self._common_zero)))
        zeros = torch.zeros(1, 1) if self.zeros is None else self.zeros.read(index, BLOCK)
        least = (zeros.to(torch.int8) + self.zero).expand(num_rows, num_columns // BLOCK)
        return assemble(packing, Parts(scales, -scales, (torch.ones_like(least), least), codes))

    def _has_short_scales(self) -> bool:
        """Whether each row has its own, and all are numbers of float16."""
        if self.scales.rows > 1:
            return False
        scales = self.scales.read_all()
        return scales.dtype == torch.float16 or bool((scales.half().float() == scales.float()).all())

    @cached_property
    def _common_zero(self) -> int | None:
        """The code that means nothing; None where blocks differ."""
        if self.zeros is None:
            return self.zero
        least, most = (int(each) for each in self.zeros.read_all().aminmax())
        return least + self.zero if least == most else None

    @property
    def _eight_bits(self) -> torch.dtype | None:
        return _eight_bits(self.codes)

    @property
    def eight_bits(self) -> torch.dtype | None:
        """The type of its codes, where they are numbers of 8 bits, and scales are all that they need."""
        in_order = self.scales.columns > 1 or self.shape[1] == 1
        return self._eight_bits if in_order and self.zeros is None and self.zero == 0 else None

    @property
    def scale_columns(self) -> int | None:
        """See `ScaledSource`."""
        return self.scales.columns if self.scales.columns < self.shape[1] else None

    def read_scaled(self, index: Index) -> tuple[Tensor, Tensor]:
        """See `ScaledSource`."""
        codes = self.codes.read(index)
        scales = self.scales.read(index, self.scales.columns).float()
        return codes, scales.expand(len(codes), scales.shape[1])


@dataclass(frozen=True, slots=True)
class UnneededBias:
    """What GPTQ's tools store also for layers that have none: full of zeros, then."""

    source: TensorSource

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def read(self, index: Index) -> Tensor:
        return self.source.read(index)


@contextmanager
def open_quantized(directory: Path, stored: StoredQuantization) -> Iterator[dict[str, TensorSource]]:
    """The tensors of a directory by name, those of a quantized matrix as one. Raises `ConfigError` when a file is
    damaged, or when tensors do not go together."""
    with open_safetensors(directory) as sources:
        try:
            reader = _Reader(sources, stored)
            yield reader.of_experts() if stored.tensors == "mxfp4" else reader.all()
        except _Mismatch as mismatch:
            raise ConfigError(f"model: in {directory}, {mismatch}.") from mismatch


class _Mismatch(Exception):
    """Between the tensors of a matrix."""


class _Reader:
    """Finds what belongs together."""

    def __init__(self, sources: Mapping[str, TensorSource], stored: StoredQuantization) -> None:
        self._sources, self._stored = sources, stored

    def all(self) -> dict[str, TensorSource]:
        """The tensors that stand for themselves, and the matrices."""
        others, matrices = dict(self._sources), dict[str, TensorSource]()
        for name in self._sources:
            module, _, kind = name.rpartition(".")
            matrix = self._matrix(module, kind)
            if matrix is None:
                continue
            matrices[f"{module}.weight"] = matrix
            for each in (kind, *_BESIDE):
                if each != "output_scale" or not module.endswith((".k_proj", ".v_proj")):  # which are for the cache
                    others.pop(f"{module}.{each}", None)
            bias = f"{module}.bias"
            if kind == "qweight" and bias in others:
                others[bias] = UnneededBias(others[bias])
        return others | matrices

    def of_experts(self) -> dict[str, TensorSource]:
        """Likewise, where matrices of experts are in MXFP4."""
        others, matrices = dict(self._sources), dict[str, TensorSource]()
        for name in self._sources:
            if not name.endswith(_MX_BLOCKS):
                continue
            module = name.removesuffix(_MX_BLOCKS)
            blocks, scales = others.pop(name), others.pop(f"{module}_scales", None)
            if scales is None or blocks.shape != (*scales.shape, BLOCK // 2):
                found = "none" if scales is None else list(scales.shape)
                raise _Mismatch(f"the scales of {name} {list(blocks.shape)} are {found}")
            matrices[module] = turned(MXFP4Source(blocks, scales))
        return others | matrices

    def _matrix(self, module: str, kind: str) -> QuantizedSource | None:
        """Where a tensor of this kind holds codes."""
        match self._stored.tensors, kind:
            case "awq", "qweight":
                return self._awq(module)
            case "gptq", "qweight":
                return self._gptq(module)
            case "compressed-tensors", "weight_packed":
                return self._in_words(module)
            case "compressed-tensors" | "fp8", "weight" if _eight_bits(self._sources[f"{module}.weight"]) is not None:
                return self._in_bytes(module)
        return None

    def _awq(self, module: str) -> QuantizedSource:
        words, per_word = self._of(module, "qweight"), _WORD // self._stored.bits
        size = words.shape[1] * per_word
        codes = Transposed(_Fields(words, self._stored.bits, 1, size, _AWQ_PLACES))
        zeros = _Fields(self._of(module, "qzeros"), self._stored.bits, 1, size, _AWQ_PLACES)
        return self._grouped(module, codes, Transposed(zeros))

    def _gptq(self, module: str) -> QuantizedSource:
        bits, words = self._stored.bits, self._of(module, "qweight")
        codes = Transposed(_Fields(words, bits, 0, words.shape[0] * _WORD // bits))
        zeros = _Fields(self._of(module, "qzeros"), bits, 1, words.shape[1], less=self._stored.zeros_less)
        return self._grouped(module, codes, Transposed(zeros))

    def _grouped(self, module: str, codes: TensorSource, zeros: TensorSource) -> QuantizedSource:
        """Where groups are as long as the configuration says, or as `g_idx` has them."""
        scales: TensorSource = Transposed(self._of(module, "scales"))
        of_scales, of_zeros = (
            self._blocks(module, each, codes.shape, (1, self._stored.group_size)) for each in (scales, zeros)
        )
        groups = self._groups(module, torch.arange(codes.shape[1]) // of_scales.columns)
        if groups is not None:
            of_scales, of_zeros = (_Blocks(_Gathered(each.source, groups), 1, 1) for each in (of_scales, of_zeros))
        return QuantizedSource(codes, of_scales, of_zeros, bits=self._stored.bits)

    def _in_words(self, module: str) -> QuantizedSource:
        words, shape = self._of(module, "weight_packed"), self._of(module, "weight_shape")
        num_rows, size = shape.read(whole(shape.shape)).tolist()
        bits = next((each for each in (2, 4, 8) if -(-size * each // _WORD) == words.shape[1]), None)
        if bits is None or num_rows != words.shape[0]:
            raise _Mismatch(f"{module}.weight_packed {list(words.shape)} does not hold [{num_rows}, {size}] numbers")
        return self._scaled(module, _Fields(words, bits, 1, size), 1 << (bits - 1), bits)

    def _in_bytes(self, module: str) -> QuantizedSource:
        return self._scaled(module, self._of(module, "weight"), 0, 8)

    def _scaled(self, module: str, codes: TensorSource, zero: int, bits: int) -> QuantizedSource:
        """Where tensors beside them say what codes are, of which `zero` means nothing, unless it is said, too."""
        inverse = f"{module}.weight_scale_inv" in self._sources
        scales = _as_matrix(self._of(module, "weight_scale_inv" if inverse else "weight_scale"))
        blocks = self._blocks(module, scales, codes.shape, self._stored.block or (1, None))
        zeros = None
        if f"{module}.weight_zero_point" in self._sources:
            points = self._of(module, "weight_zero_point")
            if isinstance(points, SafetensorsSource) and points.stored_as == "I32":  # in words, as codes are
                points, zero = _Fields(points, bits, 0, scales.shape[0]), 0
            zeros = _Blocks(_as_matrix(points), blocks.rows, blocks.columns)
        if f"{module}.weight_g_idx" in self._sources:
            groups = self._groups(module, torch.arange(codes.shape[1]) // blocks.columns, "weight_g_idx")
            if groups is not None:
                blocks = _Blocks(_Gathered(blocks.source, groups), 1, 1)
                zeros = None if zeros is None else _Blocks(_Gathered(zeros.source, groups), 1, 1)
        return QuantizedSource(codes, blocks, zeros, zero, bits)

    def _groups(self, module: str, in_order: Tensor, kind: str = "g_idx") -> Tensor | None:
        """Of each input its group, where these are not in order."""
        if f"{module}.{kind}" not in self._sources:
            return None
        source = self._of(module, kind)
        groups = source.read(whole(source.shape)).long()
        if groups.shape != in_order.shape or not 0 <= int(groups.min()) <= int(groups.max()) <= int(in_order.max()):
            raise _Mismatch(f"{module}.{kind} does not name a group for each of {len(in_order)} inputs")
        return None if bool((groups == in_order).all()) else groups

    def _of(self, module: str, kind: str) -> TensorSource:
        found = self._sources.get(f"{module}.{kind}")
        if found is None:
            raise _Mismatch(f"{module} is quantized, and has no {kind}")
        return found

    def _blocks(
        self, module: str, source: TensorSource, shape: tuple[int, ...], given: tuple[int, int | None]
    ) -> _Blocks:
        """What a tensor holds of the blocks of a matrix of this shape, whose sizes were given, or were not."""
        sizes = []
        for size, count, wanted in zip(shape, source.shape, given, strict=True):
            if wanted is not None and -(-size // wanted) == count:
                sizes.append(wanted)
            elif count == 1 or (count > 0 and size % count == 0 and (size == count or len(sizes) > 0)):
                sizes.append(size // count)  # of columns any number may share a scale
            else:
                raise _Mismatch(f"{module}.weight {list(shape)} has {list(source.shape)} scales or zeros")
        return _Blocks(source, *sizes)


def _as_matrix(source: TensorSource) -> TensorSource:
    return source if len(source.shape) == 2 else _AsMatrix(source)


def _eight_bits(source: TensorSource) -> torch.dtype | None:
    """The type of numbers of 8 bits that are stored as they are."""
    return _IN_8_BITS.get(source.stored_as) if isinstance(source, SafetensorsSource) else None
