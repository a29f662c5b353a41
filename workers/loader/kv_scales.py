"""The scales with which a checkpoint wants its keys and values stored in 8 bits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo

from ..layers.attention import KVScales
from ..layers.parameter import TensorSource, whole
from .checkpoint import open_checkpoint

# model.layers.3.self_attn.k_scale, or with the names of the tools that calibrate: ...attn.k_scale, ...k_proj.k_scale,
# ...k_proj.output_scale; one of both: ...kv_scale
_NAME = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\..*\b(k|v|kv)(?:_scale|_proj\.output_scale)$")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is such a scale, and so belongs to the cache and to no parameter."""
    return _NAME.search(name) is not None


def kv_scales(config: EngineConfig, info: ModelInfo, num_layers: int) -> list[KVScales]:
    """The scales of every layer: 1 but for a cache in 8 bits of a checkpoint that has some.

    Raises `ConfigError` when the checkpoint's cannot be.
    """
    if config.cache.kv_cache_dtype == "auto" or config.model.load_format == "dummy":
        return [KVScales()] * num_layers
    with open_checkpoint(info) as sources:
        return _read(sources, num_layers, info)


def _read(sources: Mapping[str, TensorSource], num_layers: int, info: ModelInfo) -> list[KVScales]:
    scales = [KVScales()] * num_layers
    for name, source in sources.items():
        match = _NAME.search(name)
        if match is None:
            continue
        layer, kind = int(match[1]), match[2]
        if layer >= num_layers or math.prod(source.shape) != 1:
            raise ConfigError(
                f"model: {name} in {info.path} is no scale of one of {num_layers} layers: it has shape "
                f"{list(source.shape)}; one number per layer is supported."
            )
        scale = float(source.read(whole(source.shape)))
        if not 0 < scale < math.inf:
            raise ConfigError(f"model: {name} in {info.path} is {scale}; a scale is positive and finite.")
        scales[layer] = scales[layer]._replace(**{{"k": "key", "v": "value"}[each]: scale for each in kind})
    return scales
