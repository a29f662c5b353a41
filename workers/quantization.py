"""Weights in fewer bits than they were stored with: `model.quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from quire.engine.config import ModelConfig, Quantization
from quire.engine.errors import ConfigError
from quire.engine.model_source import Implementation, ModelInfo

from .blueprints import NativeBlueprint, blueprint_of
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import ColumnParallelLinear, RowParallelLinear
from .layers.moe import ExpertWeights
from .layers.parameter import Fp8Parameter, Int8Parameter, ScaledParameter
from .models.decoder import Decoder
from .models.model import Blueprint
from .parallel import ParallelContext

# Where nearly all weights are. Norms, biases, routers and learned positions are small, and stay as they are.
_QUANTIZED = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ExpertWeights)
_PARAMETERS: Mapping[Quantization, type[ScaledParameter]] = {"int8": Int8Parameter, "fp8": Fp8Parameter}


def blueprint_for(config: ModelConfig, info: ModelInfo) -> Blueprint:
    """How a model is built as it is configured. Raises `ConfigError` like `blueprint_of`, and where it cannot be."""
    blueprint = blueprint_of(info)
    return blueprint if config.quantization is None else quantized(blueprint, config.quantization)


def quantized(blueprint: Blueprint, kind: Quantization) -> Blueprint:
    """The same model with weights in 8 bits. Raises `ConfigError` where its layers are not ours."""
    if not isinstance(blueprint, NativeBlueprint):
        raise ConfigError(
            f"model.quantization: {blueprint.architecture} is computed by transformers, whose layers Quire cannot "
            "quantize. Leave the option out."
        )
    return QuantizedBlueprint(blueprint, kind)


@dataclass(frozen=True, slots=True)
class QuantizedBlueprint:
    """A native model whose large matrices are quantized while they are read, so that it never lies in memory whole."""

    native: NativeBlueprint
    kind: Quantization

    @property
    def architecture(self) -> str:
        return self.native.architecture

    @property
    def implementation(self) -> Implementation:
        native = self.native.implementation
        return Implementation(native.kind, f"{native.reason}, its weights in {self.kind}")

    def build(self, parallel: ParallelContext) -> Decoder:
        """The large matrices are on the default device. On a GPU, all else is on the host still, where memory that
        nobody writes to costs nothing: the weights would not fit as they were stored."""
        device = torch.get_default_device()
        with torch.device("cpu") if device.type == "cuda" else nullcontext():
            model = self.native.build(parallel)
        for module in model.modules():
            if isinstance(module, _QUANTIZED):
                _quantize(module, _PARAMETERS[self.kind], device)
        return model

    def load(self, model: Decoder, info: ModelInfo, *, progress: bool) -> None:
        self.native.load(model, info, progress=progress)

    def check(self, model: Decoder, info: ModelInfo) -> None:
        self.native.check(model, info)


def _quantize(module: nn.Module, parameter: type[ScaledParameter], device: torch.device) -> None:
    """Nothing was written to the weight yet, so the memory that it asked for was never touched."""
    with torch.no_grad():
        module.weight = parameter.like(module.weight, device)  # type: ignore[arg-type]
