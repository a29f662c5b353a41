"""Files that are damaged, or hold what we do not read: one error that says what was found and where, no worker left."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, QuireError
from quire.engine.model_source import ModelInfo, load_model_info
from quire.kernels import ops
from quire.kernels.packed import IN_8_BITS
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model


def check(path: Path) -> None:
    config = EngineConfig.model_validate({"model": {"model": str(path), "device": "cpu", "num_threads": 1}})
    check_model(config, load_model_info(config.model))


def load(path: Path, **options: object) -> None:
    model = {"model": str(path), "device": "cpu", "num_threads": 1, **options}
    config = EngineConfig.model_validate({"model": model})
    LocalExecutor(config, load_model_info(config.model)).shutdown()


def refused(path: Path, message: str) -> None:
    for attempt in (check, load):
        with pytest.raises(ConfigError, match=message):
            attempt(path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_tiny_llama(tmp_path)
    return tmp_path


def configure(directory: Path, **settings: object) -> None:
    """Change the configuration; None takes a key out."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 5000, b"{}", b"GGUF" + b"\x03" * 100])
def test_what_is_no_safetensors_file(llama: Path, content: bytes) -> None:
    (llama / "model.safetensors").write_bytes(content)
    refused(llama, f"{llama}/model.safetensors is not a readable safetensors file")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", r"index.json cannot be read"),
        ("[]", "has no weight_map from tensor names to file names"),
        ('{"weight_map": [1, 2]}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"model.norm.weight": 3}}', "has no weight_map from tensor names to file names"),
        ('{"weight_map": {"model.norm.weight": "gone.safetensors"}}', "gone.safetensors is not a readable safetensors"),
    ],
)
def test_damaged_index(llama: Path, index: str, message: str) -> None:
    (llama / "model.safetensors.index.json").write_text(index)
    refused(llama, message)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_quantized_without_saying_so(llama: Path, dtype: torch.dtype, implementation: str) -> None:
    """Numbers of these types mean nothing without scales: loading them as they are would serve noise."""
    file = llama / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype)}, file)
    fields = {"model": str(llama), "implementation": implementation, "device": "cpu"}
    config = EngineConfig.model_validate({"model": fields})
    with pytest.raises(ConfigError, match=rf"not in float32, bfloat16 or float16: {name} \((I8|U8|F8_E4M3|I32)\)"):
        check_model(config, load_model_info(config.model))


@pytest.mark.parametrize("method", ["bitsandbytes", "exl3", None, ["awq"]])
def test_ways_to_quantize_that_are_not_known(llama: Path, method: object) -> None:
    configure(llama, quantization_config={"quant_method": method, "bits": 4})
    refused(llama, rf"quant_method is {re.escape(repr(method))}; supported are awq, gptq, compressed-tensors, fp8, .*")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": None}, "the configuration does not say num_attention_heads"),
        ({"num_hidden_layers": "3"}, "the configuration holds something that cannot be"),
        ({"architectures": "LlamaForCausalLM"}, "architectures in the configuration of .* no list of names"),
        ({"architectures": None}, "not named in its configuration"),
        ({"vocab_size": None}, "has no usable 'vocab_size'"),
        ({"max_position_embeddings": "many"}, "has no usable"),
        ({"max_position_embeddings": float("inf")}, "cannot be used"),
        ({"max_position_embeddings": -5}, "gives it a context of -5 tokens"),
        ({"vocab_size": 200}, r"wrong shape: .*embed_tokens.weight \[199, 48\] instead of \[200, 48\]"),
    ],
)
def test_configurations_that_cannot_be(llama: Path, settings: dict[str, Any], message: str) -> None:
    configure(llama, **settings)
    refused(llama, message)


@pytest.mark.skipif(
    not ops.fits_packed((64, 64), IN_8_BITS, torch.float32, torch.device("cpu"), in_int8=True),
    reason="no kernel rounds x here",
)
def test_a_number_that_is_too_large_for_8_bits(tmp_path: Path) -> None:
    """Scales are float16. Whoever has such a weight learns which it is, and what to leave out."""
    make_tiny_llama(tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][5, 7] = 1e7
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
    with pytest.raises(ConfigError, match=r"^quantization: layers\.1\.mlp\.down\.weight in .* has a number of 1e\+07"):
        load(tmp_path, quantization="int8")


def test_only_pickles(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    torch.save({}, llama / "pytorch_model.bin")
    refused(llama, r"has neither model.safetensors nor model.safetensors.index.json")


def test_a_gguf_that_claims_too_many_layers(tmp_path: Path, smollm2: ModelInfo) -> None:
    content = bytearray(smollm2.path.read_bytes())
    value = content.index(b"llama.block_count") + len(b"llama.block_count") + 4  # the type stands before it
    content[value : value + 4] = (1 << 31).to_bytes(4, "little")
    path = tmp_path / "deep.gguf"
    path.write_bytes(content)
    refused(path, "claims 2147483648 layers and holds 272 tensors")


def test_random_damage_is_an_error_of_ours_or_none(tmp_path: Path) -> None:
    """Bytes of the configuration and of the header changed at random: loaded, or refused in one line."""
    source = tmp_path / "source"
    source.mkdir()
    make_tiny_llama(source)
    rng = random.Random(0)
    messages = []
    for attempt in range(80):
        directory = tmp_path / str(attempt)
        shutil.copytree(source, directory)
        file = directory / rng.choice(["config.json", "model.safetensors"])
        content = bytearray(file.read_bytes())
        limit = len(content) if file.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(limit)] = rng.choice(b'0123456789"{}[],:x\x00\xff')
        file.write_bytes(content)
        try:
            check(directory)
        except QuireError as error:
            messages.append(error.message)
        shutil.rmtree(directory)
    assert len(messages) > 40
    assert not [message for message in messages if "\n" in message]
