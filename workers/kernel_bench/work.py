"""What an operation has to move and to compute, at the least: every input read once, every output written once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    num_bytes: int
    flops: int  # a multiplication and an addition are two


def attention_work(
    lens: Iterable[tuple[int, int]], *, num_heads: int, num_kv_heads: int, head_dim: int, size: int, cache_size: int
) -> Work:
    """Causal attention over requests of (query_len, seq_len). `size`, `cache_size`: bytes of an element."""
    num_keys = num_queries = num_pairs = 0
    for query_len, seq_len in lens:
        num_keys += seq_len
        num_queries += query_len
        num_pairs += query_len * seq_len - query_len * (query_len - 1) // 2
    return Work(
        num_keys * num_kv_heads * head_dim * 2 * cache_size + num_queries * num_heads * head_dim * 2 * size,
        num_pairs * num_heads * head_dim * 4,
    )


def write_kv_work(num_tokens: int, *, num_kv_heads: int, head_dim: int, size: int, cache_size: int) -> Work:
    """Keys and values from one place to another."""
    return Work(num_tokens * num_kv_heads * head_dim * 2 * (size + cache_size), 0)


def draw_work(num_rows: int, vocab_size: int) -> Work:
    """Logits of float32, read once."""
    return Work(num_rows * vocab_size * 4, 0)


def linear_work(num_rows: int, out_features: int, in_features: int, *, size: int, weight_bits: float) -> Work:
    """x @ weight.T; scales that are not stored with their numbers are too few to count."""
    moved = num_rows * (in_features + out_features) * size + int(out_features * in_features * weight_bits / 8)
    return Work(moved, 2 * num_rows * out_features * in_features)


def choice_work(num_tokens: int, num_experts: int, experts_per_token: int, *, size: int) -> Work:
    """A router's logits read, and for each choice a number of an expert, int64, and what it counts, float32."""
    return Work(num_tokens * (num_experts * size + experts_per_token * 12), 0)


def experts_work(
    num_tokens: int,
    experts_per_token: int,
    num_chosen: int,
    *,
    hidden_size: int,
    intermediate_size: int,
    size: int,
    weight_bits: float,
) -> Work:
    """Of experts with a gate, `num_chosen` of which somebody chose."""
    matrices = 3 * hidden_size * intermediate_size
    return Work(
        int(num_chosen * matrices * weight_bits / 8) + 2 * num_tokens * hidden_size * size,
        2 * num_tokens * experts_per_token * matrices,
    )
