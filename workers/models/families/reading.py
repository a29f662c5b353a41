"""Reads what Hugging Face configurations of many families have in common, in today's and in older spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.errors import ConfigError

from ..spec import (
    Activation,
    AttentionSpec,
    ChannelScaling,
    DecoderSpec,
    DynamicScaling,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    MLPSpec,
    NormSpec,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from .family import HFConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def attention_spec(config: HFConfig, max_model_len: int, *, interleaved: bool = False, **changes: Any) -> AttentionSpec:
    """Rotated grouped-query attention over all tokens; `changes` are fields of `AttentionSpec`."""
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"model: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly.")
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=rotary_spec(config, max_model_len, head_dim, interleaved=interleaved),
    )
    return replace(spec, **changes)


def rms_norm(config: HFConfig, **changes: Any) -> NormSpec:
    return replace(NormSpec("rms", config["rms_norm_eps"]), **changes)


def layer_norm(config: HFConfig, key: str = "layer_norm_eps", *, bias: bool = True) -> NormSpec:
    return NormSpec("layer", config[key], bias=bias)


def mlp_spec(config: HFConfig, activation_key: str = "hidden_act", **changes: Any) -> MLPSpec:
    return replace(MLPSpec(config["intermediate_size"], activation(config, activation_key)), **changes)


def activation(config: HFConfig, key: str = "hidden_act") -> Activation:
    name = config.get(key, "silu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"model: {key} {name!r} is not supported; {', '.join(_ACTIVATIONS)} are.")
    return _ACTIVATIONS[name]


def decoder_spec(config: HFConfig, layers: tuple[LayerSpec, ...], norm: NormSpec, **changes: Any) -> DecoderSpec:
    spec = DecoderSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        norm=norm,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        layers=layers,
    )
    return replace(spec, **changes)


def with_attention(spec: DecoderSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> DecoderSpec:
    """The same decoder with the attention of each layer changed."""
    layers = tuple(replace(layer, attention=change(i, layer.attention)) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def windows(config: HFConfig, is_sliding: Callable[[int], bool]) -> list[int | None]:
    """The sliding window of each layer: by `layer_types` where given, else by `is_sliding(layer)`."""
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    types = config.get("layer_types") or [
        "sliding_attention" if is_sliding(layer) else "full_attention" for layer in range(num_layers)
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != num_layers:
        raise ConfigError(f"model: layer_types {types} is not supported for {num_layers} layers.")
    return [window if kind == "sliding_attention" else None for kind in types]


def rotary_spec(
    config: HFConfig,
    max_model_len: int,
    head_dim: int,
    *,
    parameters: HFConfig | None = None,
    interleaved: bool = False,
) -> RotarySpec:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` and so on (before)."""
    if parameters is None:
        parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}

    def get(name: str, old_name: str, default: float) -> float:
        return parameters.get(name) or config.get(name) or config.get(old_name) or default

    base = float(get("rope_theta", "rotary_emb_base", 10000.0))
    rotary_dim = int(head_dim * get("partial_rotary_factor", "rotary_pct", 1.0))
    scaling, magnitude = _scaling(config, parameters, max_model_len)
    return RotarySpec(rotary_dim, base, scaling, interleaved=interleaved, magnitude=magnitude)


def _scaling(config: HFConfig, parameters: HFConfig, max_model_len: int) -> tuple[RotaryScaling | None, float]:
    """The scaling, and what sines and cosines are multiplied with."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if "short_factor" in parameters:  # Phi-3 once called this kind su, and once yarn
        kind = "longrope"
    limit = config["max_position_embeddings"]
    original = (
        parameters.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or limit
    )
    factor = parameters.get("factor") or limit / original
    match kind:
        case "default":
            return None, 1.0
        case "linear":
            return LinearScaling(factor), 1.0
        case "dynamic":
            return DynamicScaling(factor, limit, max_model_len), 1.0
        case "llama3":
            low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
            return Llama3Scaling(factor, low, high, original), 1.0
        case "yarn":
            beta_fast, beta_slow = parameters.get("beta_fast") or 32.0, parameters.get("beta_slow") or 1.0
            scaling = YarnScaling(factor, beta_fast, beta_slow, original, parameters.get("truncate", True))
            return scaling, _yarn_magnitude(parameters, factor)
        case "longrope":
            # One choice for the whole service: a cached key must not depend on how long its request will become.
            factors = parameters["long_factor" if max_model_len > original else "short_factor"]
            default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return ChannelScaling(tuple(factors)), parameters.get("attention_factor") or default
    kinds = "default, linear, dynamic, llama3, yarn and longrope"
    raise ConfigError(f"model: rope_type {kind!r} is not supported; {kinds} are.")


def _yarn_magnitude(parameters: HFConfig, factor: float) -> float:
    def by(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return by(mscale) / by(mscale_all_dim) if mscale and mscale_all_dim else by(1.0)
