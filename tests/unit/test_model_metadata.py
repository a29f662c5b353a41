"""Models whose metadata are not what they should be: one line that says so, whatever is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.engine.config import ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import load_model_info

UINT32, FLOAT, STRING, ARRAY = 4, 6, 8, 9
Value = tuple[int, bytes]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def array(*values: int) -> Value:
    return ARRAY, number(UINT32) + struct.pack("<Q", len(values)) + b"".join(map(number, values))


GOOD: dict[str, Value] = {
    "general.architecture": (STRING, text("llama")),
    "llama.attention.head_count": (UINT32, number(4)),
    "llama.embedding_length": (UINT32, number(64)),
    "llama.feed_forward_length": (UINT32, number(64)),
    "llama.block_count": (UINT32, number(1)),
    "llama.context_length": (UINT32, number(96)),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT, struct.pack("<f", 1e-5)),
}
NESTED = b"".join(number(ARRAY) + struct.pack("<Q", 1) for _ in range(3000)) + number(UINT32) + struct.pack("<Q", 0)


def write(path: Path, changes: dict[str, Value], shape: tuple[int, ...] = (64, 10)) -> None:
    entries = [text(key) + number(kind) + value for key, (kind, value) in {**GOOD, **changes}.items()]
    dims = number(len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
    tensor = text("token_embd.weight") + dims + number(0) + struct.pack("<Q", 0)
    head = b"GGUF" + number(3) + struct.pack("<QQ", 1, len(entries))
    path.write_bytes(head + b"".join(entries) + tensor + bytes(64))


def test_a_good_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {})
    info = load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert (info.max_model_len, info.vocab_size, info.hidden_size) == (96, 10, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"general.alignment": (UINT32, number(0))},
        {"general.alignment": (STRING, text("32"))},
        {"general.architecture": array(4)},
        {"nested": (ARRAY, NESTED)},
        {"llama.attention.head_count": (UINT32, number(0))},
        {"llama.attention.head_count": array(4, 4)},
        {"llama.block_count": (STRING, text("x"))},
        {"llama.attention.layer_norm_rms_epsilon": (STRING, text("x"))},
        {"llama.context_length": (UINT32, number(0))},
        {"tokenizer.ggml.eos_token_id": array(4)},
    ],
    ids=lambda changes: f"{next(iter(changes))}-{next(iter(changes.values()))[0]}",
)
def test_metadata_that_cannot_be(tmp_path: Path, changes: dict[str, Value]) -> None:
    write(tmp_path / "m.gguf", changes)
    with pytest.raises(ConfigError) as caught:
        load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert caught.value.message.count("\n") == 0


def test_an_embedding_without_a_shape(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {}, shape=())
    with pytest.raises(ConfigError, match="cannot be used"):
        load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_scaling": {"type": "dynamic"}}, r"cannot be used \(KeyError\('factor'\)\)"),
        ({"rope_scaling": [1]}, "cannot be used"),
        ({"max_position_embeddings": float("inf")}, "cannot be used"),
        ({"max_position_embeddings": -5}, "gives it a context of -5 tokens"),
        ({"eos_token_id": "x"}, "eos_token_id in the configuration of .* is 'x', no id and no list of ids"),
        ({"eos_token_id": ["x"]}, r"is \['x'\], no id and no list of ids"),
        ({"eos_token_id": [-1]}, r"is \[-1\], no id and no list of ids"),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    good = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({**good, **settings}))
    with pytest.raises(ConfigError, match=message):
        load_model_info(ModelConfig(model=str(tmp_path)))
