"""What a decoder is made of: a family turns a Hugging Face configuration into a `DecoderSpec`.

Specs describe the whole model; a rank's share follows from them and the parallel context. What differs between layers
(windows, experts, norms around a block) belongs in `LayerSpec`, so that a family can say it layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3.1 and later: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated against each other."""

    rotary_dim: int
    base: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: query head h reads KV head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm, attention, norm, MLP, each block added to the residual stream."""

    attention: AttentionSpec
    mlp: MLPSpec


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    rotary: RotarySpec
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
