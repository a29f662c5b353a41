"""The Gemma family: scaled embeddings, norms stored minus one, norms on both sides of the blocks, soft caps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.engine.errors import ConfigError

from ..spec import AttentionSpec, DecoderSpec, LayerSpec, QKNormSpec, RotarySpec
from .family import Family, HFConfig, Place, name_map
from .llama import ATTENTION, GATED_MLP, LLAMA_NAMES, QK_NORM, TOP
from .reading import attention_spec, decoder_spec, mlp_spec, rms_norm, rotary_spec, windows, with_attention

_SANDWICH = {
    "input_layernorm": Place("attention_norm"),
    "post_attention_layernorm": Place("attention_out_norm"),
    "pre_feedforward_layernorm": Place("mlp_norm"),
    "post_feedforward_layernorm": Place("mlp_out_norm"),
}
_DEFAULTS = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}


def gemma(config: HFConfig, max_model_len: int) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("model: use_bidirectional_attention is not supported: Quire decodes from left to right.")
    norm, bias = rms_norm(config, unit_offset=True), bool(config.get("attention_bias", False))
    layer = LayerSpec(
        attention=attention_spec(config, max_model_len, qkv_bias=bias, output_bias=bias),
        mlp=mlp_spec(config, "hidden_activation"),
        attention_norm=norm,
        mlp_norm=norm,
    )
    layers = (layer,) * config["num_hidden_layers"]
    return decoder_spec(config, layers, norm, embedding_multiplier=config["hidden_size"] ** 0.5)


def _sandwiched(
    config: HFConfig, max_model_len: int, change: Callable[[int, AttentionSpec], AttentionSpec]
) -> DecoderSpec:
    """What Gemma 2 and 3 share, with the attention of each layer changed."""
    spec, norm = gemma(config, max_model_len), rms_norm(config, unit_offset=True)
    layers = tuple(replace(layer, attention_out_norm=norm, mlp_out_norm=norm) for layer in spec.layers)
    spec = replace(spec, layers=layers, logits_softcap=config.get("final_logit_softcapping"))
    scale, softcap = config["query_pre_attn_scalar"] ** -0.5, config.get("attn_logit_softcapping")
    return with_attention(spec, lambda i, attention: change(i, replace(attention, scale=scale, softcap=softcap)))


def gemma2(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Every other layer has a window."""
    each = windows(config, lambda layer: layer % 2 == 0)
    return _sandwiched(config, max_model_len, lambda i, spec: replace(spec, sliding_window=each[i]))


def gemma3(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Five layers with a window for one without, the two kinds rotated with bases of their own."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    each = windows(config, lambda layer: (layer + 1) % pattern != 0)
    by_kind = config.get("rope_parameters") or {
        "full_attention": config.get("rope_scaling") or {},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 1e4)},
    }

    def rotary(kind: str) -> RotarySpec:
        return rotary_spec(config, max_model_len, config["head_dim"], parameters=by_kind[kind])

    local, whole = rotary("sliding_attention"), rotary("full_attention")
    norm = QKNormSpec(rms_norm(config, unit_offset=True), "head")
    return _sandwiched(
        # The kinds have their own rotations, which replace the one read for all.
        {**config, "rope_parameters": by_kind["full_attention"]},
        max_model_len,
        lambda i, spec: replace(
            spec, sliding_window=each[i], rotary=whole if each[i] is None else local, qk_norm=norm, softcap=None
        ),
    )


FAMILIES = {
    "GemmaForCausalLM": Family(gemma, LLAMA_NAMES, defaults=_DEFAULTS),
    "Gemma2ForCausalLM": Family(
        gemma2,
        name_map(TOP, "model.layers", ATTENTION | GATED_MLP | _SANDWICH),
        defaults=_DEFAULTS | {"query_pre_attn_scalar": 256, "head_dim": 256},
    ),
    "Gemma3ForCausalLM": Family(
        gemma3,
        name_map(TOP, "model.layers", ATTENTION | QK_NORM | GATED_MLP | _SANDWICH),
        defaults=_DEFAULTS | {"query_pre_attn_scalar": 256, "head_dim": 256, "rope_theta": 1e6},
    ),
}
