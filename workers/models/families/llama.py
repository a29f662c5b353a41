"""Llama and those who differ from it by a few lines."""

from __future__ import annotations

from dataclasses import replace

from ..spec import DecoderSpec, LayerSpec, QKNormSpec
from .family import Family, HFConfig, Place, name_map
from .reading import attention_spec, decoder_spec, mlp_spec, rms_norm, windows, with_attention

TOP = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
ATTENTION = {
    "self_attn.q_proj": Place("attention.qkv", ("q",)),
    "self_attn.k_proj": Place("attention.qkv", ("k",)),
    "self_attn.v_proj": Place("attention.qkv", ("v",)),
    "self_attn.o_proj": Place("attention.output"),
}
QK_NORM = {"self_attn.q_norm": Place("attention.qk_norm.q"), "self_attn.k_norm": Place("attention.qk_norm.k")}
GATED_MLP = {
    "mlp.gate_proj": Place("mlp.gate_up", ("gate",)),
    "mlp.up_proj": Place("mlp.gate_up", ("up",)),
    "mlp.down_proj": Place("mlp.down"),
}
FUSED_GATED_MLP = {"mlp.gate_up_proj": Place("mlp.gate_up", ("gate", "up")), "mlp.down_proj": Place("mlp.down")}
NORMS = {"input_layernorm": Place("attention_norm"), "post_attention_layernorm": Place("mlp_norm")}
LLAMA_NAMES = name_map(TOP, "model.layers", ATTENTION | GATED_MLP | NORMS)


def llama(config: HFConfig, max_model_len: int) -> DecoderSpec:
    bias, norm = bool(config.get("attention_bias", False)), rms_norm(config)
    layer = LayerSpec(
        attention=attention_spec(config, max_model_len, qkv_bias=bias, output_bias=bias),
        mlp=mlp_spec(config, bias=bool(config.get("mlp_bias", False))),
        attention_norm=norm,
        mlp_norm=norm,
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm)


def mistral(config: HFConfig, max_model_len: int) -> DecoderSpec:
    window = config.get("sliding_window")
    return with_attention(llama(config, max_model_len), lambda _, spec: replace(spec, sliding_window=window))


def qwen2(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Bias on queries, keys and values; windows, where used, in the upper layers."""
    sliding = bool(config.get("use_sliding_window", False))
    each = windows(config, lambda layer: layer >= config["max_window_layers"]) if sliding else None
    return with_attention(
        llama(config, max_model_len),
        lambda i, spec: replace(spec, qkv_bias=True, output_bias=False, sliding_window=each[i] if each else None),
    )


def qwen3(config: HFConfig, max_model_len: int) -> DecoderSpec:
    bias, norm = bool(config.get("attention_bias", False)), QKNormSpec(rms_norm(config), "head")
    return with_attention(
        qwen2(config, max_model_len),
        lambda _, spec: replace(spec, qkv_bias=bias, output_bias=bias, qk_norm=norm),
    )


def smollm3(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Every so many layers, one without rotation."""
    interval = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])
    ]
    sliding = bool(config.get("use_sliding_window", False))
    each = windows(config, lambda layer: not rotated[layer]) if sliding else None
    return with_attention(
        llama(config, max_model_len),
        lambda i, spec: replace(
            spec, rotary=spec.rotary if rotated[i] else None, sliding_window=each[i] if each else None
        ),
    )


def granite(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Multipliers on embedding, scores, residuals and logits."""
    spec = with_attention(
        llama(config, max_model_len), lambda _, spec: replace(spec, scale=config["attention_multiplier"])
    )
    return replace(
        spec,
        layers=tuple(replace(layer, residual_multiplier=config["residual_multiplier"]) for layer in spec.layers),
        embedding_multiplier=config["embedding_multiplier"],
        logits_multiplier=1.0 / config["logits_scaling"],
    )


def olmo2(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Norms behind the blocks instead of before them, and over all queries and keys of a token."""
    norm = rms_norm(config)
    spec = with_attention(llama(config, max_model_len), lambda _, spec: replace(spec, qk_norm=QKNormSpec(norm, "all")))
    layers = tuple(
        replace(layer, attention_norm=None, mlp_norm=None, attention_out_norm=norm, mlp_out_norm=norm)
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def glm(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Part of each head rotated, in neighbouring pairs; bias on queries, keys and values only."""
    attention = attention_spec(config, max_model_len, interleaved=True, qkv_bias=bool(config["attention_bias"]))
    return with_attention(llama(config, max_model_len), lambda *_: attention)


def glm4(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """GLM with norms on both sides of each block."""
    spec, norm = glm(config, max_model_len), rms_norm(config)
    return replace(
        spec, layers=tuple(replace(layer, attention_out_norm=norm, mlp_out_norm=norm) for layer in spec.layers)
    )


FAMILIES = {
    "LlamaForCausalLM": Family(llama, LLAMA_NAMES),
    "MistralForCausalLM": Family(mistral, LLAMA_NAMES),
    "Qwen2ForCausalLM": Family(qwen2, LLAMA_NAMES),
    "Qwen3ForCausalLM": Family(qwen3, name_map(TOP, "model.layers", ATTENTION | QK_NORM | GATED_MLP | NORMS)),
    "SmolLM3ForCausalLM": Family(smollm3, LLAMA_NAMES, defaults={"tie_word_embeddings": True, "rope_theta": 2e6}),
    "GraniteForCausalLM": Family(
        granite,
        LLAMA_NAMES,
        defaults={
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "Olmo2ForCausalLM": Family(
        olmo2,
        name_map(
            TOP,
            "model.layers",
            {
                **ATTENTION,
                **QK_NORM,
                **GATED_MLP,
                "post_attention_layernorm": Place("attention_out_norm"),
                "post_feedforward_layernorm": Place("mlp_out_norm"),
            },
        ),
    ),
    "Phi3ForCausalLM": Family(
        mistral,
        name_map(
            TOP,
            "model.layers",
            {
                "self_attn.qkv_proj": Place("attention.qkv", ("q", "k", "v")),
                "self_attn.o_proj": Place("attention.output"),
                **FUSED_GATED_MLP,
                **NORMS,
            },
        ),
    ),
    "GlmForCausalLM": Family(
        glm,
        name_map(TOP, "model.layers", ATTENTION | FUSED_GATED_MLP | NORMS),
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "Glm4ForCausalLM": Family(
        glm4,
        name_map(
            TOP,
            "model.layers",
            {
                **ATTENTION,
                **FUSED_GATED_MLP,
                **NORMS,
                "post_self_attn_layernorm": Place("attention_out_norm"),
                "post_mlp_layernorm": Place("mlp_out_norm"),
            },
        ),
        defaults={"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
}
