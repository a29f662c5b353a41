"""What the metadata of a GGUF file say, in the terms of a Hugging Face `config.json`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What has no key there, because llama.cpp knows it by
heart (the scale of Gemma's queries, say), stands in the function of its architecture.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .gguf_file import GGUFFile, TokenType

_FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}  # general.file_type of unquantized files
_SAMPLING = {  # how general.sampling calls the fields of generation_config.json
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_LARGEST = 3.4e38  # of float32, about
# Tokens that end an answer wherever they exist. Files name one or two; generation_config.json of the models names all.
_ENDS = {
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|observation|>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
}


class _Metadata:
    """The entries of one file that begin with the name of its architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self._architecture = architecture

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"model: {self.file.path} has no metadata {self._architecture}.{key}.")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A number, or what stands for none. Raises `ConfigError` where there is something else."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"model: {self._architecture}.{key} of {self.file.path} is {value!r}, no number.")
        return _as_written(value)

    def raw(self, key: str) -> Any:
        """Whatever there is; None of nothing."""
        return self.file.metadata.get(f"{self._architecture}.{key}")

    def has(self, tensor: str) -> bool:
        return f"{tensor}.weight" in self.file.tensors or f"{tensor}.bias" in self.file.tensors

    @property
    def hidden_size_per_head(self) -> int:
        return int(self["embedding_length"] // self["attention.head_count"])

    @property
    def head_dim(self) -> int:
        return int(self.get("attention.key_length", self.hidden_size_per_head))


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """Raises `ConfigError` on an architecture that is not known, or a number that is missing."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"model: the architecture of {file.path} ({architecture}) is not supported; {known} are.")
    class_name, model_type, own = ARCHITECTURES[architecture]
    metadata = _Metadata(file, architecture)
    _check_text_only(metadata)
    config = {"architectures": [class_name], "model_type": model_type, **_common(metadata), **own(metadata)}
    return {key: value for key, value in config.items() if value is not None}


def gguf_generation(file: GGUFFile) -> dict[str, Any]:
    """What the file advises for sampling, in the terms of `generation_config.json`."""
    advised = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    numbers = {key: value for key, value in advised.items() if isinstance(value, int | float)}
    return {key: _as_written(value) for key, value in numbers.items() if not isinstance(value, bool)}


def _check_text_only(metadata: _Metadata) -> None:
    """Raises `ConfigError` on the text part of a model for images too, whose positions have several numbers each, and
    on layers that predict more than the next token: both are stored under names of plain decoders."""
    sections = metadata.raw("rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        raise ConfigError(f"model: {metadata.file.path} rotates positions in sections, which is not supported.")
    if metadata.get("nextn_predict_layers", 0):
        raise ConfigError(f"model: {metadata.file.path} has layers that predict further tokens, which are not read.")


def _common(metadata: _Metadata) -> dict[str, Any]:
    file, num_heads, head_dim = metadata.file, metadata["attention.head_count"], metadata.head_dim
    embedding = file.tensors.get("token_embd.weight")
    rotary_dim = metadata.get("rope.dimension_count", head_dim)
    layer_norm_eps = metadata.get("attention.layer_norm_epsilon")
    if layer_norm_eps is None:
        metadata["attention.layer_norm_rms_epsilon"]  # one of both there is
    return {
        "hidden_size": metadata["embedding_length"],
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": _num_layers(file, metadata["block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": layer_norm_eps,
        "norm_epsilon": layer_norm_eps,
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "partial_rotary_factor": None if rotary_dim == head_dim else rotary_dim / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "vocab_size": embedding.shape[0] if embedding else 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _FILE_TYPES.get(file.metadata.get("general.file_type", 1), "bfloat16"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(file.metadata),
    }


def _num_layers(file: GGUFFile, block_count: int) -> int:
    """Raises `ConfigError` before a damaged number makes anyone build more layers than there can be."""
    if not 0 < block_count <= len(file.tensors):
        raise ConfigError(f"model: {file.path} claims {block_count} layers and holds {len(file.tensors)} tensors.")
    return block_count


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """Llama 3's scaling is stored as what comes of it: a factor for each wavelength, as longrope has two of."""
    original = metadata.get("rope.scaling.original_context_length")
    for short, long in (("rope_freqs", "rope_freqs"), ("rope_factors_short", "rope_factors_long")):
        if metadata.has(short):
            return {
                "rope_type": "longrope",
                "short_factor": _rope_factors(metadata, short),
                "long_factor": _rope_factors(metadata, long),
                "original_max_position_embeddings": original,
                "attention_factor": metadata.get("rope.scaling.attn_factor", 1.0),
            }
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))  # the second of older files
    kind = metadata.raw("rope.scaling.type") or ("linear" if factor else "none")
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor or 1.0}
        case "yarn":
            own = {
                "attention_factor": metadata.get("rope.scaling.yarn_attn_factor"),
                "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
            }
            factor = metadata["rope.scaling.factor"]
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **own}
    raise ConfigError(f"model: {metadata.file.path} scales rotary positions in a way that is not known ({kind}).")


