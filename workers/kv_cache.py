"""Allocates the paged KV cache of one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec, shared_layers

from . import host_memory
from .layers.attention import KVScales, LayerCache


def allocate_kv_cache(
    config: KVCacheConfig,
    specs: list[KVCacheSpec],
    scales: list[KVScales],
    own_layers: range,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """The caches of this rank's layers, in layer order, filled with zeros.

    `specs` and `scales` are of all layers; the specs are this rank's own, since ranks may hold different numbers of KV
    heads. `config` (rank 0's) says how many blocks there are and which layers share a table. Groups draw block ids
    from one pool: a block belongs to one group at a time, so the n-th of this rank's layers in all groups share memory.

        two groups, layers 0 2 4 and 1 3 5:   memory 0: layers 0, 1   memory 1: layers 2, 3   memory 2: layers 4, 5

    On the host no two memories begin at the same place of a huge page: requests that come to a new page come to that of
    one memory at a time. All at once made a step a third of a second longer where the system takes 5 ms for such a page
    (a virtual machine that is given its own memory late). Each takes up to a page more.
    """
    caches: dict[int, LayerCache] = {}
    memories = list(shared_layers(config.groups, own_layers))
    for index, sharing in enumerate(memories):
        num_bytes = config.num_blocks * max(specs[layer].block_bytes for layer in sharing)
        memory = _zeros(num_bytes, index / len(memories), device)
        for layer in sharing:
            caches[layer] = _view(memory, specs[layer], config.num_blocks, scales[layer], dtype)
    return [caches[layer] for layer in own_layers]


def _zeros(num_bytes: int, part: float, device: torch.device) -> Tensor:
    """Zeros, since a masked position of a block that was never written would still spread a NaN.

    On the host they come from the kernel page by page when they are first touched (see `page_filler`): `torch.zeros`
    would touch all of them now.
    """
    if device.type == "cpu":
        return host_memory.zeros(num_bytes, part)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _view(memory: Tensor, spec: KVCacheSpec, num_blocks: int, scales: KVScales, dtype: torch.dtype) -> LayerCache:
    shape = (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    key, value = memory[: num_blocks * spec.block_bytes].view(dtype).view(shape)
    return LayerCache(key, value, scales)
