"""The tensors of a model's files, whatever kind they are."""

from __future__ import annotations

from contextlib import AbstractContextManager

from quire.engine.model_source import ModelInfo

from ..layers.parameter import TensorSource
from .gguf import open_gguf
from .safetensors import open_safetensors


def open_checkpoint(info: ModelInfo) -> AbstractContextManager[dict[str, TensorSource]]:
    """The tensors of a model's files. Raises `ConfigError` when a file is damaged."""
    if info.format == "gguf":
        return open_gguf(info.path, info.hf_config["head_dim"])
    return open_safetensors(info.path)
