"""Writing to caches on CPU that the compiled kernel (`elementwise`) does not: an index copy over the flat slots."""

from __future__ import annotations

from torch import Tensor

from .. import fp8


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    if slot_mapping.numel() == 0:
        return
    key, value = fp8.stored(key, key_cache, key_scale), fp8.stored(value, value_cache, value_scale)
    if int(slot_mapping.min()) < 0:
        stored = slot_mapping >= 0
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)
