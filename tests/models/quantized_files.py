"""Writes a checkpoint as the tools that quantize do: AWQ, GPTQ, compressed-tensors, FP8, MXFP4. Rounding is to the
nearest; names and orders are those of `workers/loader/quantized.py`, built the other way round."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the numbers of a word, from its lowest bits on


@dataclass(frozen=True)
class Scheme:
    """A way to quantize: what the configuration says, and what a matrix [out, in] becomes: tensors by what comes behind
    the module's name, and the numbers that they stand for."""

    config: Mapping[str, Any]
    write: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def write_quantized(directory: Path, target: Path, scheme: Scheme, kind: torch.dtype = torch.float32) -> None:
    """What a checkpoint is quantized to in `target`, and in `target / "plain"` with the same numbers, of a type. Of its
    matrices, all but embeddings, heads and routers."""
    plain = target / "plain"
    plain.mkdir(parents=True)
    quantized, numbers = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or not module.endswith(("proj", "w1", "w2", "w3")):
            quantized[name] = numbers[name] = tensor.to(kind)
            continue
        tensors, values = scheme.write(tensor.float())
        quantized |= {f"{module}.{each}": part.contiguous() for each, part in tensors.items()} | quantized
        numbers[name] = values.to(kind)
    _write(directory, {target: quantized, plain: numbers}, scheme.config)


def _write(directory: Path, checkpoints: Mapping[Path, dict[str, Tensor]], quantization: Mapping[str, Any]) -> None:
    """With the other files of a directory; of several, the first is quantized."""
    for folder, tensors in checkpoints.items():
        for file in directory.glob("*.json"):
            shutil.copy(file, folder)
        save_file(tensors, folder / "model.safetensors")
    path = next(iter(checkpoints)) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def write_mxfp4(directory: Path, target: Path) -> None:
    """The experts of a gpt-oss in MXFP4, [experts, in, out]; and in `target / "plain"` with the same numbers."""
    plain = target / "plain"
    plain.mkdir(parents=True)
    quantized, numbers = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            quantized[name] = numbers[name] = tensor
            continue
        quantized[f"{name}_blocks"], quantized[f"{name}_scales"], found = mxfp4(tensor.transpose(1, 2))
        numbers[name] = found.transpose(1, 2).contiguous()
    _write(directory, {target: quantized, plain: numbers}, {"quant_method": "mxfp4"})


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., in] -> blocks [..., in / 32, 16], scales [..., in / 32], and the numbers [..., in] that they stand for. The
    first block is nothing, with a scale that no float16 has."""
    groups = weight.unflatten(-1, (-1, 32))
    scales = groups.abs().amax(dim=-1).log2().floor().int() - 2 + 127
    groups = groups.flatten(0, -2)
    groups[0], scales.view(-1)[0] = 0.0, 0
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    scaled = groups / torch.pow(2.0, scales.flatten()[:, None] - 127.0)
    codes = (scaled[..., None] - table).abs().argmin(dim=-1)
    values = table[codes] * torch.pow(2.0, scales.flatten()[:, None] - 127.0)
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return blocks.view(*scales.shape, 16), scales.to(torch.uint8), values.view(weight.shape)


def awq(group_size: int) -> Scheme:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, numbers = rounded(weight, 4, group_size, False, torch.float16)
        words = {"qweight": in_words(codes.T, 4, AWQ_ORDER), "qzeros": in_words(zeros.T, 4, AWQ_ORDER)}
        return {**words, "scales": scales.T}, numbers

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Scheme(config, write)


def gptq(
    group_size: int, bits: int = 4, *, symmetric: bool = True, version: str = "gptq", in_order: bool = True
) -> Scheme:
    """Not in order: groups are of inputs that lie apart, as with `desc_act`. Each module gets a bias of zeros."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1]
        order = torch.arange(size) if in_order else torch.randperm(size, generator=torch.Generator().manual_seed(size))
        codes, scales, zeros, numbers = rounded(weight[:, order], bits, group_size, symmetric, torch.float16)
        back = order.argsort()
        groups = torch.arange(size) // (size if group_size == -1 else group_size)
        zeros = (zeros - (1 if version == "gptq" else 0)) % (1 << bits)
        tensors = {"qweight": in_words(codes[:, back], bits).T, "qzeros": in_words(zeros.T, bits), "scales": scales.T}
        return {**tensors, "g_idx": groups[back].int(), "bias": torch.zeros(len(weight)).half()}, numbers[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric}
    return Scheme({**config, "desc_act": not in_order, "checkpoint_format": version}, write)


