"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.kernels.ops import AttentionMetadata, paged_attention, write_kv

from ..models.spec import AttentionSpec
from ..parallel import ParallelContext
from .linear import QKVParallelLinear, RowParallelLinear, shard_heads
from .qk_norm import qk_norm
from .rotary import Rotation, rotate


class KVScales(NamedTuple):
    """What the numbers of a cache in 8 bits are multiplied by."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer on one rank."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    scales: KVScales


class Attention(nn.Module):
    """Projections, norm, rotation, cache write, attention, output projection."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        shard = shard_heads(spec.num_heads, spec.num_kv_heads, parallel.tensor_rank, parallel.tensor_size)
        self._num_heads, self.num_kv_heads = len(shard.heads), len(shard.kv_heads)
        self.qkv = QKVParallelLinear(
            hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, shard, bias=spec.qkv_bias
        )
        self.qk_norm = qk_norm(spec, shard, parallel)
        part = range(shard.heads.start * spec.head_dim, shard.heads.stop * spec.head_dim)
        self.output = RowParallelLinear(
            spec.num_heads * spec.head_dim, hidden_size, part, parallel, bias=spec.output_bias
        )

    def forward(self, x: Tensor, rotation: Rotation | None, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, hidden_size] -> the same shape. Writes the tokens' keys and values to `cache`."""
        spec = self._spec
        num_tokens = x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, spec.head_dim)
        num_rotated = self._num_heads + self.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.qk_norm is not None:
            rotated = torch.cat(self.qk_norm(rotated[:, : self._num_heads], rotated[:, self._num_heads :]), dim=1)
        if spec.qkv_clip is not None:
            rotated, value = rotated.clamp(-spec.qkv_clip, spec.qkv_clip), value.clamp(-spec.qkv_clip, spec.qkv_clip)
        if rotation is not None:  # queries and keys lie side by side: one rotation for both
            rotated = rotate(rotated, rotation)
        query, key = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        write_kv(
            key,
            value,
            cache.key,
            cache.value,
            metadata.slot_mapping,
            key_scale=cache.scales.key,
            value_scale=cache.scales.value,
        )
        attended = paged_attention(
            query,
            cache.key,
            cache.value,
            metadata,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            key_scale=cache.scales.key,
            value_scale=cache.scales.value,
        )
        out: Tensor = self.output(attended.view(num_tokens, self._num_heads * spec.head_dim))
        return out
