"""What cannot be loaded is refused in one clear line, and what is split is split without gap or overlap."""

from __future__ import annotations

import gc
import json
import os
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hf_reference import Reference
from safetensors.torch import load_file, save_file
from tiny_llama import VOCAB_SIZE, make_tiny_llama
from tokenizers import Tokenizer, models

from quire.cluster.assembly import start_core
from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import SUPPORTED_ARCHITECTURES, ModelInfo, load_model_info
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput
from quire.engine.tokenizer import load_tokenizer
from quire.kernels import ops
from quire.kernels.cpu import matrix_tiles
from quire.kernels.packed import IN_8_BITS, PACKINGS, unpack
from quire.workers import worker as worker_module
from quire.workers.blueprints import NativeBlueprint, blueprint_of
from quire.workers.layers.attention import LayerCache
from quire.workers.layers.linear import shard_heads
from quire.workers.layers.parameter import Int8Parameter, PackedParameter, PackedRows, num_bytes, num_weights
from quire.workers.loader.gguf import open_gguf
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model
from quire.workers.models.families import FAMILIES
from quire.workers.parallel import Grid, ParallelContext, Rendezvous, host_store, interface_of, join, split_range
from quire.workers.quantization import PackedBlueprint, blueprint_for
from quire.workers.worker import Worker, building, check_heads, resolve_device

rounds_in_int8 = pytest.mark.skipif(
    not ops.fits_packed((64, 64), IN_8_BITS, torch.float32, torch.device("cpu"), in_int8=True),
    reason="no kernel rounds x here",
)


def info_of(path: Path | str, **fields: object) -> ModelInfo:
    return load_model_info(ModelConfig.model_validate({"model": str(path), **fields}))


def load(info: ModelInfo, **sections: object) -> Worker:
    worker = Worker(EngineConfig.model_validate(sections), info, ParallelContext())
    worker.load_model()
    return worker


def test_supported_architectures_have_families() -> None:
    assert tuple(FAMILIES) == SUPPORTED_ARCHITECTURES


def test_directory(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, eos_token_id=[3, 7])
    info = info_of(tmp_path)
    assert (info.name, info.format, info.vocab_size, info.max_model_len) == (tmp_path.name, "safetensors", 199, 256)
    assert info.eos_token_ids == (3, 7)
    assert info_of(tmp_path, max_model_len=100, served_model_name="tiny").max_model_len == 100
    assert info_of(tmp_path, served_model_name="tiny").name == "tiny"


def test_refused_sources(tmp_path: Path, smollm2: ModelInfo) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-model' does not exist.*smollm2-135m-instruct"):
        info_of("no-such-model")
    with pytest.raises(ConfigError, match=r"has no config.json"):
        info_of(tmp_path)
    with pytest.raises(ConfigError, match="8193 is more than the model's own limit of 8192"):
        info_of(smollm2.path, max_model_len=8193)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"neither a directory nor a .gguf file"):
        info_of(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        info_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"\(MambaForCausalLM\) is not supported: transformers knows no such"):
        info_of(tmp_path)


@pytest.mark.parametrize("size", [0, 3, 20, 1000, 1_000_000])
def test_damaged_gguf_directory(tmp_path: Path, smollm2: ModelInfo, size: int) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2.path.open("rb") as whole:
        path.write_bytes(whole.read(size))
    with pytest.raises(ConfigError, match="is not a readable GGUF file"):
        info_of(path)


def test_gguf_cut_in_its_last_tensor(tmp_path: Path, smollm2: ModelInfo) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(smollm2.path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"is cut short: .* output_norm.weight needs"):
        load(info_of(path))


