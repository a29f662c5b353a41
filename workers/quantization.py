"""Weights in 8 bits (`model.quantization`), or in as few as their file has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from quire.engine.config import ModelConfig, Quantization
from quire.engine.errors import ConfigError
from quire.engine.model_source import Implementation, ModelInfo
from quire.kernels import ops
from quire.kernels.packed import IN_8_BITS, Packing, common, without_table

from .blueprints import NativeBlueprint, blueprint_of
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .layers.moe import ExpertWeights
from .layers.parameter import (
    Fp8Parameter,
    Int8Parameter,
    PackedParameter,
    PackedRows,
    ScaledParameter,
    ShardedParameter,
)
from .loader.load import StoredAs, how_stored
from .models.decoder import Decoder
from .models.model import Blueprint
from .parallel import ParallelContext

# Where nearly all weights are. Norms, biases, routers and learned positions are small, and stay as they are.
_QUANTIZED = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ExpertWeights)
_PARAMETERS: Mapping[Quantization, type[ScaledParameter]] = {"int8": Int8Parameter, "fp8": Fp8Parameter}


def blueprint_for(config: ModelConfig, info: ModelInfo, device: torch.device) -> Blueprint:
    """How a model is built as it is configured. Raises `ConfigError` like `blueprint_of`, and where it cannot be."""
    native, kind = blueprint_of(info), config.quantization
    if not isinstance(native, NativeBlueprint):
        if kind is None:
            return native
        raise ConfigError(
            f"model.quantization: {native.architecture} is computed by transformers, whose layers Quire cannot "
            "quantize. Leave the option out."
        )
    stored: Mapping[tuple[str, str], StoredAs] = {}
    if (info.format == "gguf" or info.quantization is not None) and config.load_format != "dummy":
        with torch.device("meta"):
            whole = native.build(ParallelContext())
        stored = how_stored(whole, native.family, info)
    rounds_x = kind == "int8" and info.quantization is not None and info.quantization.rounds_x
    kept: Mapping[str, Kept] = {}
    if rounds_x or (kind is None and device.type == "cuda"):
        kept = _kept_in_8_bits(stored, rounds_x=rounds_x)
    packings = {filled: each.packing for filled, each in stored.items()} if kind != "fp8" else {}
    inner: NativeBlueprint | PackedBlueprint = native
    if kind == "int8" or any(packings.values()):
        inner = PackedBlueprint(native, packings, device, in_int8=kind == "int8", kept=frozenset(kept))
    return QuantizedBlueprint(inner, kind, kept) if kind is not None or kept else inner


def _built(native: NativeBlueprint, parallel: ParallelContext) -> Decoder:
    """A model whose large matrices are going to be others, on the default device. For a GPU it is on the host, where
    memory that nobody writes to costs nothing: there might be no room for them. What stays as it is, `_moved` moves.
    """
    with torch.device("cpu") if torch.get_default_device().type == "cuda" else nullcontext():
        return native.build(parallel)


def _moved(model: Decoder) -> Decoder:
    """To a GPU, if that is the default device, before anything is filled."""
    device = torch.get_default_device()
    return model.to(device) if device.type == "cuda" else model


class Kept(NamedTuple):
    """What a matrix is in 8 bits as."""

    kind: Quantization
    scale_columns: int | None = None  # see `ScaledSource`
    in_int8: bool = False  # see `ops.linear_int8`


def _kept_in_8_bits(stored: Mapping[tuple[str, str], StoredAs], *, rounds_x: bool) -> dict[str, Kept]:
    """Parameters whose pieces are all alike in 8 bits in the file, and may stay so: on a GPU, whose memory they might
    not fit into otherwise; or with `rounds_x` those of int8, where what multiplies them is rounded by rows. (Others of
    int8 stay packed.)"""
    of_dtype: dict[torch.dtype | None, Quantization] = {each.stored_as: kind for kind, each in _PARAMETERS.items()}
    found: dict[str, set[Kept | None]] = defaultdict(set)
    for (name, _), each in stored.items():
        kind = of_dtype.get(each.eight_bits)
        is_kept = (kind == "fp8" and not rounds_x) or (kind == "int8" and each.scale_columns is None)
        found[name].add(Kept(kind, each.scale_columns, rounds_x) if kind is not None and is_kept else None)
    return {name: each for name, some in found.items() if len(some) == 1 for each in some if each is not None}


@dataclass(frozen=True, slots=True)
class PackedBlueprint:
    """A native model whose large matrices stay packed as they are in their file, where kernels multiply them so.

    It computes with the numbers that the file stands for, which may become bfloat16 where everything else is. In 8
    bits, kernels may round what multiplies them, but in the head; and what is multiplied and not packed, or in parts
    that do not go together, is packed as it is read, where kernels take that, unless it is the embedding, too.
    """

    native: NativeBlueprint
    packings: Mapping[tuple[str, str], Packing | None]  # of each (parameter, piece), where the file has some
    device: torch.device  # that the model will be on
    in_int8: bool
    kept: frozenset[str]  # parameters that may stay in the 8 bits of their file

    @property
    def architecture(self) -> str:
        return self.native.architecture

    @property
    def implementation(self) -> Implementation:
        return self.native.implementation

    def build(self, parallel: ParallelContext) -> Decoder:
        return _moved(self.pack(parallel))

    def pack(self, parallel: ParallelContext) -> Decoder:
        """With what is not packed on the host, where the default device is a GPU."""
        model = _built(self.native, parallel)
        embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
        for name, module in model.named_modules():
            if not isinstance(module, _QUANTIZED):
                continue
            weight, is_head, is_embedding = module.weight, module is head, module is embedding
            if isinstance(module, VocabParallelEmbedding) and not (is_head or is_embedding):
                continue
            # Of several stages, the last has a tied embedding as its head alone.
            is_looked_up = is_embedding and parallel.is_first_stage
            if f"{name}.weight" in self.kept and self._keeps(module, weight):
                continue
            packing = self._packing(f"{name}.weight", weight)
            if is_looked_up and not ops.looks_up_packed(weight.dtype, self.device):
                continue
            if is_looked_up and not is_head:
                if packing is not None:
                    module.weight = PackedRows.like(weight, packing)
                continue
            # What cannot stay as it is packed is in int8 as what is not packed.
            otherwise = IN_8_BITS if self.in_int8 and not (is_embedding or isinstance(module, ExpertWeights)) else None
            wider = None if packing is None else without_table(packing)
            chosen = self._first_that_fits(weight, packing, wider, otherwise)
            if chosen is not None:
                in_int8 = self.in_int8 and not is_head
                module.weight = PackedParameter.like(
                    weight, chosen, self.device, is_head=is_head, is_looked_up=is_looked_up, in_int8=in_int8
                )
        return model

    def _keeps(self, module: nn.Module, weight: ShardedParameter) -> bool:
        """Whether what is in 8 bits stays so: where x is rounded, if that takes less."""
        if not self.in_int8:
            return True
        num_rows, num_columns = weight.shape[-2:]
        return _rounds_x(module) and ops.pays_in_int8((num_rows, num_columns), weight.dtype, self.device)

    def _first_that_fits(self, weight: ShardedParameter, *packings: Packing | None) -> Packing | None:
        """None where none does."""
        for each in packings:
            if each is not None and PackedParameter.can_pack(weight, each, self.device, in_int8=self.in_int8):
                return each
        return None

    def _packing(self, name: str, weight: ShardedParameter) -> Packing | None:
        """How all of it is packed, by how the file has its pieces, which share one matrix."""
        return common(self.packings.get((name, piece)) for piece in weight.pieces)

    def load(self, model: Decoder, info: ModelInfo, *, progress: bool) -> None:
        self.native.load(model, info, progress=progress)

    def check(self, model: Decoder, info: ModelInfo) -> None:
        self.native.check(model, info)


@dataclass(frozen=True, slots=True)
class QuantizedBlueprint:
    """A native model whose large matrices, where they are not packed, are quantized while they are read, so that it
    never lies in memory whole."""

    inner: NativeBlueprint | PackedBlueprint
    kind: Quantization | None  # of all of them; None: of those alone that are so in the file
    stored: Mapping[str, Kept]  # these, by their parameters' names

    @property
    def architecture(self) -> str:
        return self.inner.architecture

    @property
    def implementation(self) -> Implementation:
        native, how = self.inner.implementation, f"quantized to {self.kind}" if self.kind else "in 8 bits as stored"
        return Implementation(native.kind, f"{native.reason}, {how}")

    def build(self, parallel: ParallelContext) -> Decoder:
        inner = self.inner
        model = inner.pack(parallel) if isinstance(inner, PackedBlueprint) else _built(inner, parallel)
        quantize(model, self.kind, torch.get_default_device(), self.stored)
        return _moved(model)

    def load(self, model: Decoder, info: ModelInfo, *, progress: bool) -> None:
        self.inner.load(model, info, progress=progress)

    def check(self, model: Decoder, info: ModelInfo) -> None:
        self.inner.check(model, info)


@torch.no_grad()
def quantize(model: nn.Module, kind: Quantization | None, device: torch.device, stored: Mapping[str, Kept]) -> None:
    """Give large matrices that are not packed room in 8 bits instead, on a device: as `stored` says of their parameter,
    where this rank's part is cut so, else in `kind`, if any. Nothing was written to them yet, so the memory that they
    asked for was never touched."""
    for name, module in model.named_modules():
        if not isinstance(module, _QUANTIZED) or isinstance(module.weight, PackedParameter | PackedRows):
            continue
        own = stored.get(f"{name}.weight", None if kind is None else Kept(kind))
        if own is None or not ScaledParameter.can_scale(module.weight, own.scale_columns):
            continue
        module.weight = _PARAMETERS[own.kind].like(module.weight, device, own.scale_columns)
        if isinstance(module.weight, Int8Parameter):
            module.weight.in_int8 = own.in_int8 and _rounds_x(module)


def _rounds_x(module: nn.Module) -> bool:
    """Whether what it multiplies may be rounded: heads stay exact, and experts are faster packed."""
    return isinstance(module, ColumnParallelLinear | RowParallelLinear)