def compressed(
    bits: int, group_size: int, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16, in_order: bool = True
) -> Scheme:
    """In words."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = weight.shape[1]
        order = torch.arange(size) if in_order else torch.randperm(size, generator=torch.Generator().manual_seed(size))
        codes, scales, zeros, numbers = rounded(weight[:, order], bits, group_size, symmetric, dtype)
        back, shape = order.argsort(), torch.tensor(weight.shape)
        tensors = {"weight_packed": in_words(codes[:, back], bits), "weight_scale": scales, "weight_shape": shape}
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros.T, bits).T
        if not in_order:
            tensors["weight_g_idx"] = (torch.arange(size) // group_size)[back].int()
        return tensors, numbers[:, back]

    return Scheme(compressed_config("pack-quantized", num_bits=bits, type="int"), write)


def compressed_int8(*, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Scheme:
    """A byte each, and a scale for each row."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros, numbers = rounded(weight, 8, -1, symmetric, dtype)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        return tensors if symmetric else tensors | {"weight_zero_point": (zeros - 128).to(torch.int8)}, numbers

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel", "dynamic": False}
    return Scheme(compressed_config("int-quantized", **weights), write)


def w8a8() -> Scheme:
    """What multiplies the weights is rounded to 8 bits, too, token by token."""
    scheme = compressed_int8()
    (group,) = scheme.config["config_groups"].values()
    rounded_too = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {**group, "input_activations": rounded_too}}
    return Scheme({**scheme.config, "config_groups": groups}, scheme.write)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def float8(config: Mapping[str, Any], rows: int | None, columns: int | None, scale: str = "weight_scale") -> Scheme:
    """e4m3, and float32 scales of blocks of so many rows and columns, or of all (None)."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (height, width), (num_rows, num_columns) = weight.shape, (rows or len(weight), columns or weight.shape[1])
        numbers, codes = torch.empty_like(weight), torch.empty(weight.shape, dtype=FP8)
        scales = torch.empty(-(-height // num_rows), -(-width // num_columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                top, left = i * num_rows, j * num_columns
                block = slice(top, top + num_rows), slice(left, left + num_columns)
                scales[i, j] = weight[block].abs().amax() / 448
                codes[block] = (weight[block] / scales[i, j]).to(FP8)
                numbers[block] = codes[block].float() * scales[i, j]
        stored = scales if scales.numel() > 1 else scales.reshape(())
        unused = {"input_scale": torch.tensor(0.5), "activation_scale": torch.tensor(0.5)}
        return {"weight": codes, scale: stored, **unused}, numbers

    return Scheme(config, write)


def rounded(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in] from 0 on, scales [out, groups] of a type, the codes [out, groups] that mean nothing, and the
    numbers [out, in] that they stand for."""
    most, (height, width) = (1 << bits) - 1, weight.shape
    groups = weight.reshape(height, -1, width if group_size == -1 else group_size)
    if symmetric:
        scales = (groups.abs().amax(dim=2) / (1 << (bits - 1))).to(dtype)
        zeros = torch.full(scales.shape, 1 << (bits - 1))
    else:
        least, largest = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = ((largest - least) / most).to(dtype)
        zeros = (-least / scales.float()).round().long().clamp(0, most)
        zeros.view(-1)[::5] = 0  # also where nothing is negative
    codes = ((groups / scales.float()[..., None]).round().long() + zeros[..., None]).clamp(0, most)
    numbers = (codes - zeros[..., None]).float() * scales.float()[..., None]
    return codes.flatten(1), scales, zeros, numbers.flatten(1)


def in_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> [n, m * bits / 32] int32: number `order[i]` of a word's is in its field i."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).reshape(len(codes), -1, per_word)
    words = sum(codes[..., (order or range(per_word))[i]] << bits * i for i in range(per_word))
    assert isinstance(words, Tensor)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()
