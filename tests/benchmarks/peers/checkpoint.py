"""The default model as a Hugging Face checkpoint: what peers read, filled by Quire's own reading of the GGUF.

So all of them have the same numbers in the same order. Peers that read GGUF themselves are not given it: that would
measure their dequantization.

In int8 it is in the format of compressed-tensors with the scheme that vLLM's documents name for CPUs, W8A8: linear
layers have a scale for each row, what multiplies them is rounded for each token, and all else is in bfloat16.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.engine.config import ModelConfig
from quire.engine.gguf_file import read_gguf
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer
from quire.workers.loader.checkpoint import open_checkpoint

_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def export(folder: Path, precision: str, model: str = "smollm2-135m-instruct") -> Path:
    """Write config, weights (float32, bfloat16 or int8) and tokenizer of `model` into `folder`, unless they are there.

    Returns `folder`.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    info, weights = load_model_info(ModelConfig(model=model)), {}
    dtype = "bfloat16" if precision == "int8" else precision
    with open_checkpoint(info) as sources:
        for name, source in sources.items():
            numbers = source.read(tuple(slice(0, size) for size in source.shape))
            if precision == "int8" and name.endswith("_proj.weight"):
                scales = numbers.float().abs().amax(dim=1, keepdim=True) / 127
                weights[f"{name}_scale"] = scales.bfloat16()
                weights[name] = (numbers / scales.bfloat16()).round().clamp(-127, 127).to(torch.int8)
            else:
                weights[name] = numbers.to(getattr(torch, dtype)).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(info).save_pretrained(folder)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(info.eos_token_ids)})
    quantized = {"quantization_config": _W8A8} if precision == "int8" else {}
    config = {**info.hf_config, "dtype": dtype, "torch_dtype": dtype, **quantized}
    _write_json(folder / "config.json", config)  # last: all is there
    return folder


def num_parameters(model: str = "smollm2-135m-instruct") -> int:
    """Tied weights count once: they are read once per token."""
    with open_checkpoint(load_model_info(ModelConfig(model=model))) as sources:
        return sum(math.prod(source.shape) for source in sources.values())


def packed_bytes(model: str = "smollm2-135m-instruct") -> int:
    """What its tensors take in the file itself."""
    info = load_model_info(ModelConfig(model=model))
    offsets = sorted(tensor.offset for tensor in read_gguf(info.path).tensors.values())
    return info.path.stat().st_size - offsets[0]


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
