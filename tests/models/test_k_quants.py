"""GGUF files in types whose blocks have 256 numbers, or codes that are looked up, stay packed with the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer
from quire.kernels import ops
from quire.kernels.packed import IN_8_BITS, PACKINGS, unpack
from quire.workers.blueprints import blueprint_of
from quire.workers.layers.parameter import PackedParameter, PackedRows
from quire.workers.loader.gguf import open_gguf
from quire.workers.models.model import Model
from quire.workers.parallel import Grid, ParallelContext
from quire.workers.quantization import blueprint_for
from quire.workers.worker import building
from tests.benchmarks import k_quants

UNPACKED = ("IQ3_S", "TQ2_0")
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ2_0": (64,)}  # bytes; other types begin with theirs
HIDDEN, MLP, VOCAB = 256, 512, 224
rounds_in_int8 = pytest.mark.skipif(
    not ops.fits_packed((64, 64), IN_8_BITS, torch.float32, torch.device("cpu"), in_int8=True),
    reason="no kernel rounds x here",
)


def random_blocks(kind: GGMLQuantizationType, num_rows: int, num_columns: int) -> np.ndarray:
    """Rows of a quantized type: anything but for the float16, which are numbers."""
    rng, (block_size, block_bytes) = np.random.default_rng(num_rows), GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows * num_columns // block_size, block_bytes), dtype=np.uint8)
    for place in HALVES.get(kind.name, (0, 2) if kind.name in ("Q4_K", "Q5_K") else (0,)):
        blocks[:, place : place + 2] = rng.normal(0, 1e-4, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL", *UNPACKED])
def test_parts_of_a_tensor(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rows and columns are those of the whole tensor dequantized; packed ones too, in whole blocks."""
    type_, path = GGMLQuantizationType[kind], tmp_path / "model.gguf"
    raw = random_blocks(type_, 48, 768)
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "head_dim": 16}
    with open_gguf(path, llama) as tensors:
        source = tensors["model.layers.0.mlp.down_proj.weight"]
        assert source.shape == (48, 768)
        part = source.read((slice(2, 5), slice(100, 300)))
        np.testing.assert_array_equal(part.numpy(), dequantize(raw, type_)[2:5, 100:300])
        assert (source.packing is None) is (kind in UNPACKED)
        if source.packing is None:
            return
        for index in ((slice(0, 48), slice(0, 768)), (slice(16, 33), slice(256, 512))):
            rows = source.read_packed(index)
            assert rows.shape[1] == source.packing.row_bytes(index[1].stop - index[1].start)
            assert torch.equal(unpack(rows, source.packing), source.read(index))
            with monkeypatch.context() as patched:
                patched.setattr("quire.workers.loader.gguf._AT_ONCE", 2 * 768 + 5)  # two rows
                assert torch.equal(source.read_packed(index), rows)


def write_model(path: Path, kind: str, others: dict[str, str], mlp: int = MLP) -> None:
    """A Llama of two layers; `others`: types of matrices that have another."""
    of_layer = {
        "attn_q": (512, HIDDEN), "attn_k": (128, HIDDEN), "attn_v": (128, HIDDEN), "attn_output": (HIDDEN, 512),
        "ffn_gate": (mlp, HIDDEN), "ffn_up": (mlp, HIDDEN), "ffn_down": (HIDDEN, mlp),
    }  # fmt: skip
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 2, "context_length": 256, "embedding_length": HIDDEN, "feed_forward_length": mlp,
        "attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 64,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    shapes = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in of_layer.items()}
    for name, shape in {**shapes, "token_embd": (VOCAB, HIDDEN)}.items():
        type_ = GGMLQuantizationType[others.get(name.rpartition(".")[2], kind)]
        writer.add_tensor(f"{name}.weight", random_blocks(type_, *shape), raw_dtype=type_)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm", "blk.1.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(
    path: Path, parallel: ParallelContext, *, is_packed: bool, quantization: Literal["int8"] | None = None
) -> Model:
    config = ModelConfig(model=str(path), quantization=quantization)
    info = load_model_info(config)
    blueprint = blueprint_for(config, info, torch.device("cpu")) if is_packed else blueprint_of(info)
    model = blueprint.build(parallel)
    blueprint.load(model, info, progress=False)
    return model


def numbers_of(weight: PackedParameter) -> torch.Tensor:
    """By a product each of whose sums has one term."""
    return weight.linear(torch.eye(weight.matrix_shape[1])).T


def check(weight: PackedParameter, numbers: torch.Tensor) -> None:
    largest = numbers.abs().amax(dim=1, keepdim=True)
    assert ((numbers_of(weight) - numbers).abs() <= 2**-22 * 16 * largest).all()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "others", "joint"),
    [
        ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}, "k6_1_16"),  # Q4_K_M
        ("Q5_K", {"attn_v": "Q6_K", "token_embd": "Q6_K"}, "k6_1_16"),
        ("Q3_K", {"attn_v": "Q5_K", "attn_output": "Q4_K"}, "k6_1_16"),
        ("Q2_K", {"attn_v": "Q4_K", "ffn_down": "Q3_K", "token_embd": "Q6_K"}, "q2_k"),
        ("IQ4_XS", {"attn_v": "Q5_K", "ffn_down": "Q3_K"}, "k8_1_32"),
        ("Q6_K", {}, "q6_k"),
    ],
)
def test_a_model(tmp_path: Path, kind: str, others: dict[str, str], joint: str, num_ranks: int) -> None:
    """All matrices stay packed, on each rank, and have the numbers that the file stands for."""
    path = tmp_path / "model.gguf"
    write_model(path, kind, others)
    for rank in range(num_ranks):
        parallel = ParallelContext(rank, Grid(tensor_size=num_ranks))
        packed, whole = (build(path, parallel, is_packed=is_packed) for is_packed in (True, False))
        for (name, mine), numbers in zip(packed.named_parameters(), whole.parameters(), strict=True):
            if numbers.dim() == 1:
                continue
            assert isinstance(mine, PackedParameter), name
            if name.endswith("qkv.weight"):
                assert mine.packing.name == joint
            if name == "embedding.weight":
                assert isinstance(mine.rows, PackedRows)
                assert torch.equal(mine.embed(torch.arange(len(mine))), numbers)
            check(mine, numbers)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=rounds_in_int8)])
