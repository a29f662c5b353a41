"""The tensors of a model's files, whatever kind they are."""

from __future__ import annotations

from contextlib import AbstractContextManager

from quire.engine.model_source import ModelInfo

from ..layers.parameter import TensorSource, whole
from .gguf import open_gguf
from .quantized import UnneededBias, open_quantized
from .safetensors import SafetensorsSource, open_safetensors

_NUMBERS = {"F32", "F16", "BF16", "F64"}


def strange_type(source: TensorSource) -> str | None:
    """The type of a tensor that means nothing without more (integers, 8 bits): a checkpoint that is quantized,
    whatever its configuration says. None where it is a plain number; GGUF's are dequantized as they are read."""
    stored_as = source.stored_as if isinstance(source, SafetensorsSource) else "F32"
    return None if stored_as in _NUMBERS else stored_as


def open_checkpoint(info: ModelInfo) -> AbstractContextManager[dict[str, TensorSource]]:
    """The tensors of a model's files. Raises `ConfigError` when a file is damaged."""
    if info.format == "gguf":
        return open_gguf(info.path, info.hf_config)
    return open_safetensors(info.path) if info.quantization is None else open_quantized(info.path, info.quantization)


def may_be_left_over(source: TensorSource) -> bool:
    """Whether a tensor that has no place in the model means nothing wrong."""
    return isinstance(source, UnneededBias) and not bool(source.read(whole(source.shape)).any())
