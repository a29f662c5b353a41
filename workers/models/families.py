"""The architectures: how a Hugging Face configuration becomes a `DecoderSpec`, and where checkpoint tensors go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.errors import ConfigError

from ..layers.parameter import WHOLE
from .spec import AttentionSpec, DecoderSpec, LayerSpec, Llama3Scaling, MLPSpec, RotarySpec

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    `modules` maps the names of checkpoint modules (with `{}` for the layer) to (our module, piece). Tensors that match
    `ignored` are known to be of no use.
    """

    spec: Callable[[HFConfig], DecoderSpec]
    modules: Mapping[str, tuple[str, str]]
    ignored: tuple[str, ...] = ()

    def target(self, name: str) -> tuple[str, str] | None:
        """The (parameter, piece) that a checkpoint tensor fills, None for one that has no place."""
        module, _, kind = name.rpartition(".")
        match = re.search(r"\.(\d+)\.", module)
        layer = match[1] if match else ""
        generic = module if match is None else f"{module[: match.start(1)]}{{}}{module[match.end(1) :]}"
        if generic not in self.modules:
            return None
        parameter, piece = self.modules[generic]
        return f"{parameter.format(layer)}.{kind}", piece

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def family_of(config: HFConfig) -> Family:
    """The family of a configuration. Raises `ConfigError` when its architecture is not supported."""
    for architecture in config.get("architectures") or []:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    raise ConfigError(f"model: architecture {config.get('architectures')} is not supported; {', '.join(FAMILIES)} is.")


def _llama_spec(config: HFConfig) -> DecoderSpec:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"model: hidden_act {activation!r} is not supported; 'silu' is.")
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden_size // num_heads
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(f"model: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly.")
    attention_bias = bool(config.get("attention_bias", False))
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        ),
        mlp=MLPSpec(intermediate_size=config["intermediate_size"], bias=bool(config.get("mlp_bias", False))),
    )
    return DecoderSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        norm_eps=config["rms_norm_eps"],
        rotary=_rotary(config, head_dim),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        layers=(layer,) * config["num_hidden_layers"],
    )


def _rotary(config: HFConfig, rotary_dim: int) -> RotarySpec:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (before)."""
    parameters: HFConfig = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base: float = parameters.get("rope_theta", config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RotarySpec(rotary_dim, base)
    if kind != "llama3":
        raise ConfigError(f"model: rope_type {kind!r} is not supported; 'default' and 'llama3' are.")
    scaling = Llama3Scaling(
        factor=parameters["factor"],
        low_freq_factor=parameters["low_freq_factor"],
        high_freq_factor=parameters["high_freq_factor"],
        original_max_position=parameters["original_max_position_embeddings"],
    )
    return RotarySpec(rotary_dim, base, scaling)


_LLAMA_MODULES = {
    "model.embed_tokens": ("embedding", WHOLE),
    "model.layers.{}.input_layernorm": ("layers.{}.attention_norm", WHOLE),
    "model.layers.{}.self_attn.q_proj": ("layers.{}.attention.qkv", "q"),
    "model.layers.{}.self_attn.k_proj": ("layers.{}.attention.qkv", "k"),
    "model.layers.{}.self_attn.v_proj": ("layers.{}.attention.qkv", "v"),
    "model.layers.{}.self_attn.o_proj": ("layers.{}.attention.output", WHOLE),
    "model.layers.{}.post_attention_layernorm": ("layers.{}.mlp_norm", WHOLE),
    "model.layers.{}.mlp.gate_proj": ("layers.{}.mlp.gate_up", "gate"),
    "model.layers.{}.mlp.up_proj": ("layers.{}.mlp.gate_up", "up"),
    "model.layers.{}.mlp.down_proj": ("layers.{}.mlp.down", WHOLE),
    "model.norm": ("norm", WHOLE),
    "lm_head": ("head", WHOLE),
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(_llama_spec, _LLAMA_MODULES, ignored=(r"\.rotary_emb\.inv_freq$",)),
}
