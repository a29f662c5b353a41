"""Reference of the KV cache operations: one request, one query token and one head at a time would be clearer only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..ops import AttentionMetadata


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
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
) -> Tensor:
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for request in range(metadata.num_reqs):
        start, end = metadata.query_start_loc[request : request + 2].tolist()
        if start == end:
            continue
        seq_len = int(metadata.seq_lens[request])
        key = _gather(key_cache, metadata.block_table[request], seq_len)
        value = _gather(value_cache, metadata.block_table[request], seq_len)
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), key.repeat_interleave(group, dim=1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)

        query_position = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        key_position = torch.arange(seq_len, device=query.device)[None, :]
        visible = key_position <= query_position
        if sliding_window is not None:
            visible &= key_position > query_position - sliding_window
        # Keys outside the window may be garbage (their blocks may have been freed), so neither a score nor a value of
        # theirs may enter a product: masking alone would leave 0 * NaN.
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        value = value.masked_fill(~visible.any(dim=0)[:, None, None], 0.0).repeat_interleave(group, dim=1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    return out


def _gather(cache: Tensor, block_ids: Tensor, seq_len: int) -> Tensor:
    """The first `seq_len` tokens of a request: [seq_len, num_kv_heads, head_dim] float32."""
    num_blocks = -(-seq_len // cache.shape[1])
    return cache[block_ids[:num_blocks].long()].flatten(0, 1)[:seq_len].float()
