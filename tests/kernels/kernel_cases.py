"""Batches for the kernel tests, shared by the CPU tests, the interpreted Triton tests and `python -m tests.gpu`.

Everything that an operation must not read is poison: slots that hold no visible token are NaN, and block table entries
that belong to no visible block are far out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels import fp8, ops
from quire.kernels.ops import AttentionMetadata

POISON_BLOCK_ID = 2**30
KEY_SCALE, VALUE_SCALE = 0.013, 0.7

# Against a reference in float32 on the same inputs. An output is an average of values of order 1, with weights that sum
# to 1, so its error is about the rounding of the weights and of the result: a few units of 2**-24 in float32 (scores of
# some tens of products add some more), 2**-9 in bfloat16 and 2**-12 in float16, relative to values that reach 4.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One batch: `lens` are (query_len, seq_len) of the requests."""

    lens: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False  # the caches are in 8 bits, with scales
    padding: int = 0  # tokens, and requests, that belong to nobody, at the end

    @property
    def name(self) -> str:
        lens = "_".join(f"{query_len}of{seq_len}" for query_len, seq_len in self.lens)
        heads = f"{self.num_heads}:{self.num_kv_heads}x{self.head_dim}"
        parts = [lens, heads, f"block{self.block_size}", str(self.dtype).removeprefix("torch.")]
        parts += [f"window{self.sliding_window}"] if self.sliding_window else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] * self.sinks + ["fp8"] * self.fp8
        parts += [f"padding{self.padding}"] if self.padding else []
        return "-".join(parts)

    @property
    def options(self) -> dict[str, float | int | Tensor | None]:
        options: dict[str, float | int | Tensor | None] = {
            "scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
        }
        return {**options, "key_scale": KEY_SCALE, "value_scale": VALUE_SCALE} if self.fp8 else options

    @property
    def tolerance(self) -> float:
        """Largest error of the result. A soft cap multiplies that of a GPU's exponential and division."""
        tolerance = TOLERANCE[self.dtype]
        return tolerance * max(1.0, self.softcap / 10) if self.softcap and self.dtype == torch.float32 else tolerance


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    sinks: Tensor | None
    metadata: AttentionMetadata

    def to_float32(self) -> Inputs:
        """The same numbers; caches in 8 bits stay as they are."""
        caches = (cache if cache.dtype == fp8.DTYPE else cache.float() for cache in (self.key_cache, self.value_cache))
        return Inputs(self.query.float(), *caches, self.sinks, self.metadata)


