"""Reference of the operations on the KV cache: the definitions, request by request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import fp8

if TYPE_CHECKING:
    from ..ops import AttentionMetadata


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    key, value = fp8.stored(key, key_cache, key_scale), fp8.stored(value, value_cache, value_scale)
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for request in range(metadata.num_reqs):
        start, end = metadata.query_start_loc[request : request + 2].tolist()
        if start == end:
            continue
        seq_len = int(metadata.seq_lens[request])
        query_position = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        # Blocks before the window of the first query may have been freed: they are not read at all.
        first = 0 if sliding_window is None else max(0, int(query_position[0]) - sliding_window + 1)
        key_position = torch.arange(first, seq_len, device=query.device)
        key = _gather(key_cache, metadata.block_table[request], key_position) * key_scale
        value = _gather(value_cache, metadata.block_table[request], key_position) * value_scale
        group = query.shape[1] // key.shape[1]

        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key.repeat_interleave(group, dim=1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = key_position[None, :] <= query_position[:, None]
        if sliding_window is not None:
            visible &= key_position[None, :] > query_position[:, None] - sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # a last column, whose weight goes nowhere
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(key_position)]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, dim=1)).to(query.dtype)
    return out


def _gather(cache: Tensor, block_ids: Tensor, positions: Tensor) -> Tensor:
    """The cached tokens of one request at the given positions: [num_positions, num_kv_heads, head_dim] float32."""
    block_size = cache.shape[1]
    return cache[block_ids[positions // block_size].long(), positions % block_size].float()