def test_wrong_tensors_are_named_together(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # of old checkpoints: ignored
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load(info_of(tmp_path))
    assert caught.value.message == (
        f"model: the weights in {tmp_path} do not fit its configuration. missing: layers.1.attention.qkv.weight (k); "
        "unexpected: model.layers.0.extra.weight; wrong shape: model.norm.weight [5] instead of [48]."
    )


def test_damaged_safetensors(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is not a readable safetensors file"):
        load(info_of(tmp_path))
    path.unlink()
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load(info_of(tmp_path))


def test_missing_shard(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, max_shard_size="20KB")
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(ConfigError, match=r"model-00001-of-\d+.safetensors is not a readable safetensors file"):
        load(info_of(tmp_path))


def test_tokenizer_of_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny_llama(tmp_path)
    words = {f"word{i}": i for i in range(VOCAB_SIZE)}

    def save(vocabulary: dict[str, int], special: list[str]) -> None:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
        tokenizer.add_special_tokens(special)
        tokenizer.save(str(tmp_path / "tokenizer.json"))

    save(words, ["<image>"])
    assert len(load_tokenizer(info_of(tmp_path))) == VOCAB_SIZE + 1
    assert "special tokens [199] have no row in the embedding of 199" in caplog.text
    save({**words, "more": VOCAB_SIZE}, [])
    with pytest.raises(ConfigError, match=r"token ids up to 199, the embedding has rows 0 to 198\."):
        load_tokenizer(info_of(tmp_path))


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
    ],
)
def test_gguf_holds_what_the_checkpoint_holds(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """A checkpoint written as llama.cpp writes it (rows of Q and K interleaved) loads as the original does."""
    path = _tiny_gguf(tmp_path, kind)
    info = info_of(path)
    ours, theirs = load(info).model, load(info_of(tmp_path)).model
    assert info.hf_config["tie_word_embeddings"] is False
    # Half a step of the quantization: values up to 1.3 in magnitude, in steps of 1/8, 1/15, 1/16, 1/31 and 1/127.
    steps = {"F32": 0.0, "Q4_0": 0.17, "Q4_1": 0.09, "Q5_0": 0.08, "Q5_1": 0.045}
    tolerance = steps.get(kind.name, 6e-3)
    stay_packed = kind.name.startswith("Q")
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # The norms are vectors, and no panel ends with the 199th token of the embedding and the head.
        is_packed = stay_packed and name.endswith(("qkv.weight", "output.weight", "gate_up.weight", "down.weight"))
        assert isinstance(mine, PackedParameter) is is_packed, name
        assert isinstance(mine, PackedRows) is (stay_packed and name == "embedding.weight"), name
        numbers = numbers_of(mine)
        torch.testing.assert_close(numbers, other, atol=tolerance, rtol=5e-3 if tolerance else 0, msg=name)
    packed_parts(path, kind)


def numbers_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Of what is packed, by a product with the identity, each of whose sums has one term, or by looking them up."""
    if isinstance(parameter, PackedRows):
        return parameter.embed(torch.arange(len(parameter)))
    if not isinstance(parameter, PackedParameter):
        return parameter
    return parameter.linear(torch.eye(parameter.packing.num_numbers(parameter.shape[1]))).T


def packed_parts(path: Path, kind: GGMLQuantizationType) -> None:
    """Packed parts have the numbers of parts that were unpacked."""
    with open_gguf(path, info_of(path).hf_config) as tensors:
        for name, source in tensors.items():
            packing = source.packing
            assert (packing is not None) is (kind.name.startswith("Q") and len(source.shape) == 2), name
            if packing is not None:
                for index in ((slice(0, source.shape[0]), slice(0, source.shape[1])), (slice(16, 32), slice(32, 64))):
                    assert torch.equal(unpack(source.read_packed(index), packing), source.read(index)), name


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_hold_packed_parts(tmp_path: Path, tied: bool) -> None:
    """What two ranks have of each weight, packed, is what they have of its numbers, where it is cut in whole blocks."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, vocab_size=224, tie_word_embeddings=tied)
    info = info_of(path)
    native = blueprint_of(info)
    assert isinstance(native, NativeBlueprint)
    packed = blueprint_for(ModelConfig(model=str(path)), info, torch.device("cpu"))
    assert isinstance(packed, PackedBlueprint)
    grid = Grid(tensor_size=2)
    for rank in range(2):
        parallel = ParallelContext(rank, grid)
        ours, theirs = packed.build(parallel), native.build(parallel)
        packed.load(ours, info, progress=False)
        native.load(theirs, info, progress=False)
        kinds = {}
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            kinds[name.removeprefix("layers.0.")] = isinstance(mine, PackedParameter)
            assert torch.equal(numbers_of(mine), other), name
        assert kinds["attention.qkv.weight"]
        assert kinds["mlp.down.weight"]  # 64 of 128 columns
        assert not kinds["attention.output.weight"]  # 48 of 96 columns: a block and a half
        assert kinds["embedding.weight"] is tied
        assert tied or kinds["head.weight"]  # 112 of 224 rows
        assert num_weights(ours.parameters()) == num_weights(theirs.parameters())
        twice = 112 * PACKINGS["q4_1"].row_bytes(96) if tied else 0  # to be multiplied, beside what is looked up
        assert num_bytes(ours.parameters()) - twice < num_bytes(theirs.parameters())


@pytest.mark.skipif(
    not ops.fits_packed((64, 64), IN_8_BITS, torch.bfloat16, torch.device("cpu")),
    reason="bfloat16 does not stay packed here",
)
def test_ranks_gather_logits_of_one_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two has a row less, so that its share of the head is no whole panels and is unpacked."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, vocab_size=223, tie_word_embeddings=False)
    blueprint = blueprint_for(ModelConfig(model=str(path)), info_of(path), torch.device("cpu"))
    gathered: list[torch.Tensor] = []
    monkeypatch.setattr(ParallelContext, "all_gather", lambda _self, tensor: gathered.append(tensor) or tensor)
    for rank, is_packed in ((0, True), (1, False)):
        with building(torch.device("cpu"), torch.bfloat16):
            model = blueprint.build(ParallelContext(rank, Grid(tensor_size=2)))
        assert isinstance(model.head.weight, PackedParameter) is is_packed
        assert model.head.logits(torch.zeros(1, 96, dtype=torch.bfloat16)).dtype == torch.float32
    assert [each.dtype for each in gathered] == [torch.bfloat16, torch.bfloat16]


def test_pieces_that_are_packed_differently(tmp_path: Path) -> None:
    """V in another way than Q and K, as many files have it: their common matrix is packed in a way that holds both, and
    has the same numbers. One that is not packed leaves none of it so."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, {"v_proj": GGMLQuantizationType.Q8_0})
    info = info_of(path)
    attention, native = load(info).model.layers["0"].attention, blueprint_of(info)
    whole = native.build(ParallelContext())
    native.load(whole, info, progress=False)
    assert isinstance(attention.qkv.weight, PackedParameter)
    assert attention.qkv.weight.packing.name == "8_1_32"
    assert torch.equal(numbers_of(attention.qkv.weight), whole.layers["0"].attention.qkv.weight)
    assert attention.output.weight.packing.name == "q4_1"
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, {"v_proj": GGMLQuantizationType.F16})
    attention = load(info_of(path)).model.layers["0"].attention
    assert not isinstance(attention.qkv.weight, PackedParameter)
    assert isinstance(attention.output.weight, PackedParameter)


def test_a_tied_head_that_is_packed(tmp_path: Path) -> None:
    """Its rows are looked up as numbers, and multiplied as they are packed."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q8_0, tie_word_embeddings=True, vocab_size=208)
    model = load(info_of(path)).model
    weight = model.embedding.weight
    places = sorted((each.data_ptr(), each.nbytes) for each in model.parameters())
    assert all(0 <= place - (before + size) < 64 for (before, size), (place, _) in pairwise(places))  # `host_memory`
    assert model.head is model.embedding
    assert isinstance(weight, PackedParameter)
    numbers = numbers_of(weight)
    ids = torch.tensor([0, 207, 5, 5])
    assert torch.equal(weight.embed(ids), numbers[ids])
    assert weight.matrix_shape == (208, 96)
    bounds = ops.bounds_packed(weight.packing, torch.float32, weight.device)
    assert weight.num_bytes == 208 * (2 * weight.packing.row_bytes(96) + 2 * 4 * bounds)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.head.likeliest(x), model.head.logits(x).argmax(dim=1))
    assert (weight.lengths is not None) == bounds
    if weight.lengths is not None:
        torch.testing.assert_close(weight.lengths[0], numbers.norm(dim=1))


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=rounds_in_int8)])
def test_only_the_first_stage_looks_tokens_up(tmp_path: Path, quantization: Literal["int8"] | None) -> None:
    """The last of two has a tied embedding as its head, and does not look up rows of it."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q8_0, tie_word_embeddings=True, vocab_size=208)
    info = info_of(path)
    blueprint = blueprint_for(ModelConfig(model=str(path), quantization=quantization), info, torch.device("cpu"))
    stages = [blueprint.build(ParallelContext(rank, Grid(num_stages=2))) for rank in range(2)]
    numbers = []
    for stage in stages:
        blueprint.load(stage, info, progress=False)
        weight = stage.embedding.weight
        numbers.append(numbers_of(weight))
    assert isinstance(stages[0].embedding.weight, PackedRows)
    last = stages[1].embedding.weight
    assert isinstance(last, PackedParameter)
    assert last.rows is None
    assert torch.equal(numbers[0], numbers[1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_1", "F16", "Q4_1 and Q8_0"])
@rounds_in_int8
def test_packed_weights_in_int8(tmp_path: Path, kind: str, tied: bool) -> None:
    """What is packed in the file has its numbers; what is not is packed in 8 bits. The head does not round what
    multiplies it. What is looked up is not rounded again."""
    stored, config = GGMLQuantizationType[kind.partition(" ")[0]], {"vocab_size": 224, "tie_word_embeddings": tied}
    others = {"v_proj": GGMLQuantizationType.Q8_0} if "and" in kind else {}
    info = info_of(_tiny_gguf(tmp_path, stored, others, **config))
    ours, theirs = load(info, model={"quantization": "int8"}).model, dict(load(info).model.named_parameters())
    kinds = {name: p for name, p in ours.named_parameters() if p.dim() == 2}
    assert len(kinds) == 3 * 4 + (1 if tied else 2)
    for name, weight in kinds.items():
        is_head = name == ("embedding.weight" if tied else "head.weight")
        if name == "embedding.weight" and (kind == "F16" or not tied):
            assert isinstance(weight, Int8Parameter if kind == "F16" else PackedRows)
            continue
        assert isinstance(weight, PackedParameter), name
        assert weight.in_int8 is not is_head
        numbers, expected = numbers_of(weight), numbers_of(theirs[name])
        is_joint = others and name.endswith("qkv.weight")
        assert weight.packing.name == ("q8_0" if kind == "F16" else "8_1_32" if is_joint else "q4_1")
        if kind != "F16":
            torch.testing.assert_close(numbers, expected, rtol=0 if is_head else 2**-22, atol=0)
        else:
            off, largest = (each.abs().unflatten(1, (-1, 32)).amax(dim=2) for each in (numbers - expected, expected))
            assert (off <= 0.501 / 127 * largest).all()
        if weight.rows is not None:
            assert torch.equal(weight.embed(torch.arange(224)), expected)
        if is_head:
            x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
            assert torch.equal(ours.head.likeliest(x), ours.head.logits(x).argmax(dim=1))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_1 and Q8_0"])
@pytest.mark.skipif(not matrix_tiles.are_available(), reason="this CPU has no matrix tiles")
def test_int8_keeps_4_bits_where_matrix_tiles_take_them(tmp_path: Path, kind: str) -> None:
    """With x in bfloat16. What has 8 bits, also beside others in one matrix, becomes rows of bytes."""
    stored, config = GGMLQuantizationType[kind.partition(" ")[0]], {"vocab_size": 224, "tie_word_embeddings": False}
    others = {"v_proj": GGMLQuantizationType.Q8_0} if "and" in kind else {}
    path = _tiny_gguf(tmp_path, stored, others, **config)
    info, without = info_of(path, dtype="bfloat16"), {"model": str(path), "dtype": "bfloat16"}
    ours = load(info, model={**without, "quantization": "int8"}).model
    theirs = dict(load(info, model=without).model.named_parameters())
    kinds = {name: p for name, p in ours.named_parameters() if p.dim() == 2}
    assert len(kinds) == 3 * 4 + 2
    for name, weight in kinds.items():
        if name == "embedding.weight":
            assert isinstance(weight, PackedRows)
        elif kind == "Q8_0" or (others and name.endswith("qkv.weight")):
            assert isinstance(weight, Int8Parameter), name
        else:
            assert isinstance(weight, PackedParameter), name
            assert weight.packing.name == "q4_1"
            assert torch.equal(weight, theirs[name]), "the same bytes, which the same kernel multiplies"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_int8_are_not_rounded_to_bfloat16(tmp_path: Path, tied: bool) -> None:
    """Whatever a head is in 8 bits as. Tokens that differ by less would be equally likely."""
    make_tiny_llama(tmp_path, tie_word_embeddings=tied, hidden_size=64, num_attention_heads=4, vocab_size=224)
    fields = {"model": str(tmp_path), "dtype": "bfloat16", "quantization": "int8"}
    head = load(info_of(tmp_path, dtype="bfloat16"), model=fields).model.head.weight
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = head.logits(x)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits.bfloat16(), head.linear(x), rtol=2**-7, atol=2**-7)
    assert torch.equal(head.likeliest(x), logits.argmax(dim=1))


@rounds_in_int8
def test_ranks_hold_packed_parts_in_int8(tmp_path: Path) -> None:
    """Parts that end with whole blocks have the numbers of the whole; others a scale for each row."""
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, vocab_size=224, tie_word_embeddings=False)
    info = info_of(path)
    blueprint = blueprint_for(ModelConfig(model=str(path), quantization="int8"), info, torch.device("cpu"))
    native, grid = blueprint_of(info), Grid(tensor_size=2)
    for rank in range(2):
        parallel = ParallelContext(rank, grid)
        ours, theirs = blueprint.build(parallel), native.build(parallel)
        blueprint.load(ours, info, progress=False)
        native.load(theirs, info, progress=False)
        for (name, mine), other in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            if name.endswith("attention.output.weight"):  # 48 of 96 columns: a block and a half
                assert isinstance(mine, Int8Parameter)
            elif mine.dim() == 2:
                assert isinstance(mine, PackedRows if name == "embedding.weight" else PackedParameter), name
                torch.testing.assert_close(numbers_of(mine), other[1], rtol=2**-22, atol=0)


@pytest.mark.parametrize("fields", [{"load_format": "dummy"}, {"quantization": "fp8"}, {"dtype": "float16"}])
def test_what_is_not_kept_packed(tmp_path: Path, fields: dict[str, str]) -> None:
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1)
    info = info_of(path, **fields)
    model = load(info, model={"model": str(path), **fields}).model
    assert not any(isinstance(parameter, PackedParameter) for parameter in model.parameters())


def test_check_counts_what_packed_weights_take(tmp_path: Path) -> None:
    path = _tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1)
    config = EngineConfig.model_validate({"model": {"model": str(path), "device": "cpu"}})
    found, model = check_model(config, info_of(path)), load(info_of(path)).model
    assert found.weight_bytes == (num_bytes(model.parameters()),)
    assert found.num_parameters == sum(p.numel() for p in load(info_of(tmp_path)).model.parameters())
    per_weight = PACKINGS["q4_1"].row_bytes(96) / 96
    assert found.weight_bytes[0] < found.num_parameters * 4 - (96 + 2 * 32) * 96 * (4 - per_weight)


def _tiny_gguf(
    folder: Path,
    kind: GGMLQuantizationType,
    others: dict[str, GGMLQuantizationType] | None = None,
    **config: object,
) -> Path:
    model = make_tiny_llama(folder, hidden_size=96, intermediate_size=128, **config)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    path = folder / "model.gguf"
    _write_gguf(path, state, kind, others)
    return path


def _write_gguf(
    path: Path,
    state: dict[str, np.ndarray],
    kind: GGMLQuantizationType,
    others: dict[str, GGMLQuantizationType] | None = None,
) -> None:
    from gguf.quants import quantize

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    }  # fmt: skip
    writer = GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 3, "context_length": 256, "embedding_length": 96, "feed_forward_length": 128,
        "attention.head_count": 6, "attention.head_count_kv": 2, "rope.dimension_count": 16,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    for name, values in state.items():
        stored = name
        for theirs, short in names.items():
            stored = stored.replace(theirs, short)
        if "q_proj" in name or "k_proj" in name:  # llama.cpp's permute(): halves of a head become neighbours
            values = values.reshape(-1, 2, 8, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        wanted = next((other for part, other in (others or {}).items() if part in name), kind)
        stored_as = GGMLQuantizationType.F32 if values.ndim == 1 else wanted
        writer.add_tensor(stored, quantize(values, stored_as), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_memory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_llama(tmp_path)
    info = info_of(tmp_path)
    with pytest.raises(ConfigError, match=r"cache.memory_bytes: .* are missing"):
        load(info, cache={"memory_bytes": 1 << 60}).available_kv_cache_bytes()
    with pytest.raises(ConfigError, match=r"cache.num_kv_blocks: .* are missing"):
        load(info, cache={"num_kv_blocks": 1 << 40}).available_kv_cache_bytes()
    monkeypatch.setattr("quire.workers.worker.free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"the weights of .* 1,000 are free on cpu, [\d,]+ are missing"):
        load(info)


def test_cache_is_no_larger_than_useful(tmp_path: Path) -> None:
    """2 requests of 256 tokens: 32 blocks of 16, and the null block; 3 layers, 2 KV heads of 16 in float32."""
    make_tiny_llama(tmp_path)
    worker = load(info_of(tmp_path), scheduler={"max_num_seqs": 2})
    assert worker.available_kv_cache_bytes() == 33 * 3 * (2 * 16 * 2 * 16 * 4)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load(info_of(tmp_path), model={"load_format": "dummy"}).model
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (6, 1), (8, 8), (12, 4), (32, 8)])
def test_heads_are_dealt_to_all_ranks(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for size in range(1, num_heads + 1):
        shards = [shard_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]
        assert [head for shard in shards for head in shard.heads] == list(range(num_heads))
        for shard in shards:
            assert len(shard.heads) > 0
            assert set(shard.kv_heads) == {head // group for head in shard.heads}
            assert len(shard.heads) % len(shard.kv_heads) == 0
            assert len(shard.kv_heads) <= len(shards[0].kv_heads)
    with pytest.raises(ConfigError, match="cannot share"):
        shard_heads(num_heads, num_kv_heads, 0, num_heads + 1)


def test_split_range() -> None:
    assert [split_range(9, rank, 2) for rank in range(2)] == [range(5), range(5, 9)]
    assert [len(split_range(3, rank, 4)) for rank in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize(("backend", "interface"), [("gloo", "lo"), ("nccl", "=lo")])
@pytest.mark.parametrize("given", [None, "eth7"])
def test_ranks_meet_on_the_interface_of_their_node(
    backend: str, interface: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or on the one that the user names."""
    name = f"{backend.upper()}_SOCKET_IFNAME"
    monkeypatch.setenv(name, "")  # and so it is put back
    if given is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    store = host_store("127.0.0.1", 1)
    join(Rendezvous("127.0.0.1", store.port), 0, Grid(), local_address="127.0.0.1", backend=backend, store=store)
    assert os.environ[name] == (given or interface)


