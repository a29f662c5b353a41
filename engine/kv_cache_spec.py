"""How the KV cache of a model is laid out: what each layer needs, and which layers share a block table."""

from __future__ import annotations

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


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group layers (in order) by equal specs. The first group is that of the first layer.

    Groups share memory layer by layer, so a block of a small group wastes what a large one has more. Windowed layers
    are therefore cut into groups no larger than the full ones, whose blocks grow with the context:

        5 windowed layers for each full one, 12 layers:   0 1 | 2 3 | 4 6 | 7 8 | 9 10 | and 5 11
    """
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    full = [len(indices) for spec, indices in layers.items() if spec.sliding_window is None]
    groups = []
    for spec, indices in layers.items():
        size = len(indices) if spec.sliding_window is None or not full else min(full)
        groups += [KVCacheGroup(tuple(indices[i : i + size]), spec) for i in range(0, len(indices), size)]
    return tuple(groups)


def shared_layers(groups: tuple[KVCacheGroup, ...]) -> list[list[int]]:
    """The layers that share memory: the first of every group, the second of every group, and so on.

    A block belongs to one group at a time, so they never use it at once.
    """
    longest = max(len(group.layer_indices) for group in groups)
    return [[group.layer_indices[i] for group in groups if i < len(group.layer_indices)] for i in range(longest)]


def block_bytes(specs: list[KVCacheSpec]) -> int:
    """Bytes of one block of the pool: in all layers, those that share memory counted once."""
    return sum(max(specs[layer].block_bytes for layer in sharing) for sharing in shared_layers(group_layers(specs)))
