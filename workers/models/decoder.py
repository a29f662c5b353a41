"""The decoder: one transformer for all families, built from a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import KVCacheSpec
from quire.kernels.ops import AttentionMetadata

from ..layers.attention import Attention, LayerCache
from ..layers.embedding import PositionEmbedding, VocabParallelEmbedding
from ..layers.mlp import MLP, GatedMLP
from ..layers.moe import MixtureOfExperts
from ..layers.norm import Norm, norm_or_identity
from ..layers.rotary import RotaryEmbedding, Rotation
from ..parallel import ParallelContext
from .spec import DecoderSpec, LayerSpec, MLPSpec, MoESpec


class DecoderLayer(nn.Module):
    """Attention and an MLP, each added to the residual stream, one after the other or side by side."""

    def __init__(self, spec: LayerSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        self.attention_norm = norm_or_identity(spec.attention_norm, hidden_size)
        self.attention = Attention(spec.attention, hidden_size, parallel)
        self.attention_out_norm = norm_or_identity(spec.attention_out_norm, hidden_size)
        self.mlp_norm = norm_or_identity(spec.mlp_norm, hidden_size)
        self.mlp = _mlp(spec.mlp, hidden_size, parallel)
        self.mlp_out_norm = norm_or_identity(spec.mlp_out_norm, hidden_size)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream; overwritten and returned."""
        spec = self._spec
        normed = self.attention_norm(x)
        attended = self.attention_out_norm(self.attention(normed, rotation, cache, metadata))
        if spec.parallel:
            mlp_input = normed if spec.mlp_norm is None else self.mlp_norm(x)
            attended += self.mlp_out_norm(self.mlp(mlp_input))
            return x.add_(attended, alpha=spec.residual_multiplier)
        x.add_(attended, alpha=spec.residual_multiplier)
        return x.add_(self.mlp_out_norm(self.mlp(self.mlp_norm(x))), alpha=spec.residual_multiplier)


class Decoder(nn.Module):
    """One rank of a decoder-only transformer. Weights are uninitialized until a loader fills them.

    Raises `ConfigError` when the model cannot be cut in as many ranks as there are.
    """

    embedding_multiplier: Tensor  # []

    def __init__(self, spec: DecoderSpec, parallel: ParallelContext) -> None:
        super().__init__()
        check_tensor_parallel_size(spec, parallel.world_size)
        self.spec = spec
        self.embedding = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        # A tensor, since it is rounded to the dtype of the model, as it was in training.
        self.register_buffer("embedding_multiplier", torch.tensor(spec.embedding_multiplier), persistent=False)
        self.positions = None if spec.positions is None else PositionEmbedding(spec.positions, spec.hidden_size)
        # Layers with equal specs share one rotation, computed once per step.
        wanted = [layer.attention.rotary for layer in spec.layers]
        rotary_specs = list(dict.fromkeys(rotary for rotary in wanted if rotary is not None))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rotary) for rotary in rotary_specs)
        self._rotary_of_layer = [None if rotary is None else rotary_specs.index(rotary) for rotary in wanted]
        layers = [DecoderLayer(layer, spec.hidden_size, parallel) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self._num_kv_heads = [layer.attention.num_kv_heads for layer in layers]
        self.norm = Norm(spec.norm, spec.hidden_size)
        self.head = (
            self.embedding
            if spec.tie_embeddings
            else VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel, bias=spec.head_bias)
        )

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """token_ids, positions: [num_tokens] int64; caches, metadata: one per layer -> [num_tokens, hidden_size].

        The final norm is left to `logits`, which only the rows that sample go through.
        """
        x: Tensor = self.embedding(token_ids)
        if self.spec.embedding_multiplier != 1.0:
            x *= self.embedding_multiplier
        if self.positions is not None:
            x += self.positions(positions)
        rotations = [rotary(positions, x.dtype) for rotary in self.rotaries]
        for layer, rotary, cache, layer_metadata in zip(
            self.layers, self._rotary_of_layer, caches, metadata, strict=True
        ):
            x = layer(x, None if rotary is None else rotations[rotary], cache, layer_metadata)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        logits = self.head.logits(self.norm(hidden))
        if self.spec.logits_multiplier != 1.0:
            logits = logits * self.spec.logits_multiplier
        softcap = self.spec.logits_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """What each layer of this rank caches, in layer order."""
        return [
            KVCacheSpec(
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=layer.attention.head_dim,
                dtype_bytes=dtype.itemsize,
                sliding_window=layer.attention.sliding_window,
            )
            for num_kv_heads, layer in zip(self._num_kv_heads, self.spec.layers, strict=True)
        ]


def check_tensor_parallel_size(spec: DecoderSpec, size: int) -> None:
    """Raise `ConfigError` when a rank would be left without an attention head (or a column of an MLP).

    Parts may be unequal, so every smaller size works.
    """
    limit = min(min(layer.attention.num_heads, layer.mlp.intermediate_size) for layer in spec.layers)
    if size > limit:
        raise ConfigError(
            f"tensor_parallel_size: {size} ranks cannot share {limit} attention heads; sizes 1 to {limit} work."
        )


def _mlp(spec: MLPSpec | MoESpec, hidden_size: int, parallel: ParallelContext) -> nn.Module:
    if isinstance(spec, MoESpec):
        return MixtureOfExperts(spec, hidden_size, parallel)
    return (GatedMLP if spec.gated else MLP)(spec, hidden_size, parallel)
