"""Operations on the paged KV cache, linear layers, experts. With those of `elementwise` and `sampling`: all that others
call.

A cache is a pair of tensors `[num_blocks, block_size, num_kv_heads, head_dim]`, one pair per layer. Slot
`block_id * block_size + offset` holds one token. The blocks of request r, in order, stand in `block_table[r]`:

    position in the request    0 .. B-1   B .. 2B-1   2B .. 3B-1        (B = block_size)
    block_table[r]             7          3           9
    slots                      7B .. 8B-1 3B .. 4B-1  9B .. 10B-1

A cache holds numbers of the dtype of the model, or in 8 bits (`fp8`): then a layer's keys and values are stored divided
by `key_scale` and `value_scale`, rounded, and multiplied again where they are read.

A batch is mixed: each request brings `query_len >= 1` new tokens, whose keys and values `write_kv` has stored before
`paged_attention` reads them. The new tokens of a request are its last ones:

    |<----------------- seq_lens[r] ----------------->|
    |<-- computed before -->|<------- query_len ----->|     query_len = query_start_loc[r+1] - query_start_loc[r]
    query token j of request r has position seq_lens[r] - query_len + j and attends to no later position
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import fp8
from .activation import GATED
from .dispatch import backend_for
from .packed import Packing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHE_DTYPES = (*DTYPES, fp8.DTYPE)


@dataclass(slots=True)
class AttentionMetadata:
    """Who is in the batch of one step, for all layers that share a block table. Built by the model runner each step.

    Requests may be padded at the end (query_len 0, seq_len 0), and so may tokens: rows of `query` from
    `query_start_loc[-1]` on belong to nobody and their output is unspecified. Columns of `block_table` beyond a
    request's blocks are not read. The host copies hold the same numbers as the tensors, so that no backend ever waits
    for the device to learn a shape.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32, on the device
    seq_lens: Tensor  # [num_reqs] int32, on the device; includes the new tokens
    block_table: Tensor  # [num_reqs, max_blocks] int32, on the device
    slot_mapping: Tensor  # [num_tokens] int64, on the device; where each new token is stored, -1: nowhere (padding)
    query_start_loc_np: npt.NDArray[np.int32]  # [num_reqs + 1]
    seq_lens_np: npt.NDArray[np.int32]  # [num_reqs]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)  # private to backends: derived once per step

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens_np)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc_np).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_np.max(initial=0))


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store the keys and values of new tokens in the cache. Modifies `key_cache` and `value_cache` and nothing else.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], the last dimension contiguous; the dtype of the
            cache, or any of `DTYPES` for a cache in 8 bits.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: [num_tokens] int64; the slot of each token, each at most once. -1 stores nothing.
        key_scale, value_scale: positive; of a cache in 8 bits.
    Raises `ValueError` or `TypeError` before anything is written.
    """
    check_cache(key_cache, value_cache)
    check_rows("key", key, key_cache)
    check_rows("value", value, value_cache)
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape, got {tuple(key.shape)} and {tuple(value.shape)}")
    if key.shape[1] != key_cache.shape[2]:
        raise ValueError(f"key has {key.shape[1]} KV heads, the cache has {key_cache.shape[2]}")
    check_index("slot_mapping", slot_mapping, torch.int64, (key.shape[0],), key_cache.device)
    if key_cache.dtype == fp8.DTYPE:
        key_cache, value_cache = key_cache.view(fp8.BYTES), value_cache.view(fp8.BYTES)
    backend = backend_for(key_cache.device)
    backend.write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of the new tokens of every request over its cached tokens. Modifies none of its arguments.

    Args:
        query: [num_tokens, num_heads, head_dim], the last dimension contiguous. Query head h reads KV head
            h // (num_heads // num_kv_heads).
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, the dtype of `query`,
            or in 8 bits.
        metadata: which rows of `query` belong to whom, and where their cache is.
        scale: multiplies the scores, usually head_dim ** -0.5; positive.
        sliding_window: W: a token attends to itself and the W - 1 tokens before it. Blocks wholly before the window
            are not read, their entries in the table may be anything.
        softcap: scores become softcap * tanh(score / softcap), after `scale`.
        sinks: [num_heads] float32, contiguous; a score per query head that takes part in the softmax and has no value:
            weights sum to less than 1 (https://arxiv.org/abs/2309.17453). Neither `scale` nor `softcap` applies to it.
        key_scale, value_scale: positive; of a cache in 8 bits.
    Returns [num_tokens, num_heads, head_dim], contiguous, the dtype of `query`; accumulated in float32.
    What a request gets does not depend on the others of the batch.
    Raises `ValueError` or `TypeError` before anything runs.
    """
    check_cache(key_cache, value_cache)
    check_rows("query", query, key_cache)
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if sinks is not None:
        check_index("sinks", sinks, torch.float32, (num_heads,), query.device)
    _check_metadata(metadata, query, block_size=key_cache.shape[1])
    return backend_for(query.device).paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in the dtype of `x`, accumulated in float32 or better.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features], the dtype of `x`. On a GPU it may not be the result of what was launched
            just before: a kernel begins to read it while that is still running. If its rows lie apart, what is between
            them is finite.
        bias: [out_features], the dtype of `x`.
    Returns [num_rows, out_features], a new tensor.
    """
    return backend_for(x.device).linear(x, weight, bias)


def linear_int8(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, in_int8: bool = False
) -> Tensor:
    """x @ (weight * scales[:, None]).T + bias, in the dtype of `x`: weights of 8 bits.

    A CPU may round x to 16 bits of its row's largest.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features] int8.
        scales: [out_features] float32.
        bias: [out_features], the dtype of `x`.
        in_int8: x may be rounded to 8 bits, that is to whole multiples of 1/127 of its row's largest.
    Returns [num_rows, out_features], a new tensor.
    """
    return backend_for(x.device).linear_int8(x, weight, scales, bias, in_int8)


def pays_in_int8(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `linear_int8` takes less `in_int8`, of a weight [out_features, in_features] and x of a dtype, than if the
    weight were packed."""
    return backend_for(device).pays_in_int8(shape, dtype)


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear_int8` with weights in `fp8.DTYPE`. scales may also be [groups, out_features], contiguous: of each row,
    one for each part of `in_features / groups` numbers, which are a multiple of 16."""
    return backend_for(x.device).linear_fp8(x, weight, scales, bias)


def linear_packed(
    x: Tensor,
    weight: Tensor,
    packing: Packing,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    in_int8: bool = False,
) -> Tensor:
    """x @ unpack(weight).T + bias.

    What `linear` computes with these numbers, which are never all in memory. Sums and what is summed are rounded to
    float32: of the size of each number, or of the largest that its block could have; x to about 2^-23 of the largest of
    the numbers that meet a scale, at most, and where it is bfloat16 to 2^-15. Where x has 16 bits, the weight's numbers
    may be rounded to its dtype before.

    Args:
        x: [num_rows, in_features], of one of `DTYPES` for which `fits_packed` agrees.
        weight: [out_features, packing.row_bytes(in_features)] uint8, contiguous, as `lay_out_packed` orders it
            for the dtype of `x` and `in_int8`.
        bias: [out_features], the dtype of `x`.
        out_dtype: of the result, float32 or what `x` has (the default).
        in_int8: x may be rounded to 8 bits, that is to whole multiples of 1/127 of the largest of the numbers that
            meet a scale.
    Returns [num_rows, out_features], a new tensor.
    """
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"out_dtype must be float32 or that of x, {x.dtype}, got {out_dtype}")
    return backend_for(x.device).linear_packed(x, weight, packing, bias, out_dtype or x.dtype, in_int8)


def linear_gated_packed(
    x: Tensor, weight: Tensor, packing: Packing, bias: Tensor | None, activation: str, *, in_int8: bool = False
) -> Tensor:
    """activation(gate) * up, where `linear_packed` gives gates and then as many ups: see `activate_and_mul`.

    Neither may be rounded to the dtype of `x` before. Returns [num_rows, out_features / 2], a new tensor.
    """
    if activation not in GATED:
        raise ValueError(f"activation must be one of {', '.join(GATED)}, got {activation!r}")
    return backend_for(x.device).linear_gated_packed(x, weight, packing, bias, activation, in_int8)


def bounds_packed(packing: Packing, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `likeliest_packed` takes less, for x of a dtype, than to compute all logits."""
    return backend_for(device).bounds_packed(packing, dtype)


def likeliest_packed(x: Tensor, weight: Tensor, packing: Packing, lengths: Tensor) -> Tensor:
    """`sampling.likeliest_tokens` of `linear_packed` in float32, with no bias: the row of a weight that has the highest
    product with each row of x. A backend need not compute the others.

    Args:
        x, weight: as of `linear_packed`.
        lengths: [2, out_features] float32, contiguous, `packed.lengths` of the weight's rows.
    Returns [num_rows] int64, a new tensor.
    """
    if lengths.shape != (2, len(weight)) or lengths.dtype != torch.float32 or not lengths.is_contiguous():
        raise ValueError(
            f"lengths must be [2, {len(weight)}] float32, contiguous, got {list(lengths.shape)} {lengths.dtype}"
        )
    return backend_for(x.device).likeliest_packed(x, weight, packing, lengths)


def lay_out_packed(rows: Tensor, packing: Packing, dtype: torch.dtype, *, in_int8: bool = False) -> Tensor:
    """Packed rows in the order in which the backend of their device multiplies them with x of a dtype (`in_int8`: see
    `linear_packed`).

    rows: [num_rows, row_bytes] uint8; their number is a multiple of `packed.ROWS`. Returns as many bytes, which mean
    nothing to other backends.
    """
    return backend_for(rows.device).lay_out_packed(rows, packing, dtype, in_int8)


def look_up_packed(token_ids: Tensor, rows: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix by their numbers: `packed.unpack` of `rows[token_ids]`, in `dtype`.

    Args:
        token_ids: [n] int64, each a row that there is.
        rows: [num_rows, row_bytes] uint8, contiguous, in the order of `packed`, not that of `lay_out_packed`.
    Returns [n, packing.num_numbers(row_bytes)], a new tensor.
    """
    if token_ids.dim() != 1 or token_ids.dtype != torch.int64:
        raise ValueError(f"token_ids must be [n] int64, got {list(token_ids.shape)} {token_ids.dtype}")
    if rows.dim() != 2 or rows.dtype != torch.uint8 or not rows.is_contiguous():
        raise ValueError(f"rows must be [num_rows, row_bytes] uint8, contiguous, got {list(rows.shape)} {rows.dtype}")
    return backend_for(rows.device).look_up_packed(token_ids, rows, packing, dtype)


def looks_up_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it pays to keep a matrix packed whose rows are looked up in a dtype."""
    return backend_for(device).looks_up_packed(dtype)


def fits_packed(
    shape: tuple[int, int], packing: Packing, dtype: torch.dtype, device: torch.device, *, in_int8: bool = False
) -> bool:
    """Whether it pays to keep a weight [out_features, in_features] packed so, to multiply it with what has this dtype;
    or to do that `in_int8` (see `linear_packed`), though a kernel may then round nothing."""
    return backend_for(device).fits_packed(shape, packing, dtype, in_int8)


def choose_experts(
    logits: Tensor, experts_per_token: int, *, renormalize: bool, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts that a router finds likeliest for each token, and how much each counts.

    Args:
        logits: [num_tokens, num_experts], the last dimension contiguous, of one of `DTYPES`.
        renormalize: what the chosen ones count adds up to one; else it is their softmax probability among all.
        slots: [num_tokens] int64, contiguous, where each token is stored (`AttentionMetadata.slot_mapping`). One of -1
            is padding: a backend may have it choose none, which is -1, as nobody reads what its experts would add.
    Returns `chosen` and `routing` as `experts` takes them: [num_tokens, experts_per_token] int64 and float32, the
    likeliest first; which of equally likely ones is not defined.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [num_tokens, num_experts] with contiguous rows, got {list(logits.shape)}")
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits must be one of {DTYPES}, got {logits.dtype}")
    if not 0 < experts_per_token <= logits.shape[1]:
        raise ValueError(f"experts_per_token must be 1 to {logits.shape[1]}, got {experts_per_token}")
    if slots is not None:
        check_index("slots", slots, torch.int64, (len(logits),), logits.device)
    return backend_for(logits.device).choose_experts(logits, experts_per_token, renormalize=renormalize, slots=slots)


class ExpertMatrices(NamedTuple):
    """A matrix [rows, columns] of each expert.

    weight: [num_experts, rows, columns], contiguous (in float32 rows may lie apart, as in `linear`); or, packed, uint8
        [num_experts, rows, row_bytes], each matrix as of `linear_packed`.
    scales: of weights in 8 bits, [num_experts, rows] float32, what each row is multiplied by; or [num_experts, groups,
        rows], as of `linear_fp8`.
    packing, in_int8: of packed weights, as of `linear_packed`.
    bias: [num_experts, rows], contiguous, in the dtype of x.
    """

    weight: Tensor
    scales: Tensor | None = None
    packing: Packing | None = None
    in_int8: bool = False
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """[num_experts, rows, columns]."""
        num_experts, num_rows, size = self.weight.shape
        return num_experts, num_rows, size if self.packing is None else self.packing.num_numbers(size)


def experts(
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    activation: str,
    num_experts_in_all: int | None = None,
) -> Tensor:
    """Each token's sum over its experts of `routing * down(activation(gate(x)) * up(x))`, each of the three with its
    bias, if any. Modifies no argument.

    Args:
        x: [num_tokens, hidden_size].
        chosen: [num_tokens, experts_per_token] int64; which of the experts, each at most once per token. What is
            outside of 0 .. num_experts - 1 stands for an expert that is elsewhere, and adds nothing.
        routing: [num_tokens, experts_per_token] float32.
        gate_up: 2 * size rows, gate above up, and hidden_size columns; in the dtype of `x`, in int8 or `fp8.DTYPE` with
            scales, or packed where `fits_packed` agrees.
        down: hidden_size rows and size columns, likewise.
        activation: one of `activation.GATED`.
        num_experts_in_all: how many there are, here and elsewhere, that tokens are spread over, where that is known.
    Returns [num_tokens, hidden_size], a new tensor, the dtype of `x`.
    """
    if activation not in GATED:
        raise ValueError(f"activation must be one of {', '.join(GATED)}, got {activation!r}")
    num_experts, hidden_size, size = down.shape
    if x.shape[1:] != (hidden_size,) or gate_up.shape != (num_experts, 2 * size, hidden_size):
        raise ValueError(f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not fit")
    if chosen.shape != routing.shape or len(chosen) != len(x):
        raise ValueError(f"chosen {tuple(chosen.shape)} and routing {tuple(routing.shape)} do not fit {len(x)} tokens")
    for name, of in (("gate_up", gate_up), ("down", down)):
        if of.bias is not None:
            check_index(f"the bias of {name}", of.bias, x.dtype, of.shape[:2], x.device)
    return backend_for(x.device).experts(
        x, chosen, routing, gate_up, down, activation=activation, num_experts_in_all=num_experts_in_all
    )


def check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            "key_cache and value_cache must both be [num_blocks, block_size, num_kv_heads, head_dim], "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise ValueError("key_cache and value_cache must be contiguous")
    if key_cache.dtype not in CACHE_DTYPES or key_cache.dtype != value_cache.dtype:
        raise TypeError(f"the caches must share one of {CACHE_DTYPES}, got {key_cache.dtype} and {value_cache.dtype}")


def check_rows(name: str, rows: Tensor, cache: Tensor) -> None:
    """`rows` is [num_tokens, heads, head_dim] in the dtype and on the device of the cache."""
    if rows.dim() != 3 or rows.shape[2] != cache.shape[3]:
        raise ValueError(f"{name} must be [num_tokens, heads, {cache.shape[3]}], got {tuple(rows.shape)}")
    if rows.stride(2) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, its stride is {rows.stride(2)}")
    if rows.dtype != cache.dtype and (cache.dtype != fp8.DTYPE or rows.dtype not in DTYPES):
        raise TypeError(f"{name} is {rows.dtype}, the cache is {cache.dtype}")
    if rows.device != cache.device:
        raise ValueError(f"{name} is on {rows.device}, the cache is on {cache.device}")


def check_index(name: str, index: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(index.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(index.shape)}")
    if index.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {index.dtype}")
    if index.device != device:
        raise ValueError(f"{name} is on {index.device}, the others are on {device}")
    if index.dim() and index.stride(-1) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous")


def _check_metadata(metadata: AttentionMetadata, query: Tensor, block_size: int) -> None:
    """Checked on the host copies, once per step: the layers of a step share one metadata."""
    checked = (query.shape[0], block_size, query.device)
    if metadata.plans.get("checked") == checked:
        return
    num_reqs, starts, seq_lens = metadata.num_reqs, metadata.query_start_loc_np, metadata.seq_lens_np
    check_index("query_start_loc", metadata.query_start_loc, torch.int32, (num_reqs + 1,), query.device)
    check_index("seq_lens", metadata.seq_lens, torch.int32, (num_reqs,), query.device)
    max_blocks = metadata.block_table.shape[-1]
    check_index("block_table", metadata.block_table, torch.int32, (num_reqs, max_blocks), query.device)
    if len(starts) != num_reqs + 1 or starts[0] != 0 or starts[-1] > query.shape[0]:
        raise ValueError(
            f"query_start_loc must run from 0 to at most {query.shape[0]} in {num_reqs + 1} steps, got {starts}"
        )
    query_lens = np.diff(starts)
    if (query_lens < 0).any() or (query_lens > seq_lens).any():
        raise ValueError(f"every request needs 0 <= query_len <= seq_len, got {query_lens} and {seq_lens}")
    if metadata.max_seq_len > max_blocks * block_size:
        raise ValueError(f"seq_len {metadata.max_seq_len} does not fit in {max_blocks} blocks of {block_size}")
    metadata.plans["checked"] = checked
