"""Small random models of every family, written by `transformers` as checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199  # odd: the vocabulary is padded with two ranks
MAX_MODEL_LEN = 256
WINDOW = 20  # smaller than most prompts, and no multiple of a block

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
_LONG = [1.0 + 0.3 * i for i in range(8)]
_SHORT = [1.0 + 0.05 * i for i in range(8)]
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5, "experts_implementation": "eager"}


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


@dataclass(frozen=True)
class TinyFamily:
    architecture: str  # with the class of its configuration beside it in `transformers`
    config_class: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # common settings that this configuration does not know
    max_model_len: int = MAX_MODEL_LEN
    embedding_std: float = 0.2  # small where it would outweigh the layers, so that each token were followed by itself
    min_length: int = 1  # tokens from which on the reference computes what we compute

    def make(self, directory: Path) -> Any:
        """Write a model and return it. Weights are large enough that the two likeliest tokens are well apart."""
        common = {key: value for key, value in _COMMON.items() if key not in self.dropped}
        config = getattr(transformers, self.config_class)(**{**common, **self.settings})
        torch.manual_seed(0)
        model = getattr(transformers, self.architecture)(config).float().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1 or "norm" in name:
                    parameter.add_(noise * 0.1)  # not the zeros and ones that hide mistakes
                else:
                    parameter.copy_(noise * (self.embedding_std if "embed" in name else 0.2))
        model.save_pretrained(directory)
        return model


def _llama(**settings: object) -> TinyFamily:
    return TinyFamily("LlamaForCausalLM", "LlamaConfig", settings)


def _family(name: str, config: str | None = None, dropped: tuple[str, ...] = (), **settings: object) -> TinyFamily:
    return TinyFamily(f"{name}ForCausalLM", config or f"{name}Config", settings, dropped)


def _gemma(name: str, config: str | None = None, **settings: object) -> TinyFamily:
    whole = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW, **settings}
    return TinyFamily(f"{name}ForCausalLM", config or f"{name}Config", whole, embedding_std=0.05)


def _gpt2() -> TinyFamily:
    sizes = {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": MAX_MODEL_LEN, "n_inner": 70}
    dropped = tuple(key for key in _COMMON if key.startswith(("hidden", "num_", "max_pos", "inter")))
    return TinyFamily("GPT2LMHeadModel", "GPT2Config", sizes, dropped)


TINY_FAMILIES: Mapping[str, TinyFamily] = {
    "llama": _llama(),
    "llama-linear": _llama(**_rope("linear", factor=3.0)),
    "llama-dynamic": _llama(**_rope("dynamic", factor=4.0)),
    "llama-yarn": _llama(**_rope("yarn", factor=8.0, original_max_position_embeddings=32)),
    "mistral": _family("Mistral", sliding_window=WINDOW, head_dim=24),
    "qwen2": _family("Qwen2", tie_word_embeddings=True),
    "qwen2-windows": _family("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": _family("Qwen3", head_dim=32),
    "smollm3": _family("SmolLM3"),
    "granite": _family(
        "Granite",
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        attention_bias=True,
    ),
    "olmo2": _family("Olmo2"),
    "phi3": _family("Phi3", sliding_window=WINDOW),
    "phi3-short": TinyFamily(
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **_rope("longrope", short_factor=_SHORT, long_factor=_LONG),
            "original_max_position_embeddings": 128,
        },
        max_model_len=128,
    ),
    "phi3-long": TinyFamily(
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **_rope("longrope", short_factor=_SHORT, long_factor=_LONG),
            "original_max_position_embeddings": 30,
        },
        min_length=31,
    ),
    "glm": _family("Glm", head_dim=16),
    "glm4": _family("Glm4", head_dim=16),
    "gemma": TinyFamily("GemmaForCausalLM", "GemmaConfig", {"head_dim": 16}, embedding_std=0.05),
    "gemma2": _gemma("Gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3": _gemma("Gemma3", "Gemma3TextConfig", num_hidden_layers=7),
    "cohere": _family("Cohere", use_qk_norm=True, logit_scale=0.7),
    "cohere2": _family("Cohere2", sliding_window=WINDOW, num_hidden_layers=5, logit_scale=0.7),
    "stablelm": _family("StableLm", use_qkv_bias=True),
    "stablelm-parallel": _family("StableLm", qk_layernorm=True, use_parallel_residual=True),
    "gpt-neox": _family("GPTNeoX", dropped=("num_key_value_heads",)),
    "gpt-neox-sequential": _family("GPTNeoX", dropped=("num_key_value_heads",), use_parallel_residual=False),
    "phi": _family("Phi", qk_layernorm=True),
    "falcon-7b": _family("Falcon", dropped=("num_key_value_heads", "intermediate_size")),
    "falcon-40b": _family(
        "Falcon", dropped=("num_key_value_heads", "intermediate_size"), num_kv_heads=2, new_decoder_architecture=True
    ),
    "falcon-sequential": _family(
        "Falcon",
        dropped=("num_key_value_heads", "intermediate_size"),
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "gpt2": _gpt2(),
    "opt": _family("OPT", dropped=("num_key_value_heads",), ffn_dim=70, word_embed_proj_dim=96),
    "starcoder2": _family("Starcoder2", sliding_window=WINDOW),
    "mixtral": _family("Mixtral", **_EXPERTS),
    "qwen3-moe": _family(
        "Qwen3Moe", head_dim=16, moe_intermediate_size=30, mlp_only_layers=[1], norm_topk_prob=True, **_EXPERTS
    ),
    # Sinks, windows in every second layer, experts with biases.
    "gpt-oss": TinyFamily(
        "GptOssForCausalLM",
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": WINDOW, **_EXPERTS},
        embedding_std=0.1,
    ),
    "olmoe": _family("Olmoe", clip_qkv=1.5, num_experts_per_tok=2, num_experts=5, experts_implementation="eager"),
}
