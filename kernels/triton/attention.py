"""Paged attention for mixed batches.

A tile of rows is some query tokens of one request times the query heads that share a KV head, so a key or value is
loaded once for all of them:

    rows of the tile, GROUP = 3        token 0        token 1        ...
                                       h0 h1 h2       h0 h1 h2       ...        (rows beyond BLOCK_Q * GROUP idle)

A program walks over the visible keys in tiles and keeps a running softmax (Milakov and Gimelshein, arXiv 1805.02867;
Dao et al., arXiv 2205.14135). Two kernels share the requests of a batch:

- A **short** request has no more query tokens than fit in the smallest tile that matrix instructions take: decodes,
  and those with some guessed tokens. There is too little of it to fill a GPU, so its keys are cut into splits, each a
  program of its own, and a second reduction adds them (Dao et al., Flash-Decoding, 2023):

      keys   |<- split 0 ->|<- split 1 ->|<- split 2 ->|      a split is SPLIT keys, and more where MAX_SPLITS of them
      sums   acc, max, sum  acc, max, sum  acc, max, sum      would not do

  With many requests there are programs enough: each takes several splits, and one that takes all of a request's adds
  their sums itself, by the same operations in the same order.

- Of a **long** one, programs take consecutive query tokens, each over all keys. They are laid out without knowing on
  the host where requests begin: request r owns the programs from `query_start_loc[r] // BLOCK_Q + r` on, which leaves
  it at least as many as it has blocks of queries; the ones too many return at once.

Which kernel a request gets, how its keys are cut, and their order depend on its own lengths alone; tile sizes depend
on what all steps share. So a request gets the same bits in any batch. Grids depend on padded shapes only and nothing
waits for the device: the launches for short requests can be captured in a CUDA graph and replayed for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import fp8
from . import tiles
from .attention_kernels import long_kernel, merge_kernel, short_kernel
from .chain import chained
from .numbers import PLAIN, dot_options, e4m3_format
from .sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from ..ops import AttentionMetadata

SPLIT = 128  # keys; a multiple of every BLOCK_N
MAX_SPLITS = 32  # with 8 KV heads, enough for every multiprocessor of a large GPU to have two
# Requests times KV heads for which a program takes one split; with twice as many it takes two, and so on, up to
# MOST_SPLITS_EACH. With contexts of 1,024 tokens that keeps about as many programs as a large GPU has multiprocessors.
# Long contexts still have several programs then, and no request needs sums in memory that a program can keep.
FEW_PAIRS = 32
MOST_SPLITS_EACH = 8
# A graph's grid has room for requests of any length. With very many requests, the programs that find nothing to do
# would outnumber the others by far, so from here on a program takes more splits.
MOST_PROGRAMS = 8192
MOST_SUMS = 256 << 20  # bytes of sums at a time; with more, some requests come after the others


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
    """See `ops.paged_attention`."""
    num_heads, head_dim = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    group = num_heads // num_kv_heads
    short = max(16, next_power_of_2(group)) // group
    longest_short, any_long = _lengths(metadata, short)
    in_bytes = key_cache.dtype == fp8.DTYPE
    if in_bytes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "SLIDING_WINDOW": sliding_window or 0,
        "USE_SOFTCAP": softcap is not None,
        "USE_SINKS": sinks is not None,
        "CACHE_FORMAT": e4m3_format(query.device) if in_bytes else PLAIN.value,
        "SHORT": short,
        **dot_options(query.dtype),
        **chained(query.device),
    }
    tensors = (query, key_cache, value_cache, metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    scalars = (metadata.seq_lens if sinks is None else sinks, scale * key_scale, softcap or 1.0, value_scale)
    strides = (num_kv_heads, query.stride(0), query.stride(1), metadata.block_table.stride(0))

    def tile(is_short: bool) -> tiles.AttentionTile:
        return tiles.attention(
            query.device, short=is_short, head_dim=head_dim, dtype=query.dtype, fp8=in_bytes, block_size=block_size
        )

    if longest_short:
        _launch_short(out, longest_short, metadata, tensors, scalars, strides, constants, tile(True))
    if any_long:
        chosen = tile(False)
        block_m = max(chosen.block_m, next_power_of_2(group))
        grid = (num_kv_heads, query.shape[0] // (block_m // group) + metadata.num_reqs)
        long_kernel[grid](
            out, *tensors, *scalars, metadata.num_reqs, *strides, **constants,
            BLOCK_M=block_m, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
    return out


def _lengths(metadata: AttentionMetadata, short: int) -> tuple[int, bool]:
    """Query tokens of the longest short request, 0: none; and whether there are long ones. Once per step."""
    plan = ("lengths", short)
    if plan not in metadata.plans:
        query_lens = np.diff(metadata.query_start_loc_np)
        metadata.plans[plan] = int(query_lens[query_lens <= short].max(initial=0)), bool((query_lens > short).any())
    lengths: tuple[int, bool] = metadata.plans[plan]
    return lengths


def _launch_short(
    out: Tensor,
    max_query: int,
    metadata: AttentionMetadata,
    tensors: tuple[Tensor, ...],
    scalars: tuple[Tensor | float, ...],
    strides: tuple[int, ...],
    constants: dict[str, Any],
    tile: tiles.AttentionTile,
) -> None:
    """Both reductions of the short requests."""
    num_heads, head_dim = out.shape[1:]
    block_size, num_kv_heads = constants["BLOCK_SIZE"], strides[0]
    most_keys = metadata.block_table.shape[1] * block_size
    if constants["SLIDING_WINDOW"]:  # the first tile may begin before the window
        most_keys = min(most_keys, constants["SLIDING_WINDOW"] + max_query + tile.block_n)
    num_splits = max(1, min(MAX_SPLITS, cdiv(most_keys, SPLIT)))
    at_once = metadata.num_reqs
    all_fold = num_splits <= _splits_each(num_kv_heads * at_once, num_splits)
    num_sums = 0 if all_fold else max_query * num_heads * num_splits  # of a request, in memory
    if at_once * num_sums * (head_dim + 2) * 4 > MOST_SUMS:  # then some, of whose numbers the addresses are aligned
        at_once = min(at_once, max(4, MOST_SUMS // (num_sums * (head_dim + 2) * 4) // 4 * 4))
    partial = out.new_empty((at_once * num_sums, head_dim), dtype=torch.float32)
    partial_softmax = out.new_empty((at_once * num_sums, 2), dtype=torch.float32)
    cut = {"BLOCK_N": tile.block_n, "SPLIT": SPLIT, "MAX_SPLITS": MAX_SPLITS}
    query, key_cache, value_cache, *of_requests = tensors
    for first in range(0, metadata.num_reqs, at_once):
        starts, seq_lens, table = (tensor[first:] for tensor in of_requests)
        num_reqs = min(at_once, metadata.num_reqs - first)
        each = _splits_each(num_kv_heads * num_reqs, num_splits)
        short_kernel[(num_kv_heads, cdiv(num_splits, each), num_reqs)](
            out, partial, partial_softmax, query, key_cache, value_cache, starts, seq_lens, table, *scalars, *strides,
            max_query, num_splits, each, **constants, **cut,
            BLOCK_M=max(tile.block_m, next_power_of_2(constants["GROUP"])),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if num_splits > each:
            kept = ("HEAD_DIM", "HEAD_DIM_PADDED", "SLIDING_WINDOW", "SHORT")
            shared = {name: constants[name] for name in kept} | chained(out.device)
            merge_kernel[(num_heads, max_query, num_reqs)](
                out, partial, partial_softmax, starts, seq_lens, scalars[3], max_query, num_splits, each,
                **shared, **cut, num_warps=4,
            )  # fmt: skip


def _splits_each(num_pairs: int, num_splits: int) -> int:
    """How many splits a program takes, for so many pairs of a request and a KV head."""
    each = min(MOST_SPLITS_EACH, max(1, num_pairs // FEW_PAIRS))
    return min(num_splits, max(each, -(-num_splits // max(1, MOST_PROGRAMS // num_pairs))))
