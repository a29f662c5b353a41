"""The default model as a Hugging Face checkpoint: what peers read, filled by Quire's own reading of the GGUF.

So all of them have the same numbers in the same order. Peers that read GGUF themselves are not given it: that would
measure their dequantization.
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


def export(folder: Path, dtype: str, model: str = "smollm2-135m-instruct") -> Path:
    """Write config, weights (as `dtype`) and tokenizer of `model` into `folder`, unless they are there.

    Returns `folder`.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    info = load_model_info(ModelConfig(model=model))
    torch_dtype = getattr(torch, dtype)
    with open_checkpoint(info) as sources:
        weights = {
            name: source.read(tuple(slice(0, size) for size in source.shape)).to(torch_dtype).contiguous()
            for name, source in sources.items()
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(info).save_pretrained(folder)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(info.eos_token_ids)})
    _write_json(folder / "config.json", {**info.hf_config, "dtype": dtype, "torch_dtype": dtype})  # last: all is there
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