def _rope_factors(metadata: _Metadata, name: str) -> list[float]:
    """One for each pair of channels that is rotated."""
    num_pairs = metadata.get("rope.dimension_count", metadata.head_dim) // 2
    try:
        factors = metadata.file.floats(f"{name}.weight", num_pairs)
    except (LookupError, ValueError, OSError) as error:
        raise ConfigError(f"model: {name}.weight of {metadata.file.path} cannot be used ({error}).") from error
    return [_as_written(factor) for factor in factors]


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """What ends a text, a turn and a message, by the file's keys and by the names that such tokens have."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    # gpt-oss ends each part of an answer, its thoughts for example, with what others end answers with.
    ends = _ENDS - {"<|end|>"} if "<|return|>" in tokens else _ENDS
    named = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in ends and kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    return list(dict.fromkeys([*(metadata[key] for key in keys if key in metadata), *named]))


def _as_written(value: float) -> float:
    """A whole number as it is; else the shortest decimal number that a float32 stands for: 1e-05, not
    9.999999747378752e-06."""
    if not isinstance(value, float) or not abs(value) < _LARGEST:
        return value
    for digits in range(1, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


def _nothing(_: _Metadata) -> dict[str, Any]:
    return {}


def _llama(metadata: _Metadata) -> dict[str, Any]:
    """Mistral's models are Llamas here, and so are Mixtral, and models of Qwen that were given Llama's names."""
    if not metadata.get("expert_count"):
        tensors = metadata.file.tensors
        is_qwen = "blk.0.attn_q.bias" in tensors and "blk.0.attn_output.bias" not in tensors
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} if is_qwen else {}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_experts(metadata)}


def _experts(metadata: _Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata["expert_count"],
        "num_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
    }


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    size = metadata["expert_feed_forward_length"]
    return {**_experts(metadata), "moe_intermediate_size": size, "norm_topk_prob": True}


def _olmoe(metadata: _Metadata) -> dict[str, Any]:
    return {**_experts(metadata), "clip_qkv": metadata.get("attention.clamp_kqv")}


def _olmo2(metadata: _Metadata) -> dict[str, Any]:
    if metadata.get("attention.sliding_window"):
        raise ConfigError(f"model: {metadata.file.path} is an OLMo 3, which is not read from GGUF files.")
    return {}


def _gemma2(metadata: _Metadata) -> dict[str, Any]:
    return {
        # Of the model with 27 billion parameters alone it is not that of its head size.
        "query_pre_attn_scalar": metadata.hidden_size_per_head if metadata["block_count"] == 46 else metadata.head_dim,
        "sliding_window": metadata["attention.sliding_window"],
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: _Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": metadata.hidden_size_per_head if metadata["block_count"] == 62 else metadata.head_dim,
        "sliding_window": metadata.get("attention.sliding_window"),
        "rope_theta": metadata.get("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _phi3(metadata: _Metadata) -> dict[str, Any]:
    return {"sliding_window": metadata.get("attention.sliding_window") or None}


def _granite(metadata: _Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": metadata.get("attention.scale"),
        "residual_multiplier": metadata.get("residual_scale"),
        "embedding_multiplier": metadata.get("embedding_scale"),
        "logits_scaling": metadata.get("logit_scale"),
    }


def _cohere(metadata: _Metadata) -> dict[str, Any]:
    return {
        "logit_scale": metadata["logit_scale"],
        "use_qk_norm": metadata.has("blk.0.attn_q_norm"),
        "sliding_window": metadata.get("attention.sliding_window"),
    }


def _stablelm(metadata: _Metadata) -> dict[str, Any]:
    if metadata.has("blk.0.attn_q_norm"):
        raise ConfigError(f"model: {metadata.file.path} has norms of its own for each head, which are not read.")
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm"),
    }


def _starcoder2(metadata: _Metadata) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in metadata.file.tensors}


def _gpt_oss(metadata: _Metadata) -> dict[str, Any]:
    scaling = _rope_scaling(metadata)
    return {
        **_experts(metadata),
        "intermediate_size": metadata["expert_feed_forward_length"],
        "sliding_window": metadata["attention.sliding_window"],
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


class _Architecture(NamedTuple):
    """What `transformers` calls it, and what its configuration has beside the common."""

    class_name: str
    model_type: str
    own: Callable[[_Metadata], dict[str, Any]] = _nothing


ARCHITECTURES: Mapping[str, _Architecture] = {  # by general.architecture
    "llama": _Architecture("LlamaForCausalLM", "llama", _llama),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    "gemma": _Architecture("GemmaForCausalLM", "gemma"),
    "gemma2": _Architecture("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "phi3": _Architecture("Phi3ForCausalLM", "phi3", _phi3),
    "granite": _Architecture("GraniteForCausalLM", "granite", _granite),
    "smollm3": _Architecture("SmolLM3ForCausalLM", "smollm3"),
    "olmo2": _Architecture("Olmo2ForCausalLM", "olmo2", _olmo2),
    "olmoe": _Architecture("OlmoeForCausalLM", "olmoe", _olmoe),
    "glm4": _Architecture("Glm4ForCausalLM", "glm4"),
    "command-r": _Architecture("CohereForCausalLM", "cohere", _cohere),
    "cohere2": _Architecture("Cohere2ForCausalLM", "cohere2", _cohere),
    "stablelm": _Architecture("StableLmForCausalLM", "stablelm", _stablelm),
    "starcoder2": _Architecture("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    "gpt-oss": _Architecture("GptOssForCausalLM", "gpt_oss", _gpt_oss),
}
