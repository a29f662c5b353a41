"""Attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.kernels.elementwise import HeadNorms, Rotation, rotate_and_write_kv
from quire.kernels.ops import AttentionMetadata, paged_attention, write_kv

from ..models.spec import WHOLE, AttentionSpec
from ..parallel import ParallelContext
from .linear import HeadShard, QKVParallelLinear, RowParallelLinear, shard_heads
from .parameter import Piece, ShardedParameter, rows, whole
from .qk_norm import qk_norm


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

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # likewise
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Store the keys and values of new tokens, then attend to all: [num_tokens, num_heads, head_dim].

        With a `rotation`, queries and keys are rotated first, and normalized before that with `norms`; nobody may need
        the queries any more.
        """
        scales, slots = self.scales, metadata.slot_mapping
        assert rotation is not None or norms is None, "norms are part of a rotation here"
        if rotation is None:
            write_kv(key, value, self.key, self.value, slots, key_scale=scales.key, value_scale=scales.value)
        else:
            query = rotate_and_write_kv(
                query,
                key,
                value,
                rotation,
                self.key,
                self.value,
                slots,
                key_scale=scales.key,
                value_scale=scales.value,
                norms=norms,
            )
        return paged_attention(
            query,
            self.key,
            self.value,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            key_scale=scales.key,
            value_scale=scales.value,
        )


class Sinks(nn.Module):
    """A score of each query head of this rank, in float32 whatever the model is in."""

    def __init__(self, num_heads: int, shard: HeadShard) -> None:
        super().__init__()
        shape, own = (num_heads,), (len(shard.heads),)
        piece = Piece(shape, rows(shard.heads, shape), whole(own))
        self.weight = ShardedParameter(torch.empty(own, dtype=torch.float32), {WHOLE: piece})


class Attention(nn.Module):
    """Projections, norm, rotation, cache write, attention; and the output projection, for whoever needs it."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        shard = shard_heads(spec.num_heads, spec.num_kv_heads, parallel.tensor_rank, parallel.tensor_size)
        self._num_heads, self.num_kv_heads = len(shard.heads), len(shard.kv_heads)
        self.qkv = QKVParallelLinear(
            hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, shard, bias=spec.qkv_bias
        )
        self.qk_norm = qk_norm(spec, shard, parallel)
        self.sinks = Sinks(spec.num_heads, shard) if spec.sinks else None
        part = range(shard.heads.start * spec.head_dim, shard.heads.stop * spec.head_dim)
        self.output = RowParallelLinear(
            spec.num_heads * spec.head_dim, hidden_size, part, parallel, bias=spec.output_bias
        )

    def forward(self, x: Tensor, rotation: Rotation | None, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """x: [num_tokens, hidden_size] -> what `output` takes, [num_tokens, num_heads * head_dim].

        Writes the tokens' keys and values to `cache`.
        """
        spec = self._spec
        num_tokens = x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, spec.head_dim)
        end_of_keys = self._num_heads + self.num_kv_heads
        query, key, value = heads[:, : self._num_heads], heads[:, self._num_heads : end_of_keys], heads[:, end_of_keys:]
        norms = self._norms_to_fuse() if rotation is not None else None
        if self.qk_norm is not None and norms is None:
            query, key = self.qk_norm(query, key)
        if spec.qkv_clip is not None:
            query, key, value = (x.clamp(-spec.qkv_clip, spec.qkv_clip) for x in (query, key, value))
        attended = cache.attend(
            query,
            key,
            value,
            metadata,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=None if self.sinks is None else self.sinks.weight.data,
            rotation=rotation,
            norms=norms,
        )
        return attended.view(num_tokens, self._num_heads * spec.head_dim)

    def _norms_to_fuse(self) -> HeadNorms | None:
        """Those that can be part of the rotation, if nothing is between them."""
        return None if self.qk_norm is None or self._spec.qkv_clip is not None else self.qk_norm.fusible()
