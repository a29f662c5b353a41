"""How the KV cache of a model is laid out: what each layer needs, and which layers share a block table."""

from __future__ import annotations

from collections import Counter

import msgspec


class KVCacheSpec(msgspec.Struct, frozen=True):
    """What one attention layer keeps per token, on one rank.

    `sliding_window` None is full attention; W means that a token attends to itself and the W - 1 tokens before it.
    """

    block_size: int
    num_kv_heads: int  # on one rank
    head_dim: int
    dtype_bytes: int
    sliding_window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers with the same spec. They share one block table; a block id names the same block in each of them."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, frozen=True):
    """The cache as it is allocated: `num_blocks` blocks (id 0 is the null block) shared by all groups."""

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]


def split_range(size: int, rank: int, num_ranks: int) -> range:
    """Part `rank` of `size` things cut in `num_ranks` contiguous parts; the first `size % num_ranks` have one more.

    9 things over 2 ranks: 0-4 and 5-8.
    """
    base, extra = divmod(size, num_ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def group_layers(specs: list[KVCacheSpec], num_stages: int = 1) -> tuple[KVCacheGroup, ...]:
    """Group layers (in order) by equal specs. The first group is that of the first layer.

    Groups share memory layer by layer, so a block of a small group wastes what a large one has more. Windowed layers
    are therefore cut into groups no larger than the full ones, whose blocks grow with the context:

        5 windowed layers for each full one, 12 layers:   0 1 | 2 3 | 4 6 | 7 8 | 9 10 | and 5 11

    The stages of a pipeline share one set of tables, but no memory. So each cuts its own layers, and the n-th groups of
    all stages are one group:

        the same on 2 stages, 0-5 and 6-11:               0 6 | 1 7 | 2 8 | 3 9 | 4 10 | and 5 11
    """
    stages = [split_range(len(specs), stage, num_stages) for stage in range(num_stages)]
    groups = []
    for spec in dict.fromkeys(specs):
        own = [[layer for layer in stage if specs[layer] == spec] for stage in stages]
        limits = [0 if spec.sliding_window is None else _num_full_layers(specs, stage) for stage in stages]
        num_groups = max([1, *(-(-len(layers) // limit) for layers, limit in zip(own, limits, strict=True) if limit)])
        parts: list[list[int]] = [[] for _ in range(num_groups)]
        for layers, limit in zip(own, limits, strict=True):
            size = limit or -(-len(layers) // num_groups)
            for n, part in enumerate(parts):
                part += layers[n * size : (n + 1) * size]
        groups += [KVCacheGroup(tuple(part), spec) for part in parts]
    return tuple(groups)


def _num_full_layers(specs: list[KVCacheSpec], stage: range) -> int:
    """Layers of a stage with full attention, of the kind that has the fewest; 0 if there are none."""
    counts = Counter(specs[layer] for layer in stage if specs[layer].sliding_window is None)
    return min(counts.values(), default=0)


def shared_layers(groups: tuple[KVCacheGroup, ...], layers: range) -> list[list[int]]:
    """Those of a rank's `layers` that share memory: its first of every group, its second of every group, and so on.

    A block belongs to one group at a time, so they never use it at once.
    """
    own = [[layer for layer in group.layer_indices if layer in layers] for group in groups]
    return [[group[i] for group in own if i < len(group)] for i in range(max(map(len, own)))]


def block_bytes(specs: list[KVCacheSpec], num_stages: int = 1, stage: int = 0) -> int:
    """Bytes of one block of the pool on a rank of a stage: in all its layers, those that share memory counted once."""
    shared = shared_layers(group_layers(specs, num_stages), split_range(len(specs), stage, num_stages))
    return sum(max(specs[layer].block_bytes for layer in sharing) for sharing in shared)