def test_interface_of() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"203.0.113.9 belongs to no network interface"):
        interface_of("203.0.113.9")


def test_failed_step_fails_later_ones_until_restart(tmp_path: Path) -> None:
    """A row that was never written cannot be computed; after a restart the same executor answers right."""
    from core_driver import Driver

    from quire.engine.errors import ExecutorError
    from quire.engine.outputs import SchedulerOutput

    model = make_tiny_llama(tmp_path)
    executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), info_of(tmp_path))
    driver = Driver(executor, 256)
    one = np.ones(1, np.int32)
    bad = SchedulerOutput(step_id=0, rows=one, num_scheduled_tokens=one, num_computed_tokens=one)
    for _ in range(2):
        with pytest.raises(ExecutorError, match="step 0 failed"):
            executor.execute(bad).result()
    (answer,) = driver.greedy([[5, 6, 7]], 4)  # the core restarts the executor when its own step fails
    Reference(model).check_greedy([5, 6, 7], answer.token_ids)
    executor.shutdown()


def test_what_was_shut_down_is_freed_though_it_is_still_held(tmp_path: Path) -> None:
    """At once, for the next engine of the process may need its memory."""
    make_tiny_llama(tmp_path)
    sections = {"model": {"num_threads": 1}, "cache": {"num_kv_blocks": 20}}
    core = start_core(EngineConfig.model_validate(sections), info_of(tmp_path))
    worker = core.executor._worker  # type: ignore[attr-defined]
    held = [weakref.ref(thing) for thing in (worker.runner, *worker.model.parameters())]
    gc.disable()
    try:
        core.shutdown()
        assert len(held) > 10
        assert [ref() for ref in held if ref() is not None] == []
    finally:
        gc.enable()


