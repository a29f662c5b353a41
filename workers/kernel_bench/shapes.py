"""Layers of well-known models, as their published configurations have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    vocab_size: int = 0


SHAPES = {
    "llama-3.1-8b": LayerShape(32, 8, 128, 4096, 14336, vocab_size=128256),
    "qwen3-0.6b": LayerShape(16, 8, 128, 1024, 3072, vocab_size=151936),
    "qwen3-30b-a3b": LayerShape(32, 4, 128, 2048, 768, num_experts=128, experts_per_token=8, vocab_size=151936),
    "smollm2-135m": LayerShape(9, 3, 64, 576, 1536, vocab_size=49152),
    "tiny": LayerShape(4, 2, 16, 64, 96, num_experts=4, experts_per_token=2, vocab_size=500),
}
