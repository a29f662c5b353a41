"""What a decoder is made of: a family turns a Hugging Face configuration into a `DecoderSpec`.

Specs describe the whole model; a rank's share follows from them and the parallel context. What may differ between
layers (windows, experts, rotations, norms around a block) stands in `LayerSpec`: a family says it layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WHOLE = ""  # the piece of a parameter that one checkpoint tensor fills
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Gate = Activation | Literal["swiglu_oai"]  # of what is multiplied by another projection


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base that stretches the longest wavelength to `max_model_len`; none is needed up to `original_max_position`.

    `transformers` grows the base with the sequence, which leaves keys in the cache that were rotated with another one.
    Here the base is fixed when the model is loaded, so that a token does not depend on when its prefix was computed.
    """

    factor: float
    original_max_position: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3.1 and later: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Wavelengths stretched by `factor` where fewer than `beta_slow` turns fit in the original context, kept where more
    than `beta_fast` do, and in between by a ramp (https://arxiv.org/abs/2309.00071)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    truncate: bool = True  # whether the ends of the ramp are whole channels


@dataclass(frozen=True, slots=True)
class ChannelScaling:
    """One factor for every wavelength (longrope, https://arxiv.org/abs/2402.13753)."""

    factors: tuple[float, ...]  # [rotary_dim / 2]


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | ChannelScaling


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of the first `rotary_dim` channels of a head.

    A pair that is rotated together is (i, i + rotary_dim / 2), or (2i, 2i + 1) where `interleaved`. Sines and cosines
    are multiplied by `magnitude`.
    """

    rotary_dim: int
    base: float
    scaling: RotaryScaling | None = None
    interleaved: bool = False
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm, or layer norm with or without bias. `unit_offset`: the weight is stored minus one."""

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """Normalization of queries and keys before they are rotated.

    scope "head": each head by itself, all with one weight; "own": each head by itself, with a weight of its own (in one
    tensor of the checkpoint, or in `separate` ones); "all": all heads of a token together.
    """

    norm: NormSpec
    scope: Literal["head", "own", "all"]
    separate: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: query head h reads KV head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: RotarySpec | None = None  # None: no rotation
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNormSpec | None = None
    qkv_clip: float | None = None  # queries, keys and values are clamped to +- this, after the norm
    sliding_window: int | None = None  # a token attends to itself and the W - 1 tokens before it
    softcap: float | None = None  # of the scores
    sinks: bool = False  # a learned score of each query head takes part in the softmax, and has no value


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)) where gated, else down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Gated MLPs, of which the router chooses some for each token and mixes them by their softmax probabilities."""

    intermediate_size: int  # of one expert
    num_experts: int
    num_experts_per_token: int
    renormalize: bool  # the chosen probabilities are made to sum to one
    activation: Gate = "silu"
    bias: bool = False  # of the router and of all projections


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. Norms that are None are absent.

    sequential:  x += out(attention(in(x))); x += out(mlp(in(x)))
    parallel:    x += out(attention(in(x))) + out(mlp(in(x))); without an `mlp_norm` both blocks share the first norm
    """

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    attention_norm: NormSpec | None
    mlp_norm: NormSpec | None
    attention_out_norm: NormSpec | None = None
    mlp_out_norm: NormSpec | None = None
    parallel: bool = False
    residual_multiplier: float = 1.0  # of what each block adds to the stream


@dataclass(frozen=True, slots=True)
class PositionSpec:
    """Learned absolute positions: row `position + offset` of a table is added to the token's embedding."""

    num_rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    norm: NormSpec  # before the head
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    positions: PositionSpec | None = None
    embedding_multiplier: float = 1.0  # in the dtype of the model
    head_bias: bool = False
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
