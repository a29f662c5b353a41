"""Which implementation runs a model: our own decoder where its family is known."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.model_source import ModelInfo

from .loader.load import check_weights, load_weights
from .models.decoder import Decoder
from .models.families import Family, family_of
from .models.model import Blueprint
from .models.spec import DecoderSpec
from .parallel import ParallelContext


def blueprint_of(info: ModelInfo) -> Blueprint:
    """Raises `ConfigError` when the architecture, or something that its configuration asks for, is not supported."""
    architecture, family = family_of(info.hf_config)
    return NativeBlueprint(architecture, family, family.decoder_spec(info.hf_config, info.max_model_len))


@dataclass(frozen=True, slots=True)
class NativeBlueprint:
    """A `Decoder` of a known family."""

    architecture: str
    family: Family
    spec: DecoderSpec

    @property
    def implementation(self) -> str:
        return "native"

    def build(self, parallel: ParallelContext) -> Decoder:
        return Decoder(self.spec, parallel)

    def load(self, model: Decoder, info: ModelInfo, *, progress: bool) -> None:
        load_weights(model, self.family, info, progress=progress)

    def check(self, model: Decoder, info: ModelInfo) -> None:
        check_weights(model, self.family, info)
