"""The decoder: one transformer for all families, built from a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import KVCacheSpec
from quire.kernels.ops import AttentionMetadata

from ..layers.attention import Attention, LayerCache
from ..layers.embedding import VocabParallelEmbedding
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding, Rotation
from ..parallel import ParallelContext
from .spec import DecoderSpec, LayerSpec


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: LayerSpec, model: DecoderSpec, parallel: ParallelContext) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(spec.attention, model.hidden_size, parallel)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = GatedMLP(spec.mlp, model.hidden_size, parallel)

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream; overwritten and returned."""
        x += self.attention(self.attention_norm(x), rotation, cache, metadata)
        x += self.mlp(self.mlp_norm(x))
        return x


class Decoder(nn.Module):
    """One rank of a decoder-only transformer. Weights are uninitialized until a loader fills them.

    Raises `ConfigError` when the model cannot be cut in as many ranks as there are.
    """

    def __init__(self, spec: DecoderSpec, parallel: ParallelContext) -> None:
        super().__init__()
        check_tensor_parallel_size(spec, parallel.world_size)
        self.spec = spec
        self.embedding = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        self.rotary = RotaryEmbedding(spec.rotary)
        layers = [DecoderLayer(layer, spec, parallel) for layer in spec.layers]
        self.layers = nn.ModuleList(layers)
        self._num_kv_heads = [layer.attention.num_kv_heads for layer in layers]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.head = (
            self.embedding
            if spec.tie_embeddings
            else VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        )

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
        rotation = self.rotary(positions, x.dtype)
        for layer, cache, layer_metadata in zip(self.layers, caches, metadata, strict=True):
            x = layer(x, rotation, cache, layer_metadata)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        return self.head.logits(self.norm(hidden))

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """What each layer of this rank caches, in layer order."""
        return [
            KVCacheSpec(
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=layer.attention.head_dim,
                dtype_bytes=dtype.itemsize,
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