def build(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random queries and keys, in shuffled blocks surrounded by poison."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = np.array([query_len for query_len, _ in case.lens] + [0] * case.padding)
    seq_lens = np.array([seq_len for _, seq_len in case.lens] + [0] * case.padding, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    blocks_per_request = -(-seq_lens // case.block_size)
    num_blocks = int(blocks_per_request.sum()) + 3
    shuffled = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())

    cache_shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    cache_dtype = torch.float32 if case.fp8 else case.dtype
    key_cache = torch.full(cache_shape, torch.nan, dtype=cache_dtype)
    value_cache = torch.full(cache_shape, torch.nan, dtype=cache_dtype)
    block_table = torch.full((len(seq_lens), int(blocks_per_request.max()) + 2), POISON_BLOCK_ID, dtype=torch.int32)
    for request, (query_len, seq_len) in enumerate(case.lens):
        first = max(0, seq_len - query_len - case.sliding_window + 1) if case.sliding_window else 0
        for index in range(first // case.block_size, int(blocks_per_request[request])):
            block_table[request, index] = next(shuffled)
        for position in range(first, seq_len):
            place = int(block_table[request, position // case.block_size]), position % case.block_size
            key_cache[place] = torch.randn(cache_shape[2:], generator=generator).to(cache_dtype)
            value_cache[place] = torch.randn(cache_shape[2:], generator=generator).to(cache_dtype)
    if case.fp8:
        key_cache, value_cache = fp8.quantize(key_cache, KEY_SCALE), fp8.quantize(value_cache, VALUE_SCALE)

    num_tokens = int(starts[-1]) + case.padding
    # Queries come out of a fused projection: neighbouring tokens are further apart than one row.
    fused = torch.randn(num_tokens, case.num_heads + 3, case.head_dim, generator=generator).to(case.dtype)
    metadata = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=block_table.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        query_start_loc_np=starts,
        seq_lens_np=seq_lens,
    )
    sinks = torch.randn(case.num_heads, generator=generator).to(device) if case.sinks else None
    return Inputs(fused.to(device)[:, : case.num_heads], key_cache.to(device), value_cache.to(device), sinks, metadata)


def alone(inputs: Inputs, request: int) -> Inputs:
    """A batch of one request of theirs."""
    metadata = inputs.metadata
    start, end = metadata.query_start_loc_np[request : request + 2]
    starts = np.array([0, end - start], np.int32)
    only = replace(
        metadata,
        query_start_loc=torch.from_numpy(starts).to(metadata.query_start_loc.device),
        seq_lens=metadata.seq_lens[request : request + 1],
        block_table=metadata.block_table[request : request + 1],
        slot_mapping=metadata.slot_mapping[start:end],
        query_start_loc_np=starts,
        seq_lens_np=metadata.seq_lens_np[request : request + 1],
        plans={},
    )
    return Inputs(inputs.query[start:end].clone(), inputs.key_cache, inputs.value_cache, inputs.sinks, only)


def attend(inputs: Inputs, case: Case) -> Tensor:
    """The rows that belong to requests."""
    caches = inputs.key_cache, inputs.value_cache
    out = ops.paged_attention(inputs.query, *caches, inputs.metadata, sinks=inputs.sinks, **case.options)
    return out[: int(inputs.metadata.query_start_loc_np[-1])]


MIXED = ((1, 1), (1, 37), (5, 5), (1, 16), (20, 50), (3, 17), (1, 64))

CASES = [
    Case(((1, 1),)),
    Case(((1, 33),), num_heads=9, num_kv_heads=3),
    Case(((17, 17),), num_heads=9, num_kv_heads=3),
    Case(MIXED),
    Case(MIXED, num_heads=9, num_kv_heads=3, padding=3),
    Case(MIXED, num_heads=7, num_kv_heads=1, head_dim=32),
    Case(MIXED, num_heads=3, num_kv_heads=3, head_dim=80),
    Case(MIXED, num_heads=8, num_kv_heads=1, head_dim=96, block_size=5),
    Case(MIXED, num_heads=4, num_kv_heads=4, head_dim=128, block_size=1),
    Case(MIXED, num_heads=32, num_kv_heads=1, head_dim=16, block_size=128),
    Case(MIXED, sliding_window=1),
    Case(MIXED, sliding_window=10, block_size=4),
    Case(MIXED, sliding_window=16, num_heads=6, num_kv_heads=2, head_dim=80),
    Case(MIXED, sliding_window=1000),
    Case(MIXED, softcap=3.0),
    Case(MIXED, softcap=50.0, sliding_window=7, num_heads=6, num_kv_heads=2, padding=1),
    Case(MIXED, dtype=torch.bfloat16),
    Case(MIXED, dtype=torch.bfloat16, num_heads=9, num_kv_heads=3, sliding_window=12, head_dim=96),
    Case(MIXED, dtype=torch.bfloat16, softcap=3.0, head_dim=128),
    Case(MIXED, dtype=torch.float16),
    Case(MIXED, dtype=torch.float16, num_heads=8, num_kv_heads=1, head_dim=80, block_size=32, softcap=3.0),
    Case(((1, 700), *MIXED), num_heads=9, num_kv_heads=3, sinks=True),
    Case(MIXED, num_heads=6, num_kv_heads=2, sinks=True, softcap=3.0, sliding_window=7, padding=2),
    Case(MIXED, dtype=torch.bfloat16, sinks=True, sliding_window=10),
    Case(((1, 300), *MIXED), num_heads=9, num_kv_heads=3, fp8=True),
    Case(MIXED, num_heads=7, num_kv_heads=1, head_dim=80, fp8=True, sliding_window=9, softcap=5.0, padding=1),
    Case(MIXED, dtype=torch.bfloat16, fp8=True, sinks=True),
    Case(MIXED, dtype=torch.float16, fp8=True, head_dim=128),
    # Keys of short requests in several splits, with some guessed tokens, and a window that begins within a split.
    Case(((3, 1100), (1, 513), (8, 520)), num_heads=2, num_kv_heads=1, sinks=True, softcap=4.0, padding=1),
    Case(((2, 1300), (1, 700)), num_heads=2, num_kv_heads=1, head_dim=32, sliding_window=600, block_size=64),
]
