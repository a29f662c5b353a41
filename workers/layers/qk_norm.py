"""Normalization of queries and keys before they are rotated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.elementwise import HeadNorms

from ..models.spec import WHOLE, AttentionSpec, QKNormSpec
from ..parallel import ParallelContext
from .linear import HeadShard
from .norm import Norm
from .parameter import Piece, ShardedParameter, replicated


class QKNorm(nn.Module):
    """(query, key), [num_tokens, this rank's heads, head_dim] each -> the same shapes."""

    def fusible(self) -> HeadNorms | None:
        """The same for a kernel that does more than this; None where it is not a norm that one has."""
        return None


class HeadNorm(QKNorm):
    """Each head by itself, all with one weight."""

    def __init__(self, spec: QKNormSpec, attention: AttentionSpec) -> None:
        super().__init__()
        self._spec = spec.norm
        self.q = Norm(spec.norm, attention.head_dim)
        self.k = Norm(spec.norm, attention.head_dim)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query, key: [num_tokens, this rank's heads, head_dim] -> the same shapes."""
        return self.q(query), self.k(key)

    def fusible(self) -> HeadNorms | None:
        spec = self._spec
        return HeadNorms(self.q.weight, self.k.weight, spec.eps, spec.unit_offset) if spec.kind == "rms" else None


class OwnNorm(QKNorm):
    """Each head by itself, with a weight of its own and without bias."""

    def __init__(self, spec: QKNormSpec, attention: AttentionSpec, shard: HeadShard) -> None:
        super().__init__()
        self.q = _HeadWeights(spec, attention.num_heads, shard.heads, attention.head_dim)
        self.k = _HeadWeights(spec, attention.num_kv_heads, shard.kv_heads, attention.head_dim)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query, key: [num_tokens, this rank's heads, head_dim] -> the same shapes."""
        return self.q(query), self.k(key)


class _HeadWeights(nn.Module):
    """The weights of all heads are small: every rank has them and uses its own."""

    def __init__(self, spec: QKNormSpec, num_heads: int, own: range, head_dim: int) -> None:
        super().__init__()
        self._eps = spec.norm.eps
        self._shape = (head_dim,)
        self._own = slice(own.start, own.stop)
        pieces = replicated((num_heads, head_dim))
        if spec.separate:
            vector = (slice(0, head_dim),)
            pieces = {str(i): Piece(self._shape, vector, (slice(i, i + 1), *vector)) for i in range(num_heads)}
        self.weight = ShardedParameter(torch.empty(num_heads, head_dim), pieces)

    def forward(self, heads: Tensor) -> Tensor:
        return F.layer_norm(heads, self._shape, None, None, self._eps) * self.weight[self._own]


class AllHeadsNorm(QKNorm):
    """RMS norm of all heads of a token together, over the ranks."""

    def __init__(self, spec: QKNormSpec, attention: AttentionSpec, shard: HeadShard, parallel: ParallelContext) -> None:
        super().__init__()
        self._eps = spec.norm.eps
        self._parallel = parallel
        self._counts_key = shard.counts_kv_heads
        head_dim = attention.head_dim
        self._sizes = (attention.num_heads * head_dim, attention.num_kv_heads * head_dim)
        self.q = _ChannelWeights(self._sizes[0], shard.heads, head_dim)
        self.k = _ChannelWeights(self._sizes[1], shard.kv_heads, head_dim)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query, key: [num_tokens, this rank's heads, head_dim] -> the same shapes."""
        squares = query.float().square().sum((-2, -1)), key.float().square().sum((-2, -1))
        sums = torch.stack((squares[0], squares[1] if self._counts_key else torch.zeros_like(squares[1])), dim=1)
        query_sum, key_sum = self._parallel.all_reduce(sums).unbind(dim=1)
        return self.q(self._scaled(query, query_sum, 0)), self.k(self._scaled(key, key_sum, 1))

    def _scaled(self, heads: Tensor, sum_of_squares: Tensor, index: int) -> Tensor:
        factor = torch.rsqrt(sum_of_squares / self._sizes[index] + self._eps)
        return (heads.float() * factor[:, None, None]).to(heads.dtype)


class _ChannelWeights(nn.Module):
    """This rank's part of a weight over all channels of all heads."""

    def __init__(self, size: int, own: range, head_dim: int) -> None:
        super().__init__()
        source = (slice(own.start * head_dim, own.stop * head_dim),)
        piece = Piece((size,), source, (slice(0, len(own) * head_dim),))
        self.weight = ShardedParameter(torch.empty(len(own) * head_dim), {WHOLE: piece})
        self._shape = (len(own), head_dim)

    def forward(self, heads: Tensor) -> Tensor:
        return heads * self.weight.view(self._shape)


def qk_norm(spec: AttentionSpec, shard: HeadShard, parallel: ParallelContext) -> QKNorm | None:
    """The module for `spec.qk_norm`: (query, key) -> (query, key)."""
    norm = spec.qk_norm
    if norm is None:
        return None
    if norm.scope == "head":
        return HeadNorm(norm, spec)
    if norm.scope == "own":
        return OwnNorm(norm, spec, shard)
    return AllHeadsNorm(norm, spec, shard, parallel)
