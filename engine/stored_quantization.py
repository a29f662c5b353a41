"""How the weights of a checkpoint are quantized, as its `quantization_config` says: AWQ, GPTQ, compressed-tensors, FP8,
MXFP4.

What tensors say themselves (which layers, how many scales) is left to them: `workers/loader/quantized.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ConfigError

_TENSORS = Literal["awq", "gptq", "compressed-tensors", "fp8", "mxfp4"]
_SUPPORTED = "awq, gptq, compressed-tensors, fp8, fbgemm_fp8, modelopt (FP8), mxfp4"
# https://github.com/vllm-project/compressed-tensors names them. Others store four bits of a float, or leave zeros out.
_COMPRESSED = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_GPTQ_BITS = (2, 4, 8)  # a word of 32 holds whole numbers of these
_GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what zero points are stored less, in as many bits


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Whose names and orders tensors have, and what their shapes leave open."""

    tensors: _TENSORS
    bits: int = 8  # of a code: of AWQ and GPTQ
    group_size: int | None = None  # inputs that share a scale: of AWQ and GPTQ; None: all of a row
    zeros_less: int = 0  # what zero points are stored less, in as many bits
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    rounds_x: bool = False  # what multiplies any matrix is meant to be in 8 bits, no more scales than tokens


def stored_quantization(hf_config: Mapping[str, Any]) -> StoredQuantization | None:
    """None where nothing is quantized. Raises `ConfigError` naming what is not supported."""
    given = hf_config.get("quantization_config") or hf_config.get("compression_config")  # the second of older ones
    if not given:
        return None
    if not isinstance(given, dict):
        raise ConfigError(f"model: quantization_config is {given!r}, no object.")
    method = given.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(
            f"model: quantization_config.quant_method is {method!r}; supported are {_SUPPORTED}, checkpoints that are "
            "not quantized, and GGUF files."
        )
    return reader(given)


def _awq(given: Mapping[str, Any]) -> StoredQuantization:
    version = given.get("version") or given.get("format") or "gemm"
    _check("version", version, isinstance(version, str) and version.lower() == "gemm", "gemm")
    _check("bits", given.get("bits"), given.get("bits") == 4, "4")
    return StoredQuantization("awq", 4, _group_size(given))


def _gptq(given: Mapping[str, Any]) -> StoredQuantization:
    version, bits = given.get("checkpoint_format") or given.get("format") or "gptq", given.get("bits", 0)
    _check("checkpoint_format", version, version in _GPTQ_FORMATS, " or ".join(_GPTQ_FORMATS))
    _check("bits", bits, bits in _GPTQ_BITS, "2, 4 or 8")
    for pattern, own in (given.get("dynamic") or {}).items():
        _check(f"dynamic[{pattern!r}].bits", own.get("bits", bits), own.get("bits", bits) == bits, f"{bits}, as of all")
    words = given.get("pack_dtype") or "int32"
    _check("pack_dtype", words, words == "int32", "int32")
    return StoredQuantization("gptq", bits, _group_size(given), _GPTQ_FORMATS[version])


def _compressed(given: Mapping[str, Any]) -> StoredQuantization:
    groups = given.get("config_groups") or {}
    formats = [given.get("format"), *(group.get("format") for group in groups.values())]
    for each in formats:
        _check("format", each, each is None or each in _COMPRESSED, ", ".join(_COMPRESSED))
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    _check("sparsity_config.format", sparsity, sparsity == "dense", "dense")
    transforms = given.get("transform_config")
    _check("transform_config", transforms, not transforms, "weights that are not rotated")
    blocks = {tuple(size) for group in groups.values() if (size := (group.get("weights") or {}).get("block_structure"))}
    _check("config_groups", sorted(blocks), len(blocks) <= 1, "blocks of one size")
    rounds_x = len(groups) > 0 and all(_rounds_x(group.get("input_activations")) for group in groups.values())
    return StoredQuantization("compressed-tensors", block=_block(*blocks) if blocks else None, rounds_x=rounds_x)


def _rounds_x(given: Any) -> bool:
    """Whether activations are whole numbers of 8 bits, as many below zero as above, with a scale for each token or one
    for all."""
    if not isinstance(given, dict):
        return False
    is_whole = given.get("num_bits") == 8 and given.get("type", "int") == "int"
    return is_whole and given.get("symmetric", True) is True and given.get("strategy") in ("token", "tensor")


def _fp8(given: Mapping[str, Any]) -> StoredQuantization:
    block = given.get("weight_block_size")
    return StoredQuantization("fp8", block=None if block is None else _block(block))


def _modelopt(given: Mapping[str, Any]) -> StoredQuantization:
    _check("quant_algo", given.get("quant_algo"), given.get("quant_algo") == "FP8", "FP8")
    return StoredQuantization("fp8")


def _mxfp4(_given: Mapping[str, Any]) -> StoredQuantization:
    return StoredQuantization("mxfp4")


_READERS = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _block(given: Any) -> tuple[int, int]:
    is_size = (
        isinstance(given, list | tuple) and len(given) == 2 and all(type(each) is int and each > 0 for each in given)
    )
    _check("weight_block_size", given, is_size, "rows and columns")
    return given[0], given[1]


def _group_size(given: Mapping[str, Any]) -> int | None:
    size = given.get("group_size")
    _check("group_size", size, type(size) is int and (size > 0 or size == -1), "a number of inputs, or -1 for all")
    return None if size == -1 else size


def _check(field: str, value: Any, is_supported: bool, supported: str) -> None:
    if not is_supported:
        raise ConfigError(f"model: quantization_config.{field} is {value!r}; supported: {supported}.")
