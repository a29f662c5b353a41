"""Families whose attention and MLP read the stream side by side, all of them or some of their models."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.errors import ConfigError

from ..spec import AttentionSpec, DecoderSpec, LayerSpec, QKNormSpec
from .family import Family, HFConfig, Place, name_map
from .llama import ATTENTION, GATED_MLP, LLAMA_NAMES, NORMS, QK_NORM, TOP
from .reading import attention_spec, decoder_spec, layer_norm, mlp_spec, windows, with_attention


def cohere(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """One norm for both blocks; neighbouring channels rotated together."""
    norm, bias = layer_norm(config, bias=False), bool(config.get("attention_bias", False))
    qk_norm = QKNormSpec(norm, "own") if config.get("use_qk_norm") else None
    layer = LayerSpec(
        attention=attention_spec(
            config, max_model_len, interleaved=True, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm
        ),
        mlp=mlp_spec(config),
        attention_norm=norm,
        mlp_norm=None,
        parallel=True,
    )
    layers = (layer,) * config["num_hidden_layers"]
    return decoder_spec(config, layers, norm, logits_multiplier=config["logit_scale"])


def cohere2(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Three layers with a window and rotation for one with neither."""
    pattern = config.get("sliding_window_pattern") or 4
    each = windows(config, lambda layer: (layer + 1) % pattern != 0)

    def attention(i: int, spec: AttentionSpec) -> AttentionSpec:
        return replace(spec, sliding_window=each[i], rotary=None if each[i] is None else spec.rotary)

    return with_attention(cohere(config, max_model_len), attention)


def stablelm(config: HFConfig, max_model_len: int) -> DecoderSpec:
    norm, parallel = layer_norm(config), bool(config.get("use_parallel_residual", False))
    qk_norm = QKNormSpec(layer_norm(config, bias=False), "own", separate=True) if config.get("qk_layernorm") else None
    layer = LayerSpec(
        attention=attention_spec(
            config, max_model_len, qkv_bias=bool(config.get("use_qkv_bias", False)), qk_norm=qk_norm
        ),
        mlp=mlp_spec(config),
        attention_norm=norm,
        mlp_norm=None if parallel else norm,
        parallel=parallel,
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm)


def gpt_neox(config: HFConfig, max_model_len: int) -> DecoderSpec:
    norm, bias = layer_norm(config), bool(config.get("attention_bias", True))
    layer = LayerSpec(
        attention=attention_spec(config, max_model_len, qkv_bias=bias, output_bias=bias),
        mlp=mlp_spec(config, gated=False, bias=True),
        attention_norm=norm,
        mlp_norm=norm,
        parallel=bool(config.get("use_parallel_residual", True)),
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm)


def phi(config: HFConfig, max_model_len: int) -> DecoderSpec:
    norm = layer_norm(config)
    qk_norm = QKNormSpec(norm, "head") if config.get("qk_layernorm") else None
    layer = LayerSpec(
        attention=attention_spec(config, max_model_len, qkv_bias=True, output_bias=True, qk_norm=qk_norm),
        mlp=mlp_spec(config, gated=False, bias=True),
        attention_norm=norm,
        mlp_norm=None,
        parallel=True,
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm, head_bias=True)


def falcon(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """7B: one KV head, one norm. 40B and 180B ("new architecture"): grouped KV heads, two norms. 11B: grouped, one."""
    if config.get("alibi"):
        raise ConfigError("model: alibi positions (falcon-rw) are not supported.")
    num_heads, new = config["num_attention_heads"], bool(config.get("new_decoder_architecture", False))
    num_kv_heads = config.get("num_kv_heads", num_heads) if new or not config.get("multi_query", True) else 1
    parallel, bias = new or bool(config.get("parallel_attn", True)), bool(config.get("bias", False))
    hidden_size = config["hidden_size"]
    config = {
        **config,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": config.get("ffn_hidden_size", 4 * hidden_size),
    }
    norm = layer_norm(config, "layer_norm_epsilon")
    two_norms = not parallel or (new and config.get("num_ln_in_parallel_attn", 2) == 2)
    layer = LayerSpec(
        attention=attention_spec(config, max_model_len, qkv_bias=bias, output_bias=bias),
        mlp=mlp_spec(config, "activation", gated=False, bias=bias),
        attention_norm=norm,
        mlp_norm=norm if two_norms else None,
        parallel=parallel,
    )
    return decoder_spec(config, (layer,) * config["num_hidden_layers"], norm)


_COHERE_NORM = {"input_layernorm": Place("attention_norm")}
_COHERE_DEFAULTS = {"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5}

FAMILIES = {
    "CohereForCausalLM": Family(
        cohere,
        name_map(TOP, "model.layers", ATTENTION | QK_NORM | GATED_MLP | _COHERE_NORM),
        defaults=_COHERE_DEFAULTS | {"rope_theta": 500000.0},
    ),
    "Cohere2ForCausalLM": Family(
        cohere2,
        name_map(TOP, "model.layers", ATTENTION | GATED_MLP | _COHERE_NORM),
        defaults=_COHERE_DEFAULTS,
    ),
    "StableLmForCausalLM": Family(
        stablelm,
        {
            **LLAMA_NAMES,
            "model.layers.{}.self_attn.q_layernorm.norms.{}": Place("layers.{0}.attention.qk_norm.q", ("{1}",)),
            "model.layers.{}.self_attn.k_layernorm.norms.{}": Place("layers.{0}.attention.qk_norm.k", ("{1}",)),
        },
        defaults={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
    ),
    "GPTNeoXForCausalLM": Family(
        gpt_neox,
        name_map(
            {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "norm", "embed_out": "head"},
            "gpt_neox.layers",
            {
                "attention.query_key_value": Place("attention.qkv", ("q", "k", "v"), per_kv_head=True),
                "attention.dense": Place("attention.output"),
                "mlp.dense_h_to_4h": Place("mlp.up"),
                "mlp.dense_4h_to_h": Place("mlp.down"),
                **NORMS,
            },
        ),
        prefix="gpt_neox.",
        ignored=(r"\.rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$"),
        defaults={"hidden_act": "gelu", "rotary_pct": 0.25, "layer_norm_eps": 1e-5},
    ),
    "PhiForCausalLM": Family(
        phi,
        name_map(
            {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "head"},
            "model.layers",
            {
                "self_attn.q_proj": Place("attention.qkv", ("q",)),
                "self_attn.k_proj": Place("attention.qkv", ("k",)),
                "self_attn.v_proj": Place("attention.qkv", ("v",)),
                "self_attn.dense": Place("attention.output"),
                "self_attn.q_layernorm": Place("attention.qk_norm.q"),
                "self_attn.k_layernorm": Place("attention.qk_norm.k"),
                "mlp.fc1": Place("mlp.up"),
                "mlp.fc2": Place("mlp.down"),
                "input_layernorm": Place("attention_norm"),
            },
        ),
        defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    ),
    "FalconForCausalLM": Family(
        falcon,
        name_map(
            {"transformer.word_embeddings": "embedding", "transformer.ln_f": "norm", "lm_head": "head"},
            "transformer.h",
            {
                "self_attention.query_key_value": Place("attention.qkv", ("q", "k", "v"), per_kv_head=True),
                "self_attention.dense": Place("attention.output"),
                "mlp.dense_h_to_4h": Place("mlp.up"),
                "mlp.dense_4h_to_h": Place("mlp.down"),
                **NORMS,
                "ln_attn": Place("attention_norm"),
                "ln_mlp": Place("mlp_norm"),
            },
        ),
        prefix="transformer.",
        defaults={
            "activation": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
        },
    ),
}
