"""Small random Llama models, written by `transformers` as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 199  # odd: the vocabulary is padded with two ranks or more
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_tiny_llama(directory: Path, *, max_shard_size: str = "1GB", **overrides: object) -> LlamaForCausalLM:
    """Write a model and return it. Weights are large enough that the two likeliest tokens are well apart."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": 0,
        "attn_implementation": "eager",
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # not the zeros and ones that hide mistakes
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
