"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from ..spec import DecoderSpec, MoESpec, QKNormSpec
from .family import Family, HFConfig, Place, name_map
from .llama import ATTENTION, GATED_MLP, NORMS, QK_NORM, TOP, llama, mistral, qwen3
from .reading import activation, rms_norm, with_attention

# Written by transformers 5 where it is told not to keep the original names; GGUF files have gate and up apart.
_STACKED_EXPERTS = {
    "mlp.gate": Place("mlp.router"),
    "mlp.experts.gate_up_proj": Place("mlp.gate_up", ("gate", "up"), stacked=True),
    "mlp.experts.gate_proj": Place("mlp.gate_up", ("gate",), stacked=True),
    "mlp.experts.up_proj": Place("mlp.gate_up", ("up",), stacked=True),
    "mlp.experts.down_proj": Place("mlp.down", ("down",), stacked=True),
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
    "OlmoeForCausalLM": Family(olmoe, name_map(TOP, "model.layers", ATTENTION | QK_NORM | NORMS | _EXPERTS)),
}
