"""Configurations as they lie in published checkpoints, written by older releases of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.workers.models.families import family_of
from quire.workers.models.spec import ChannelScaling, DecoderSpec, LinearScaling, MoESpec, RotarySpec, YarnScaling

SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def spec_of(architecture: str, max_model_len: int = 4096, **config: Any) -> DecoderSpec:
    whole = {"architectures": [architecture], **SIZES, **HEADS, **config}
    return family_of(whole)[1].decoder_spec(whole, max_model_len)


def windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers]


def rotaries(spec: DecoderSpec) -> list[RotarySpec | None]:
    return [layer.attention.rotary for layer in spec.layers]


def test_gemma3_by_pattern() -> None:
    spec = spec_of(
        "Gemma3ForCausalLM",
        head_dim=32,
        sliding_window=512,
        sliding_window_pattern=3,
        rope_theta=1000000.0,
        rope_local_base_freq=20000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=64,
        hidden_activation="gelu_pytorch_tanh",
    )
    local, whole = RotarySpec(32, 20000.0), RotarySpec(32, 1000000.0, LinearScaling(8.0))
    assert windows(spec) == [512, 512, None, 512, 512, None]
    assert rotaries(spec) == [local, local, whole, local, local, whole]
    assert (spec.tie_embeddings, spec.embedding_multiplier, spec.layers[0].attention.scale) == (True, 8.0, 0.125)


def test_gemma2_by_parity() -> None:
    spec = spec_of(
        "Gemma2ForCausalLM", head_dim=16, sliding_window=512, final_logit_softcapping=30.0, attn_logit_softcapping=50.0
    )
    assert windows(spec) == [512, None] * 3
    assert (spec.logits_softcap, spec.layers[0].attention.softcap) == (30.0, 50.0)


def test_cohere2_by_pattern() -> None:
    spec = spec_of("Cohere2ForCausalLM", sliding_window=512, sliding_window_pattern=3, layer_norm_eps=1e-5)
    assert windows(spec) == [512, 512, None, 512, 512, None]
    assert [rotary is None for rotary in rotaries(spec)] == [False, False, True, False, False, True]


@pytest.mark.parametrize(("used", "expected"), [(False, [None] * 6), (True, [None] * 4 + [512] * 2)])
def test_qwen2_windows(used: bool, expected: list[int | None]) -> None:
    spec = spec_of("Qwen2ForCausalLM", use_sliding_window=used, sliding_window=512, max_window_layers=4)
    assert windows(spec) == expected


def test_smollm3_by_interval() -> None:
    spec = spec_of("SmolLM3ForCausalLM", no_rope_layer_interval=3, rope_theta=5e6)
    assert rotaries(spec) == [RotarySpec(16, 5e6), RotarySpec(16, 5e6), None] * 2


@pytest.mark.parametrize(("max_model_len", "factors"), [(1024, (1.0, 1.5)), (1025, (2.0, 4.0))])
@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_longrope(kind: str, max_model_len: int, factors: tuple[float, ...]) -> None:
    scaling = {"type": kind, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
    spec = spec_of(
        "Phi3ForCausalLM",
        max_model_len,
        partial_rotary_factor=0.25,
        original_max_position_embeddings=1024,
        rope_scaling=scaling,
    )
    # sqrt(1 + log(4096 / 1024) / log(1024))
    assert rotaries(spec)[0] == RotarySpec(4, 10000.0, ChannelScaling(factors), magnitude=pytest.approx(1.2**0.5))


def test_qwen2_yarn() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rotary = rotaries(spec_of("Qwen2ForCausalLM", rope_scaling=scaling))[0]
    assert rotary is not None
    assert rotary.scaling == YarnScaling(4.0, 32.0, 1.0, 1024)
    assert rotary.magnitude == pytest.approx(1.138629436)


def test_pythia_rotary() -> None:
    spec = spec_of("GPTNeoXForCausalLM", rotary_pct=0.5, rotary_emb_base=20000, num_key_value_heads=None)
    assert rotaries(spec)[0] == RotarySpec(8, 20000.0)
    assert spec.layers[0].parallel
    assert spec.layers[0].attention.qkv_bias


@pytest.mark.parametrize(
    ("config", "num_kv_heads", "two_norms"),
    [
        ({"multi_query": True, "parallel_attn": True}, 1, False),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2, True),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, False),
        ({"multi_query": False, "parallel_attn": False}, 4, True),
    ],
)
def test_falcon(config: dict[str, Any], num_kv_heads: int, two_norms: bool) -> None:
    layer = spec_of("FalconForCausalLM", **config).layers[0]
    assert layer.attention.num_kv_heads == num_kv_heads
    assert layer.mlp.intermediate_size == 256
    assert (layer.mlp_norm is not None) == two_norms


def test_qwen3_moe_layers() -> None:
    spec = spec_of(
        "Qwen3MoeForCausalLM",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=True,
    )
    assert [isinstance(layer.mlp, MoESpec) for layer in spec.layers] == [False, True, False, False, False, True]
    assert spec.layers[1].mlp == MoESpec(24, 8, 2, renormalize=True)