def test_one_prompt_of_each_power_of_two_and_a_long_decode_before_a_gpu_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles, and so what is compiled, depend on the rows of a step by powers of two, and on whether the keys of one are
    cut in parts."""
    make_tiny_llama(tmp_path)
    worker = load(
        info_of(tmp_path), model={"enforce_eager": True}, scheduler={"max_num_batched_tokens": 44, "max_num_seqs": 4}
    )
    sizes, contexts, wanted, num_blocks = [], [], [], []
    run, make = worker.execute_model, worker._make_runner

    def execute_model(step: SchedulerOutput) -> ModelRunnerOutput:
        sizes.append(step.num_scheduled_tokens.tolist())
        wanted.append([new.sampling_params.logprobs for new in step.new_rows])
        contexts.append(step.num_computed_tokens.tolist())
        assert max(block for new in step.new_rows for group in new.block_ids for block in group) < num_blocks[-1]
        return run(step)

    def make_runner(config: KVCacheConfig) -> list[LayerCache]:
        num_blocks.append(config.num_blocks)
        return make(config)

    monkeypatch.setattr(worker, "execute_model", execute_model)
    monkeypatch.setattr(worker, "_make_runner", make_runner)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 0)
    worker._measure_activations()
    assert sizes == [[11] * 4, [1], [2], [4], [8], [16], [32], [44], [1]]
    assert contexts == [[0] * 4, *[[0]] * 7, [255]]  # as long as this model takes, and longer than the largest step
    assert wanted == [[20, 20, 20, None], *[[None]] * 8]  # those of some rows are copied before they are sorted


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (
            "13.0",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (a@b)\n"
            "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n",
            "it is a build for CUDA 13.0, and the NVIDIA driver is 570.86.10.",
        ),
        (None, "", "it is a build for CPUs, and no NVIDIA driver was found."),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_told_with_the_versions(
    cuda: str | None, driver: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(worker_module, "_DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(driver)
    with pytest.raises(ConfigError) as caught:
        resolve_device("cuda")
    assert caught.value.message == f"model.device: 'cuda' was given, but torch sees no GPU: {said}"


def test_heads_that_a_gpu_has_no_tiles_for_are_refused_before_weights_are_read() -> None:
    specs = [KVCacheSpec(16, 1, size, 2, None) for size in (64, 257)]
    check_heads(specs[:1], torch.device("cuda"))
    check_heads(specs, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^model\.model: attention on a GPU takes heads of up to 256 .* have 257"):
        check_heads(specs, torch.device("cuda"))
