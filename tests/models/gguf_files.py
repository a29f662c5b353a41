"""Writes a checkpoint as the GGUF file that llama.cpp's converter makes of it, with the names and keys of the `gguf`
package: https://github.com/ggml-org/llama.cpp/tree/master/conversion says what each architecture stores otherwise."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

PERMUTED = {"llama", "granite", "smollm3"}
SHIFTED = {"gemma", "gemma2", "gemma3"}
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_gguf(
    directory: Path,
    architecture: str,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **parts: int | bool,
) -> None:
    """Matrices in a type, but those of routers; all else in float32. Without a tokenizer. `parts`: how the writer cuts
    the file."""
    config = json.loads((directory / "config.json").read_text())
    writer = GGUFWriter(path, architecture, **parts)  # type: ignore[arg-type]
    _add_sizes(writer, config)
    _add_rotation(writer, config, architecture)
    _add_own(writer, config, architecture)
    known = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, config["num_hidden_layers"])
    tensors = _with_stacked_experts(load_file(directory / "model.safetensors"))
    for name, tensor in (_with_gates_apart(tensors) if architecture == "gpt-oss" else tensors).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        numbers = _changed(name, tensor, config, architecture).contiguous().numpy()
        if numbers.ndim == 1 or stored.endswith("bias") or "ffn_gate_inp" in stored or kind == GGMLQuantizationType.F32:
            writer.add_tensor(stored, numbers)
        else:
            writer.add_tensor(stored, quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key in ("layer_norm_eps", "norm_epsilon"):
        if key in config:
            writer.add_layer_norm_eps(config[key])
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _add_rotation(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    rope = config["rope_parameters"]
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    if architecture not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture in ("llama", "glm4", "phi3", "stablelm"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](_with_attributes(config), torch.device("cpu"))
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    if kind == "longrope":
        original, limit = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(limit / original) / math.log(original)))
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())


def _with_attributes(config: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**config)


def _add_own(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    """What only some have."""
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    if architecture in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    others = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            others[name] = tensor
        else:
            layer, expert, matrix = match.groups()
            stacks[f"{layer}.mlp.experts.{MIXTRAL.get(matrix, matrix)}.weight"][int(expert)] = tensor
    stacked = {name: torch.stack([of[i] for i in range(len(of))]) for name, of in stacks.items()}
    return others | stacked


def _with_gates_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of gpt-oss: matrices of experts as others have them, and each tensor with its kind at the end."""
    apart = {}
    for name, tensor in tensors.items():
        module, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if ".experts." not in name:
            apart[f"{name}.weight" if name.endswith("sinks") else name] = tensor
            continue
        rows = tensor.transpose(1, 2) if kind == "weight" else tensor
        if "gate_up_proj" in module:
            for i, part in enumerate(("gate_proj", "up_proj")):
                apart[f"{module.replace('gate_up_proj', part)}.{kind}"] = rows[:, i::2]
        else:
            apart[f"{module}.{kind}"] = rows
    return apart


def _changed(name: str, tensor: Tensor, config: dict[str, Any], architecture: str) -> Tensor:
    """Rows of Q and K for a rotation of neighbours, norms as what they multiply by."""
    if architecture in SHIFTED and name.endswith("norm.weight"):
        return tensor + 1.0
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in PERMUTED and f".{projection}." in name:
            halves = tensor.unflatten(0, (config[heads], 2, -1))
            return halves.transpose(1, 2).flatten(0, 2)
    return tensor
