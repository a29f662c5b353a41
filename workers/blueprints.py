"""Which implementation runs a model: our own decoder where its family is known, else `transformers`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.model_source import Implementation, ModelInfo

from .loader.load import check_weights, load_weights
from .models.decoder import Decoder
from .models.families import Family, family_of
from .models.model import Blueprint
from .models.spec import DecoderSpec
from .parallel import ParallelContext


def blueprint_of(info: ModelInfo) -> Blueprint:
    """Raises `ConfigError` when the architecture, or something that its configuration asks for, is not supported."""
    if info.implementation.kind == "transformers":
        from .fallback import FallbackBlueprint  # brings the models of transformers

        return FallbackBlueprint.of(info)
    architecture, family = family_of(info.hf_config)
    spec = family.decoder_spec(info.hf_config, info.max_model_len)
    return NativeBlueprint(architecture, info.implementation, family, spec)


@dataclass(frozen=True, slots=True)
class NativeBlueprint:
    """A `Decoder` of a known family."""

    architecture: str
    implementation: Implementation
    family: Family
    spec: DecoderSpec

    def build(self, parallel: ParallelContext) -> Decoder:
        return Decoder(self.spec, parallel)

    def load(self, model: Decoder, info: ModelInfo, *, progress: bool) -> None:
        load_weights(model, self.family, info, progress=progress)

    def check(self, model: Decoder, info: ModelInfo) -> None:
        check_weights(model, self.family, info)