def test_what_cannot_stay_as_it_is(tmp_path: Path, quantization: Literal["int8"] | None) -> None:
    """A rank's part that is no multiple of 256, and a matrix whose pieces have no form in common: they are unpacked, or
    packed anew in 8 bits, and all else is left."""
    path = tmp_path / "model.gguf"
    write_model(path, "Q4_K", {"attn_v": "Q5_0"}, mlp=768)
    for rank in range(2):
        parallel = ParallelContext(rank, Grid(tensor_size=2))
        model = build(path, parallel, is_packed=True, quantization=quantization)
        whole = build(path, parallel, is_packed=False)
        own = {name.removeprefix("layers.1."): weight for name, weight in model.named_parameters()}
        numbers = {name.removeprefix("layers.1."): weight for name, weight in whole.named_parameters()}
        assert own["mlp.gate_up.weight"].packing.name == "q4_k"
        assert own["attention.output.weight"].packing.name == "q4_k"
        for name in ("mlp.down.weight", "attention.qkv.weight"):
            weight, expected = own[name], numbers[name]
            if quantization is None:
                assert not isinstance(weight, PackedParameter)
                assert torch.equal(weight, expected)
            else:
                assert weight.packing == IN_8_BITS
                off, largest = (
                    each.abs().unflatten(1, (-1, 32)).amax(dim=2) for each in (numbers_of(weight) - expected, expected)
                )
                assert (off <= 0.502 / 127 * largest + 2**-25).all()  # a scale is the next float16


@rounds_in_int8
def test_in_int8(tmp_path: Path) -> None:
    """Codes stay what they are; what multiplies them is rounded, which a number alone is not."""
    path = tmp_path / "model.gguf"
    write_model(path, "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"})
    packed = build(path, ParallelContext(), is_packed=True, quantization="int8")
    whole = build(path, ParallelContext(), is_packed=False)
    for (name, mine), numbers in zip(packed.named_parameters(), whole.parameters(), strict=True):
        if numbers.dim() == 2 and name != "embedding.weight":
            assert isinstance(mine, PackedParameter)
            assert mine.in_int8
            check(mine, numbers)


@pytest.mark.skipif(
    not ops.fits_packed((64, 256), PACKINGS["q4_k"], torch.bfloat16, torch.device("cpu")),
    reason="bfloat16 does not stay packed here",
)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_in_bfloat16(tmp_path: Path, num_tokens: int) -> None:
    """Few rows and many: as near to the products of its numbers as rounding leaves them."""
    path = tmp_path / "model.gguf"
    write_model(path, "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K"})
    with building(torch.device("cpu"), torch.bfloat16):
        packed = build(path, ParallelContext(), is_packed=True)
    whole = build(path, ParallelContext(), is_packed=False)
    for (name, mine), numbers in zip(packed.named_parameters(), whole.parameters(), strict=True):
        if numbers.dim() == 1:
            continue
        assert isinstance(mine, PackedParameter), name
        x = torch.randn(num_tokens, numbers.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        exact = x.double() @ numbers.double().T
        allowed = 2**-8 * exact.abs() + 2**-8 * (x.double().abs() @ numbers.double().abs().T)
        assert ((mine.linear(x).double() - exact).abs() <= allowed).all(), name


@pytest.mark.parametrize("shape", k_quants.SHAPES)
def test_the_models_of_the_benchmark(tmp_path: Path, shape: str) -> None:
    """In small: whole models with the default one's tokenizer, whose weights are not what that has."""
    sizes = {"hidden": 128, "layers": 2, "mlp": 192, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 49_160}
    path = tmp_path / "model.gguf"
    k_quants.write_model(path, replace(k_quants.SHAPES[shape], **sizes))
    info = load_model_info(ModelConfig(model=str(path)))
    own, default = load_tokenizer(info), load_tokenizer(load_model_info(ModelConfig(model="smollm2-135m-instruct")))
    assert own.encode("Once upon a time") == default.encode("Once upon a time")
    model = build(path, ParallelContext(), is_packed=False)
    numbers = dict(model.named_parameters())
    assert numbers["embedding.weight"].shape == (49_160, 128)
    assert 0.019 < numbers["layers.1.mlp.down.weight"].std() < 0.021


def test_on_a_gpu(tmp_path: Path) -> None:
    """All that is multiplied is packed, but for an embedding that is the head: it is looked up, too."""
    pytest.importorskip("triton")
    path = tmp_path / "model.gguf"
    write_model(path, "Q4_K", {"attn_v": "Q6_K"})
    info = load_model_info(ModelConfig(model=str(path)))
    for dtype in (torch.bfloat16, torch.float16):
        with building(torch.device("meta"), dtype):
            model = blueprint_for(ModelConfig(model=str(path)), info, torch.device("cuda")).build(ParallelContext())
        found = {name: p.packing.name for name, p in model.named_parameters() if isinstance(p, PackedParameter)}
        names = [f"{each}.weight" for each in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")]
        packings = ("k6_1_16", "q4_k", "q4_k", "q4_k")
        assert found == {
            f"layers.{layer}.{name}": packing
            for layer in range(2)
            for name, packing in zip(names, packings, strict=True)
        }
