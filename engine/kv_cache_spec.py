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
    """Group layers (in order) by equal specs. The first group is that of the first layer."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(spec, []).append(index)
    return tuple(KVCacheGroup(tuple(indices), spec) for spec, indices in layers.items())
