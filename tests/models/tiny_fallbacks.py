"""Small random models of architectures that our own decoder does not know."""

from __future__ import annotations

from collections.abc import Mapping

from tiny_families import WINDOW, TinyFamily

_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager", "moe_intermediate_size": 32}
_MLA = {
    **_EXPERTS,
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,  # shorter than keys, which have 24
}


def _model(name: str, dropped: tuple[str, ...] = (), **settings: object) -> TinyFamily:
    return TinyFamily(f"{name}ForCausalLM", f"{name}Config", settings, dropped)


TINY_FALLBACKS: Mapping[str, TinyFamily] = {
    "deepseek-v2": _model("DeepseekV2", q_lora_rank=None, topk_method="group_limited_greedy", **_MLA),
    "deepseek-v3": _model("DeepseekV3", q_lora_rank=24, **_MLA),
    # Four experts of one tensor each in the file, in one parameter of the model; a gate that is kept apart.
    "qwen2-moe": _model("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=40, **_EXPERTS),
    "olmo": _model("Olmo", clip_qkv=1.5),
    "exaone4": _model("Exaone4", sliding_window=WINDOW, sliding_window_pattern=4),
    "ernie4-5": _model("Ernie4_5", head_dim=16),
    "seed-oss": _model("SeedOss", head_dim=16),
    "nemotron": _model("Nemotron"),
    "persimmon": _model("Persimmon", ("num_key_value_heads",)),
    # Learned positions, one KV head, tied embeddings.
    "gpt-bigcode": TinyFamily(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 256, "n_inner": 70},
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "max_position_embeddings"),
    ),
}  # fmt: skip
