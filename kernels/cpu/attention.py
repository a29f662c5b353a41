"""Paged attention on CPU, each request for itself.

Where the cache `decode.fits`, in the type of the query or in 8 bits, requests with one query token go to the compiled
kernel there, and those with several to one of `prompt_tiles`, for bfloat16 where the CPU is fastest with it and scores
have neither cap nor sinks, or of `prompts`. Of other caches the visible part is gathered for dense attention in torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fp8
from . import decode, prompt_tiles, prompts
from .attention_call import Layer, Shape
from .prompt_plan import PromptPlan
from .recording import only_unrecorded, recorder
from .tile_product import TILE

if TYPE_CHECKING:
    from ..ops import AttentionMetadata


_Chunk = tuple[int, int, int, int]  # request, first query token, end of them, seq_len at that end


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
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not decode.fits(query, key_cache):
        _attend_gathered(
            query, key_cache, value_cache, metadata, out, scale * key_scale, value_scale, sliding_window, softcap, sinks
        )
        return out
    shape = Shape.of(query, key_cache, scale, sliding_window, softcap)
    decodes = _decode_plan(metadata, shape)
    layer = Layer(query, key_cache, value_cache, out, sinks, key_scale, value_scale)
    in_tiles = prompt_tiles.fits(query, key_cache) and softcap is None and sinks is None
    if decodes is not None:
        decodes.attend(layer, decode.way_beside_tiles(sliding_window) if in_tiles else "vectors")
    plan = _prompt_plan(metadata, shape, TILE if in_tiles else 1)
    if plan is not None:
        plan.attend(prompt_tiles.worker() if in_tiles else prompts.worker(query.dtype, key_cache.dtype), layer)
    return out


def _attend_gathered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    out: Tensor,
    scale: float,
    value_scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Each request by itself, into its rows of `out`. `scale` is that of the scores, with that of the keys."""
    chunks, is_plain = _chunks(metadata), softcap is None and sinks is None
    if chunks:
        only_unrecorded("keys are gathered by their lengths")
    for request, start, end, seq_len in chunks:
        first = 0 if sliding_window is None else max(0, seq_len - (end - start) - sliding_window + 1)
        slots = _slots(metadata, request, first, seq_len, key_cache.shape[1])
        key, value = _gather(key_cache, slots, query.dtype), _gather(value_cache, slots, query.dtype)
        visible = _visible(metadata, end - start, seq_len - first, sliding_window, is_plain)
        attended = _attend(query[start:end], key, value, visible, scale, softcap, sinks)
        out[start:end] = attended if value_scale == 1.0 else attended * value_scale


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens in some slots, [KV heads, k, d]. A cache in 8 bits becomes `dtype`, which holds each of its values."""
    tokens = cache.flatten(0, 1)
    if cache.dtype == fp8.DTYPE:
        tokens = tokens.view(torch.uint8).index_select(0, slots).view(fp8.DTYPE).to(dtype)
    else:
        tokens = tokens.index_select(0, slots)
    return tokens.transpose(0, 1)


def _chunks(metadata: AttentionMetadata) -> list[_Chunk]:
    """The requests with query tokens; once per step."""
    chunks = metadata.plans.get("chunks")
    if chunks is None:
        starts, seq_lens = metadata.query_start_loc_np, metadata.seq_lens_np
        requests = np.flatnonzero(np.diff(starts) >= 1)
        columns = (requests, starts[requests], starts[requests + 1], seq_lens[requests])
        chunks = metadata.plans["chunks"] = list(zip(*(column.tolist() for column in columns), strict=True))
    return chunks


def _visible(
    metadata: AttentionMetadata, num_queries: int, num_keys: int, sliding_window: int | None, is_plain: bool
) -> Tensor | None:
    """[num_queries, num_keys] bool, which of the last keys each query attends to; the same for every layer.

    None where it is all of them, and where torch knows without being told: up to its own, in plain attention.
    """
    is_whole = num_queries == num_keys and (sliding_window is None or num_keys <= sliding_window)
    if num_queries == 1 or (is_whole and is_plain):
        return None
    plan = ("visible", num_queries, num_keys, sliding_window)
    visible = metadata.plans.get(plan)
    if visible is None:
        query_position = torch.arange(num_keys - num_queries, num_keys)[:, None]
        key_position = torch.arange(num_keys)
        visible = key_position <= query_position
        if sliding_window is not None:
            visible &= key_position > query_position - sliding_window
        metadata.plans[plan] = visible
    return visible


def _decode_plan(metadata: AttentionMetadata, shape: Shape) -> decode.DecodePlan | None:
    """The plan of the requests with one query token, made once per step; None when there are none."""
    key, listener = ("decode", shape), recorder()
    if key not in metadata.plans:
        most_rows = None if listener is None else listener.most_rows
        plan = decode.DecodePlan(shape, most_rows or metadata.num_reqs)
        _read(plan, metadata)
        if listener is not None:  # the lengths are others in every step, and of any rows, all else is
            listener.add_preparation(partial(_read, plan, metadata) if most_rows else plan.update)
            if not most_rows:
                plan.list_pieces()
        metadata.plans[key] = plan if plan.num_decodes or most_rows else None
    found: decode.DecodePlan | None = metadata.plans[key]
    return found


def _prompt_plan(metadata: AttentionMetadata, shape: Shape, multiple_of: int) -> PromptPlan | None:
    """The plan of the requests with several query tokens, made once per step; None when there are none."""
    key, listener = ("prompts", shape, multiple_of), recorder()
    if key not in metadata.plans:
        plan = None
        if listener is not None and listener.most_rows:
            plan = PromptPlan(shape, multiple_of)
            _read(plan, metadata)
            listener.add_preparation(partial(_read, plan, metadata))
        elif metadata.max_query_len > 1:
            only_unrecorded("prompts come in many lengths")
            plan = PromptPlan(shape, multiple_of)
            _read(plan, metadata)
        metadata.plans[key] = plan
    found: PromptPlan | None = metadata.plans[key]
    return found


def _read(plan: decode.DecodePlan | PromptPlan, metadata: AttentionMetadata) -> None:
    plan.read(metadata.query_start_loc_np, metadata.seq_lens_np, metadata.block_table.numpy())


def _slots(metadata: AttentionMetadata, request: int, first: int, seq_len: int, block_size: int) -> Tensor:
    """Slots of positions first .. seq_len - 1 of a request, [seq_len - first] int64; the same for every layer."""
    plan = (request, first, block_size)
    slots = metadata.plans.get(plan)
    if slots is None:
        positions = torch.arange(first, seq_len)
        block_ids = metadata.block_table[request].index_select(0, positions // block_size)
        slots = metadata.plans[plan] = block_ids.long() * block_size + positions % block_size
    return slots


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Dense attention of one request: query [q, H, d] of its last q positions, key and value [KV heads, k, d]."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = key.shape
    if softcap is None and sinks is None:
        causal = visible is None and num_queries > 1
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[None], value[None],
            attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=num_heads != num_kv_heads,
        )  # fmt: skip
        return attended[0].transpose(0, 1)
    # The query heads of a group become rows of one matrix product, so that no key is read twice: [KV heads, G * q, d].
    group = num_heads // num_kv_heads
    rows = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(rows.float(), key.float().transpose(1, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores.view(num_kv_heads, group, num_queries, num_keys).masked_fill_(~visible, -torch.inf)
    if sinks is not None:  # a last column, whose weight goes nowhere
        column = sinks.view(num_kv_heads, group, 1).expand(-1, -1, num_queries).reshape(num_kv_heads, -1, 1)
        scores = torch.cat([scores, column], dim=2)
    weights = torch.softmax(scores, dim=-1)[:, :, :num_keys]
    attended = torch.bmm(weights, value.float()).to(query.dtype)
    return attended.view(num_kv_heads, group, num_queries, head_dim).permute(2, 0, 1, 3).flatten(1, 2)
