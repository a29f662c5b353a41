"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.errors import ConfigError

from ..spec import DecoderSpec, MoESpec, QKNormSpec
from .family import Family, HFConfig, Place, name_map
from .llama import ATTENTION, GATED_MLP, NORMS, QK_NORM, TOP, llama, mistral, qwen3
from .reading import activation, rms_norm, windows, with_attention

# Written by transformers 5 where it is told not to keep the original names; GGUF files have gate and up apart.
_STACKED_EXPERTS = {
    "mlp.gate": Place("mlp.router"),
    "mlp.experts.gate_up_proj": Place("mlp.gate_up", ("gate", "up"), stacked=True),
    "mlp.experts.gate_proj": Place("mlp.gate_up", ("gate",), stacked=True),
    "mlp.experts.up_proj": Place("mlp.gate_up", ("up",), stacked=True),
    "mlp.experts.down_proj": Place("mlp.down", ("down",), stacked=True),
}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # the numbers of "swiglu_oai"
# gpt-oss: [experts, in, out], gates and ups taking turns; GGUF files have them apart.
_TURNED_EXPERTS = {
    "mlp.experts.gate_up_proj": Place("mlp.gate_up", ("gate", "up"), stacked=True, transposed=True, interleaved=True),
    "mlp.experts.gate_up_proj_bias": Place("mlp.gate_up", ("gate", "up"), stacked=True, interleaved=True, kind="bias"),
    "mlp.experts.gate_proj": Place("mlp.gate_up", ("gate",), stacked=True, transposed=True),
    "mlp.experts.up_proj": Place("mlp.gate_up", ("up",), stacked=True, transposed=True),
    "mlp.experts.down_proj": Place("mlp.down", ("down",), stacked=True, transposed=True),
    "mlp.experts.down_proj_bias": Place("mlp.down", ("down",), stacked=True, kind="bias"),
}
_EXPERTS = _STACKED_EXPERTS | {
    "mlp.experts.{}.gate_proj": Place("mlp.gate_up", ("gate.{1}",)),
    "mlp.experts.{}.up_proj": Place("mlp.gate_up", ("up.{1}",)),
    "mlp.experts.{}.down_proj": Place("mlp.down", ("down.{1}",)),
}


def mixtral(config: HFConfig, max_model_len: int) -> DecoderSpec:
    experts = MoESpec(
        config["intermediate_size"],
        config["num_local_experts"],
        config["num_experts_per_tok"],
        renormalize=True,
        activation=activation(config),
    )
    spec = mistral(config, max_model_len)
    return replace(spec, layers=tuple(replace(layer, mlp=experts) for layer in spec.layers))


def qwen3_moe(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Plain MLPs in the layers that are named, experts in (every so many of) the others; a window on all or none."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    spec = with_attention(
        qwen3({**config, "use_sliding_window": False}, max_model_len),
        lambda _, attention: replace(attention, sliding_window=window),
    )
    experts = MoESpec(
        config["moe_intermediate_size"],
        config.get("num_experts") or config["num_local_experts"],
        config["num_experts_per_tok"],
        renormalize=bool(config.get("norm_topk_prob", False)),
        activation=activation(config),
    )
    plain, every = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    layers = tuple(
        layer if i in plain or (i + 1) % every else replace(layer, mlp=experts) for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def olmoe(config: HFConfig, max_model_len: int) -> DecoderSpec:
    qk_norm, clip = QKNormSpec(rms_norm(config), "all"), config.get("clip_qkv")
    spec = with_attention(
        llama(config, max_model_len), lambda _, attention: replace(attention, qk_norm=qk_norm, qkv_clip=clip)
    )
    experts = MoESpec(
        config["intermediate_size"],
        config["num_experts"],
        config["num_experts_per_tok"],
        renormalize=bool(config.get("norm_topk_prob", False)),
        activation=activation(config),
    )
    return replace(spec, layers=tuple(replace(layer, mlp=experts) for layer in spec.layers))


def gpt_oss(config: HFConfig, max_model_len: int) -> DecoderSpec:
    """Biases everywhere, scores that sink, and windows in every second layer."""
    for key, value in _SWIGLU.items():
        if config.get(key, value) != value:
            raise ConfigError(f"model: {key} {config[key]!r} is not supported; {value} is.")
    each = windows(config, lambda layer: layer % 2 == 0)
    experts = MoESpec(
        config["intermediate_size"],
        config["num_local_experts"],
        config["num_experts_per_tok"],
        renormalize=True,
        activation="swiglu_oai",
        bias=True,
    )
    spec = with_attention(
        llama(config, max_model_len), lambda i, attention: replace(attention, sliding_window=each[i], sinks=True)
    )
    return replace(spec, layers=tuple(replace(layer, mlp=experts) for layer in spec.layers))


FAMILIES = {
    "MixtralForCausalLM": Family(
        mixtral,
        name_map(
            TOP,
            "model.layers",
            {
                **ATTENTION,
                **NORMS,
                **_STACKED_EXPERTS,
                "block_sparse_moe.gate": Place("mlp.router"),
                "block_sparse_moe.experts.{}.w1": Place("mlp.gate_up", ("gate.{1}",)),
                "block_sparse_moe.experts.{}.w3": Place("mlp.gate_up", ("up.{1}",)),
                "block_sparse_moe.experts.{}.w2": Place("mlp.down", ("down.{1}",)),
            },
        ),
        defaults={"rope_theta": 1e6},
    ),
    "Qwen3MoeForCausalLM": Family(
        qwen3_moe, name_map(TOP, "model.layers", ATTENTION | QK_NORM | GATED_MLP | NORMS | _EXPERTS)
    ),
    "GptOssForCausalLM": Family(
        gpt_oss,
        name_map(
            TOP,
            "model.layers",
            {
                **ATTENTION,
                **NORMS,
                **_TURNED_EXPERTS,
                "self_attn.sinks": Place("attention.sinks"),
                "mlp.router": Place("mlp.router"),
            },
        ),
        defaults={"attention_bias": True, "rope_theta": 150000.0},
    ),
    "OlmoeForCausalLM": Family(olmoe, name_map(TOP, "model.layers", ATTENTION | QK_NORM | NORMS | _EXPERTS)),
}
