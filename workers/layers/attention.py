"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.kernels.ops import AttentionMetadata, paged_attention, write_kv

from ..models.spec import AttentionSpec
from ..parallel import ParallelContext
from .linear import QKVParallelLinear, RowParallelLinear, shard_heads
from .rotary import Rotation, rotate


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer on one rank."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]


class Attention(nn.Module):
    """Projections, rotation, cache write, attention, output projection."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        shard = shard_heads(spec.num_heads, spec.num_kv_heads, parallel.rank, parallel.world_size)
        self._num_heads, self.num_kv_heads = len(shard.heads), len(shard.kv_heads)
        self.qkv = QKVParallelLinear(
            hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, shard, bias=spec.qkv_bias
        )
        part = range(shard.heads.start * spec.head_dim, shard.heads.stop * spec.head_dim)
        self.output = RowParallelLinear(
            spec.num_heads * spec.head_dim, hidden_size, part, parallel, bias=spec.output_bias
        )

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, hidden_size] -> the same shape. Writes the tokens' keys and values to `cache`."""
        num_tokens, head_dim = x.shape[0], self._spec.head_dim
        qkv = self.qkv(x).view(num_tokens, -1, head_dim)
        num_rotated = self._num_heads + self.num_kv_heads
        rotated = rotate(qkv[:, :num_rotated], rotation)  # queries and keys lie side by side: one rotation for both
        query, key, value = rotated[:, : self._num_heads], rotated[:, self._num_heads :], qkv[:, num_rotated:]
        write_kv(key, value, cache.key, cache.value, metadata.slot_mapping)
        attended = paged_attention(query, cache.key, cache.value, metadata, scale=self._spec.scale)
        out: Tensor = self.output(attended.view(num_tokens, self._num_heads * head_dim))
        return out
