"""The default model as a Hugging Face checkpoint: what peers read, filled by Quire's own reading of the GGUF.

So all of them have the same numbers in the same order. llama.cpp reads the GGUF itself: as it is beside int8, as it
then multiplies bytes, and written out by its own tool, as numbers of float32 or bfloat16, beside these.

In int8 it is in the format of compressed-tensors with the scheme that vLLM's documents name for CPUs, W8A8: linear
layers have a scale for each row, what multiplies them is rounded for each token, and all else is in bfloat16.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.engine.config import ModelConfig
from quire.engine.errors import QuireError
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


def gguf_file(folder: Path, precision: str, quantize: Path, model: str = "smollm2-135m-instruct") -> Path:
    """The GGUF of `model` in `precision`, written into `folder` by llama.cpp's `quantize` unless it is there."""
    packed = load_model_info(ModelConfig(model=model)).path
    if precision == "int8":
        return packed
    return requantized(
        quantize, packed, folder / f"{precision}.gguf", {"float32": "F32", "bfloat16": "BF16"}[precision]
    )


def requantized(quantize: Path, source: Path, target: Path, kind: str) -> Path:
    """`target`, a GGUF file with the numbers of another in a type of llama.cpp's, unless it is there. Raises
    `QuireError`."""
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")  # whole or not there
        command = (str(quantize), "--allow-requantize", str(source), str(part), kind)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            part.unlink(missing_ok=True)
            raise QuireError(f"{quantize} failed:\n{done.stderr[-2000:]}")
        part.rename(target)
    return target


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
