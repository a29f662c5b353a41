"""The architectures: how a Hugging Face configuration becomes a `DecoderSpec`, and where checkpoint tensors go.

A new one is a function that returns a spec and a map of names, in the file of its nearest relatives.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.errors import ConfigError

from . import gemma, gpt, llama, moe, parallel_residual
from .family import Family, HFConfig, Place

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **parallel_residual.FAMILIES,
    **gpt.FAMILIES,
    **moe.FAMILIES,
}

__all__ = ["FAMILIES", "Family", "HFConfig", "Place", "family_of"]


def family_of(config: HFConfig) -> tuple[str, Family]:
    """The architecture of a configuration and its family. Raises `ConfigError` when there is none."""
    for architecture in config.get("architectures") or []:
        if architecture in FAMILIES:
            return architecture, FAMILIES[architecture]
    raise ConfigError(f"model: architecture {config.get('architectures')} is not supported; {', '.join(FAMILIES)} are.")
