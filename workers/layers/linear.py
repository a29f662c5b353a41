"""Linear layers split over the ranks: by output rows (column parallel) or by input columns (row parallel).

A weight is `[out_features, in_features]` as in `torch.nn.Linear`. Parts need not be equal: a column-parallel layer is
always followed by a row-parallel one cut at the same places, whose partial sums are added over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import split_range

from ..models.spec import WHOLE
from ..parallel import ParallelContext
from .parameter import Piece, ShardedParameter, replicated, rows, whole


class ColumnParallelLinear(nn.Module):
    """Several projections of one input in one weight, each cut by output rows. No communication.

    `outputs` names the projections in the order in which they lie in the weight: (piece, whole size, this rank's part).
    """

    def __init__(self, in_features: int, outputs: Sequence[tuple[str, int, range]], *, bias: bool = False) -> None:
        super().__init__()
        self.sizes = [len(part) for _, _, part in outputs]
        weights, biases, start = {}, {}, 0
        for name, size, part in outputs:
            target = range(start, start + len(part))
            shape = (size, in_features)
            weights[name] = Piece(shape, rows(part, shape), rows(target, shape))
            biases[name] = Piece((size,), rows(part, (size,)), rows(target, (size,)))
            start = target.stop
        self.weight = ShardedParameter(torch.empty(start, in_features), weights)
        self.bias = ShardedParameter(torch.empty(start), biases) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of this rank's parts]."""
        return self.weight.linear(x, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Projections of equal size that are cut in the same way (gate and up)."""

    def __init__(
        self, in_features: int, size: int, names: Sequence[str], parallel: ParallelContext, *, bias: bool = False
    ) -> None:
        part = parallel.split(size)
        super().__init__(in_features, [(name, size, part) for name in names], bias=bias)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, this rank's part]: activation(gate) * up, of two projections."""
        return self.weight.linear_gated(x, self.bias, activation)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections of the heads of one rank."""

    def __init__(
        self, in_features: int, num_heads: int, num_kv_heads: int, head_dim: int, shard: HeadShard, bias: bool
    ):
        def features(heads: range) -> range:
            return range(heads.start * head_dim, heads.stop * head_dim)

        query, kv = features(shard.heads), features(shard.kv_heads)
        outputs = [
            ("q", num_heads * head_dim, query),
            ("k", num_kv_heads * head_dim, kv),
            ("v", num_kv_heads * head_dim, kv),
        ]
        super().__init__(in_features, outputs, bias=bias)


class RowParallelLinear(nn.Module):
    """A projection whose input lies on the ranks in parts; the result is summed over them and whole on each."""

    def __init__(
        self, in_features: int, out_features: int, part: range, parallel: ParallelContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self._parallel = parallel
        shape, own = (out_features, in_features), (out_features, len(part))
        piece = Piece(shape, (slice(0, out_features), slice(part.start, part.stop)), whole(own))
        self.weight = ShardedParameter(torch.empty(own), {WHOLE: piece})
        self.bias = ShardedParameter(torch.empty(out_features), replicated((out_features,))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, this rank's part of in_features] -> [num_tokens, out_features]."""
        # The bias belongs to the sum, so it is added once.
        return self._parallel.all_reduce(self.weight.linear(x, self.bias if self._parallel.tensor_rank == 0 else None))


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The heads of one rank, contiguous. Every query head stands on a rank that has its KV head."""

    heads: range
    kv_heads: range
    counts_kv_heads: bool = True  # this rank is the first that has them: sums over the ranks take each once


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """Deal the heads to the ranks, evenly or not, so that nothing is padded and every rank has some.

    With at least as many KV heads as ranks, KV heads are dealt out and take their query heads along (the ranks need
    not be equal, since what follows attention is summed over them):

        9 heads, 3 KV heads, 2 ranks:   rank 0: KV 0-1, heads 0-5      rank 1: KV 2, heads 6-8

    With fewer, each KV head is replicated on some ranks, which share its query heads. Those of one rank then read one
    KV head, so any number of them will do:

        9 heads, 3 KV heads, 4 ranks:   rank 0: KV 0, heads 0-1   rank 1: KV 0, head 2   rank 2: KV 1   rank 3: KV 2

    Rank 0 always has the most KV heads: what its cache holds, all others can hold. Raises `ConfigError` when a rank
    would have no head.
    """
    group = num_heads // num_kv_heads
    if world_size <= num_kv_heads:
        kv_heads = split_range(num_kv_heads, rank, world_size)
        return HeadShard(range(kv_heads.start * group, kv_heads.stop * group), kv_heads)
    if world_size > num_heads:
        raise ConfigError(f"tensor_parallel_size: {world_size} ranks cannot share {num_heads} attention heads.")
    ranks = [split_range(world_size, kv_head, num_kv_heads) for kv_head in range(num_kv_heads)]
    kv_head = next(index for index, owners in enumerate(ranks) if rank in owners)
    owners = ranks[kv_head]
    own = split_range(group, rank - owners.start, len(owners))
    return HeadShard(
        range(kv_head * group + own.start, kv_head * group + own.stop),
        range(kv_head, kv_head + 1),
        rank == owners.start,
    )
