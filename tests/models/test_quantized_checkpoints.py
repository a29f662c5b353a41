"""Checkpoints in AWQ, GPTQ, compressed-tensors and FP8 are the models of the numbers that they stand for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_driver import Driver
from quantized_files import (
    Scheme,
    awq,
    compressed,
    compressed_config,
    compressed_int8,
    float8,
    gptq,
    w8a8,
    write_mxfp4,
    write_quantized,
)
from safetensors.torch import load_file, save_file
from tiny_fallbacks import TINY_FALLBACKS
from tiny_families import TINY_FAMILIES
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import ModelInfo, load_model_info
from quire.engine.stored_quantization import stored_quantization
from quire.kernels import ops
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import PACKINGS, unpack
from quire.kernels.reference.linear import scaled
from quire.workers.blueprints import blueprint_of
from quire.workers.layers.attention import KVScales
from quire.workers.layers.parameter import Fp8Parameter, Int8Parameter, PackedParameter, ScaledParameter
from quire.workers.loader.checkpoint import open_checkpoint
from quire.workers.loader.kv_scales import kv_scales
from quire.workers.loader.mxfp4 import MXFP4Source
from quire.workers.loader.quantized import QuantizedSource, open_quantized
from quire.workers.loader.views import turned
from quire.workers.local_executor import LocalExecutor
from quire.workers.models.decoder import Decoder
from quire.workers.models.model import Model
from quire.workers.parallel import Grid, ParallelContext
from quire.workers.quantization import blueprint_for

CPU = torch.device("cpu")
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 80]}
FP8_WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_STRUCTURE = compressed_config("float-quantized", num_bits=8, strategy="block", block_structure=[48, 80])
FP8_ROWS = compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
# Each with the packing that its matrices have, if any.
SCHEMES: Mapping[str, tuple[Scheme, str | None]] = {
    "awq, 128": (awq(128), "z4_128"),
    "awq, 64": (awq(64), "z4_32"),
    "gptq": (gptq(128), "q4_0"),
    "gptq, rows": (gptq(-1), "q4_0"),
    "gptq, zeros": (gptq(32, symmetric=False), "z4_32"),
    "gptq, second format": (gptq(128, symmetric=False, version="gptq_v2"), "z4_128"),
    "gptq, 2 bits": (gptq(64, 2), "q4_0"),
    "gptq, 2 bits, zeros": (gptq(64, 2, symmetric=False), "z4_32"),
    "gptq, 8 bits": (gptq(128, 8), "q8_0"),
    "gptq, 8 bits, zeros": (gptq(128, 8, symmetric=False), None),
    "gptq, desc_act": (gptq(32, in_order=False), None),
    "gptq, short groups": (gptq(16), None),
    "words": (compressed(4, 128), "q4_0"),
    "words, zeros": (compressed(4, 128, symmetric=False), "z4_128"),
    "words, float16": (compressed(4, 32, dtype=torch.float16), "q4_0"),
    "words, float32": (compressed(4, 32, dtype=torch.float32), None),  # scales that float16 does not have
    "words, 8 bits, rows": (compressed(8, -1), "q8_0"),
    "words, actorder": (compressed(4, 32, symmetric=False, in_order=False), None),
    "int8": (compressed_int8(), "q8_0"),
    "int8, float32": (compressed_int8(dtype=torch.float32), None),
    "int8, zeros": (compressed_int8(symmetric=False), None),
    "fp8, blocks": (float8(FP8_BLOCKS, 48, 80, "weight_scale_inv"), None),
    "fp8, whole": (float8(FP8_WHOLE, None, None), None),
    "fp8, rows": (float8(FP8_ROWS, 1, None), None),
    "fp8, blocks of another format": (float8(FP8_STRUCTURE, 48, 80), None),
    "fp8, fbgemm": (float8({"quant_method": "fbgemm_fp8"}, 1, None), None),
    "fp8, modelopt": (float8({"quant_method": "modelopt", "quant_algo": "FP8"}, None, None), None),
}
schemes = pytest.mark.parametrize("name", SCHEMES)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def make(folder: Path, scheme: Scheme, family: str = "llama", **settings: Any) -> ModelInfo:
    """The quantized checkpoint; beside it in `plain` is what it stands for."""
    sizes = {**SIZES, "head_dim": 32, "num_hidden_layers": 2, **settings}
    tiny = TINY_FAMILIES[family]
    replace(tiny, settings={**tiny.settings, **sizes}).make(folder / "whole")
    write_quantized(folder / "whole", folder / "quantized", scheme)
    return info_of(folder / "quantized")


def info_of(folder: Path) -> ModelInfo:
    return load_model_info(ModelConfig(model=str(folder)))


def built(info: ModelInfo, parallel: ParallelContext | None = None, **fields: Any) -> Model:
    blueprint = blueprint_for(ModelConfig(model=str(info.path), **fields), info, CPU)
    model = blueprint.build(parallel or ParallelContext())
    blueprint.load(model, info, progress=False)
    return model


def plain(info: ModelInfo, parallel: ParallelContext | None = None) -> Model:
    """Without any room for what is packed."""
    native = blueprint_of(info)
    model = native.build(parallel or ParallelContext())
    native.load(model, info, progress=False)
    return model


@schemes
def test_the_numbers_that_tensors_stand_for(tmp_path: Path, name: str) -> None:
    """Bit for bit in float32, whole and in parts that no word, group or block ends with; packed, too."""
    scheme, packing = SCHEMES[name]
    info = make(tmp_path, scheme)
    expected = load_file(info.path / "plain" / "model.safetensors")
    with open_checkpoint(info) as sources:
        assert {each for each in sources if not each.endswith("bias")} == expected.keys()
        for each, numbers in expected.items():
            source = sources[each]
            assert source.shape == numbers.shape
            assert torch.equal(source.read(tuple(slice(0, size) for size in numbers.shape)), numbers)
            if "proj" not in each:
                continue
            assert isinstance(source, QuantizedSource)
            part = slice(3, 61), slice(5, 123)
            assert torch.equal(source.read(part), numbers[part])
            found = source.packing
            assert (None if found is None else found.name) == packing
            if found is not None:
                part = slice(2, 63), slice(0, 128) if found.unit == 128 else slice(32, 96)
                assert torch.equal(unpack(source.read_packed(part), found), numbers[part])


@schemes
def test_a_model_of_them(tmp_path: Path, name: str) -> None:
    """Its logits are those of the same numbers, on one rank and on two: bit for bit where nothing is packed."""
    scheme, packing = SCHEMES[name]
    info = make(tmp_path, scheme)
    expected = info_of(info.path / "plain")
    for grid in (Grid(), Grid(tensor_size=2)):
        for rank in range(grid.tensor_size):
            parallel = ParallelContext(rank, grid)
            ours, theirs = plain(info, parallel), plain(expected, parallel)
            for (each, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(found, wanted), each
    model, x = built(info), torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, Decoder)
    whole = plain(expected)
    assert isinstance(whole, Decoder)
    for layer, other in whole.layers.items():
        mlp = model.layers[layer].mlp
        packable = packing is not None and ops.fits_packed((256, 128), found_packing(info), torch.float32, CPU)
        assert isinstance(mlp.down.weight, PackedParameter) is packable
        wanted = other.mlp(x)
        torch.testing.assert_close(mlp(x), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def found_packing(info: ModelInfo) -> Any:
    with open_checkpoint(info) as sources:
        source = sources["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(source, QuantizedSource)
        return source.packing


@pytest.mark.parametrize(
    ("name", "kind"), [("fp8, rows", Fp8Parameter), ("fp8, whole", Fp8Parameter), ("int8", Int8Parameter)]
)
def test_8_bits_stay_as_they_are(tmp_path: Path, name: str, kind: type[ScaledParameter]) -> None:
    """On a GPU, which may have no room for more; on a CPU where that is asked for. Nothing else becomes shorter."""
    scheme, _ = SCHEMES[name]
    info = make(tmp_path, scheme, "phi3", pad_token_id=0)  # whose projections are fused
    whole = plain(info_of(info.path / "plain"))
    blueprint = blueprint_for(ModelConfig(model=str(info.path)), info, torch.device("cuda"))
    assert str(blueprint.implementation).endswith("in 8 bits as stored)")
    model = blueprint.build(ParallelContext())
    blueprint.load(model, info, progress=False)
    short = [each for each, parameter in model.named_parameters() if isinstance(parameter, ScaledParameter)]
    assert len(short) == 4 * len(whole.own_layers)
    models = [model]
    if kind is Fp8Parameter:
        models.append(built(info, quantization="fp8"))
    for each in models:
        for (name, parameter), wanted in zip(each.named_parameters(), whole.parameters(), strict=True):
            if name in short:
                assert isinstance(parameter, kind)
                assert torch.equal(parameter.float() * parameter.scales[:, None], wanted), name


@pytest.mark.parametrize("columns", [32, 80])
def test_blocks_of_fp8_stay_as_they_are(tmp_path: Path, columns: int) -> None:
    """On a GPU; fused, of experts, and on a rank of two. Where a block is cut, or there is a part of one, numbers are
    what they were. A block of 48 rows may end within a head, or a projection."""
    config = {**FP8_BLOCKS, "weight_block_size": [48, columns]}
    experts = {"moe_intermediate_size": 128, "mlp_only_layers": [], "num_local_experts": 6}
    for family, settings in (("qwen3-moe", experts), ("phi3", {"pad_token_id": 0})):
        info = make(tmp_path / family, float8(config, 48, columns, "weight_scale_inv"), family, **settings)
        for grid in (Grid(), Grid(tensor_size=2)):
            parallel = ParallelContext(grid.tensor_size - 1, grid)
            model = blueprint_for(ModelConfig(model=str(info.path)), info, torch.device("cuda")).build(parallel)
            blueprint_of(info).load(model, info, progress=False)
            kept = 0
            wanted = plain(info_of(info.path / "plain"), parallel)
            for (name, found), numbers in zip(model.named_parameters(), wanted.parameters(), strict=True):
                if isinstance(found, Fp8Parameter):
                    kept += 1
                    one_by_one = found.view(-1, *found.shape[-2:]), found.scales.view(-1, *found.scales.shape[-2:])
                    found = torch.stack([scaled(*each) for each in zip(*one_by_one, strict=True)]).view(found.shape)
                assert torch.equal(found, numbers), name
            assert kept == (8 if columns == 32 else 0)


def test_int8_on_a_gpu(tmp_path: Path) -> None:
    """Where it is asked for, nothing is packed: kernels there round no x."""
    pytest.importorskip("triton")
    info = make(tmp_path, awq(128))
    kinds = {}
    for quantization in (None, "int8"):
        blueprint = blueprint_for(
            ModelConfig(model=str(info.path), quantization=quantization), info, torch.device("cuda")
        )
        with torch.device("meta"):
            model = blueprint.build(ParallelContext())
        kinds[quantization] = {type(p) for name, p in model.named_parameters() if "mlp" in name and "norm" not in name}
    assert kinds == {None: {PackedParameter}, "int8": {Int8Parameter}}


def test_activations_that_are_meant_to_be_rounded(tmp_path: Path) -> None:
    """In int8 what multiplies a matrix is rounded by rows, as W8A8 says, where that takes less; and codes are those of
    the file. Without that option nothing is rounded, and of a checkpoint that does not say so, by blocks."""
    info = make(tmp_path / "w8a8", w8a8(), vocab_size=512)
    assert info.quantization is not None
    assert info.quantization.rounds_x
    stored = load_file(info.path / "model.safetensors")
    wanted = stored["model.layers.0.mlp.down_proj.weight"]
    rounds = ops.pays_in_int8((128, 256), torch.float32, CPU)
    plainly, rounded = (built(info, quantization=kind) for kind in (None, "int8"))
    other = built(make(tmp_path / "w8a16", compressed_int8(), vocab_size=512), quantization="int8")
    for model, is_rounded in ((plainly, False), (rounded, rounds), (other, False)):
        assert isinstance(model, Decoder)
        down = model.layers["0"].mlp.down.weight
        assert (isinstance(down, Int8Parameter) and down.in_int8) is is_rounded
        if is_rounded:
            assert torch.equal(down, wanted)
            kept = [name for name, p in model.named_parameters() if isinstance(p, Int8Parameter) and p.in_int8]
            assert len(kept) == 4 * len(model.own_layers)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    assert isinstance(rounded, Decoder)
    got, mlp = rounded.layers["0"].mlp(x), rounded.layers["0"].mlp
    if rounds:
        with forced_backend("reference"):
            expected = mlp(x)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["awq, 128", "gptq", "int8"])
def test_packed_experts_and_fused_projections(tmp_path: Path, name: str) -> None:
    """One rank, and two that share what they can."""
    scheme, packing = SCHEMES[name]
    experts = {"moe_intermediate_size": 128, "mlp_only_layers": [], "num_local_experts": 6}
    for family, settings in (("qwen3-moe", experts), ("phi3", {"pad_token_id": 0})):
        info = make(tmp_path / family, scheme, family, **settings)
        model, whole = built(info), plain(info_of(info.path / "plain"))
        assert isinstance(model, Decoder)
        assert isinstance(whole, Decoder)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
        for layer, expected in whole.layers.items():
            mlp, attention = model.layers[layer].mlp, model.layers[layer].attention
            for weight in (mlp.gate_up.weight, mlp.down.weight, attention.qkv.weight, attention.output.weight):
                if ops.fits_packed(tuple(weight.matrix_shape[-2:]), PACKINGS[str(packing)], torch.float32, CPU):
                    assert isinstance(weight, PackedParameter)
            wanted = expected.mlp(x)
            torch.testing.assert_close(mlp(x), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_biases_of_gptq(tmp_path: Path) -> None:
    """Of layers that have one it is read, of others left."""
    info = make(tmp_path, gptq(32), "qwen2")
    parameters = dict(plain(info).named_parameters())
    stored = load_file(info.path / "model.safetensors")
    names = [f"model.layers.1.self_attn.{each}_proj.bias" for each in "qkv"]
    assert torch.equal(parameters["layers.1.attention.qkv.bias"], torch.cat([stored[each] for each in names]))
    assert "model.layers.1.self_attn.o_proj.bias" in stored
    assert "layers.1.attention.output.bias" not in parameters


def test_a_model_that_transformers_computes(tmp_path: Path) -> None:
    """Of experts that are a tensor each in the file, and one parameter in the model."""
    tiny = TINY_FALLBACKS["qwen2-moe"]
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    replace(tiny, settings={**tiny.settings, **sizes, "intermediate_size": 64, "num_attention_heads": 4}).make(
        tmp_path / "whole"
    )
    write_quantized(tmp_path / "whole", tmp_path / "quantized", SCHEMES["gptq, zeros"][0])
    info = info_of(tmp_path / "quantized")
    assert info.implementation.kind == "transformers"
    ours, theirs = (built(each).state_dict() for each in (info, info_of(info.path / "plain")))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_the_engine_answers_alike(tmp_path: Path) -> None:
    """Prompts and decode steps, some of which are recorded."""
    info = make(tmp_path, awq(128), vocab_size=512)
    prompts, answers = [[5, 9, 17], list(range(1, 60)), list(range(100, 400, 3))], []
    for path in (info.path, info.path / "plain"):
        each = info_of(path)
        executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), each)
        answers.append(Driver(executor, each.max_model_len).greedy(prompts, 12, 4))
        executor.shutdown()
    for ours, theirs in zip(*answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        for token, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [each for each, _ in token.top] == [each for each, _ in expected.top]
            assert [p for _, p in token.top] == pytest.approx([p for _, p in expected.top], abs=1e-4)


def test_a_bias_that_the_model_lacks(tmp_path: Path) -> None:
    """Zeros are left, anything else is refused."""
    info = make(tmp_path, gptq(32))
    tensors = load_file(info.path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.bias"][5] = 1.0
    save_file(tensors, info.path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.1\.mlp\.down_proj\.bias"):
        plain(info)


def test_scales_of_the_cache_beside_those_of_weights(tmp_path: Path) -> None:
    """By either name that there is for them; those of queries are left."""
    info = make(tmp_path, compressed_int8())
    tensors = load_file(info.path / "model.safetensors")
    for name, scale in (("0.self_attn.k_proj.output_scale", 0.25), ("0.self_attn.v_proj.output_scale", 0.5)):
        tensors[f"model.layers.{name}"] = torch.tensor([scale])
    tensors["model.layers.0.self_attn.q_proj.output_scale"] = torch.tensor([3.0])
    tensors["model.layers.1.self_attn.kv_scale"] = torch.tensor([2.0])
    save_file(tensors, info.path / "model.safetensors")
    config = EngineConfig.model_validate({"cache": {"kv_cache_dtype": "fp8_e4m3"}})
    assert kv_scales(config, info, 2) == [KVScales(0.25, 0.5), KVScales(2.0, 2.0)]
    plain(info)


def test_words_as_tools_write_them(tmp_path: Path) -> None:
    """The numbers 0 to 7 as AutoAWQ 0.2.9, AutoGPTQ 0.7.1 and compressed-tensors 0.17 pack them in a word, in hex."""
    scales, words = torch.ones(1, 8).half(), {"awq": 0x75316420, "gptq": 0x76543210, "compressed-tensors": 0x76543210}
    for method, word in words.items():
        folder, packed = tmp_path / method, torch.tensor([[word]], dtype=torch.int32)
        folder.mkdir()
        config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": -1}
        if method == "awq":  # one input of 8 rows
            tensors = {"qweight": packed, "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": scales}
        elif method == "gptq":  # 8 inputs of as many rows, whose zeros are 1
            tensors = {"qweight": packed.expand(1, 8), "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": scales}
        else:
            config |= {"format": "pack-quantized"}
            shape, packed = torch.tensor([1, 16]), packed.expand(1, 2)
            tensors = {"weight_packed": packed, "weight_scale": torch.ones(1, 1), "weight_shape": shape}
        save_file({f"m.{name}": each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
        stored = stored_quantization({"quantization_config": config})
        assert stored is not None
        with open_quantized(folder, stored) as sources:
            numbers = sources["m.weight"].read(tuple(slice(0, size) for size in sources["m.weight"].shape))
        eight = torch.arange(8.0)
        expected = {
            "awq": eight[:, None],
            "gptq": (eight - 1).expand(8, 8),
            "compressed-tensors": (eight - 8).repeat(1, 2),
        }
        assert torch.equal(numbers, expected[method])


def gpt_oss(folder: Path) -> ModelInfo:
    tiny = TINY_FAMILIES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    replace(tiny, settings={**tiny.settings, **sizes}).make(folder / "whole")
    write_mxfp4(folder / "whole", folder / "quantized")
    return info_of(folder / "quantized")


def test_mxfp4(tmp_path: Path) -> None:
    """The numbers that `transformers` finds, packed and not, by expert and in parts; the same decoder, and answers."""
    info = gpt_oss(tmp_path)
    stored = load_file(info.path / "model.safetensors")
    with open_checkpoint(info) as sources:
        for layer, projection in itertools.product(range(2), ("gate_up_proj", "down_proj")):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
            source = turned(sources[name])
            assert isinstance(source, MXFP4Source)
            assert sources[name].shape == wanted.shape
            assert torch.equal(sources[name].read(tuple(slice(0, size) for size in wanted.shape)), wanted)
            rows = wanted.transpose(1, 2)
            part = slice(2, 4), slice(3, 50), slice(5, 61)
            assert torch.equal(source.read(part), rows[part])
            assert source.packing == PACKINGS["mxfp4"]
            part = slice(3, 4), slice(3, 50), slice(32, 64)
            assert torch.equal(unpack(source.read_packed(part), PACKINGS["mxfp4"]), rows[part][0])
    model, whole = built(info), plain(info_of(info.path / "plain"))
    assert isinstance(model, Decoder)
    assert isinstance(whole, Decoder)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for layer, expected in whole.layers.items():
        mlp = model.layers[layer].mlp
        if ops.fits_packed((64, 96), PACKINGS["mxfp4"], torch.float32, CPU):
            assert isinstance(mlp.gate_up.weight, PackedParameter)
            assert isinstance(mlp.down.weight, PackedParameter)
        found = expected.mlp(x)
        torch.testing.assert_close(mlp(x), found, rtol=0, atol=1e-5 * float(found.abs().max()))


def test_scales_of_mxfp4_that_float16_does_not_have(tmp_path: Path) -> None:
    """Such a matrix is unpacked, exactly."""
    info = gpt_oss(tmp_path)
    tensors = load_file(info.path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][1, 2, 0] = 90
    save_file(tensors, info.path / "model.safetensors")
    wanted = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32)
    model = built(info)
    assert isinstance(model, Decoder)
    down = model.layers["1"].mlp.down.weight
    assert not isinstance(down, PackedParameter)
    assert torch.equal(down, wanted.transpose(1, 2))


def test_missing_scales_of_mxfp4(tmp_path: Path) -> None:
    info = gpt_oss(tmp_path)
    tensors = load_file(info.path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, info.path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the scales of .*1.mlp.experts.down_proj_blocks \[5, 64, 3, 16\] are none"):
        plain(info)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("yes", "quantization_config is 'yes', no object"),
        ({"bits": 4}, r"quant_method is None; supported are awq, .* and GGUF files"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "quantization_config.bits is 3; supported: 4"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
            "version is 'gemv'; supported: gemm",
        ),
        ({"quant_method": "awq", "bits": 4}, "group_size is None; supported: a number of inputs"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "format": "llm-awq"}, "version is 'llm-awq'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits is 3; supported: 2, 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "pack_dtype": "int16"}, "pack_dtype is 'int16'; supp"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; supported: gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*mlp.*": {"bits": 8}}},
            r"dynamic\['\+:\.\*mlp\.\*'\]\.bits is 8; supported: 4, as of all",
        ),
        (compressed_config("nvfp4-pack-quantized", num_bits=4), "format is 'nvfp4-pack-quantized'; supported: dense"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config\.format is 'sparse-24-bitmask'; supported: dense",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"R1": {}}}, "transform_config is"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size is \[128\]; supported: rows and columns",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'; supported: FP8"),
    ],
)
def test_refused_by_configuration(tmp_path: Path, config: Any, message: str) -> None:
    info = make(tmp_path, awq(64))
    given = json.loads((info.path / "config.json").read_text())
    (info.path / "config.json").write_text(json.dumps(given | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        info_of(info.path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq, 64", {"scales": None}, r"down_proj is quantized, and has no scales"),
        ("awq, 64", {"scales": torch.ones(3, 128).half()}, r"down_proj.weight \[128, 256\] has \[128, 3\] scales"),
        ("gptq", {"g_idx": torch.full((256,), 2).int()}, "g_idx does not name a group for each of 256 inputs"),
        ("gptq", {"qweight": None}, r"unexpected: .*down_proj.g_idx"),
        ("words", {"weight_shape": torch.tensor([128, 200])}, r"weight_packed \[128, 32\] does not hold \[128, 200\]"),
        ("words", {"weight_scale": None}, "down_proj is quantized, and has no weight_scale"),
        ("fp8, rows", {"weight": torch.ones(128, 250).to(torch.float8_e4m3fn)}, r"wrong shape: .*down_proj.weight"),
    ],
)
def test_refused_tensors(tmp_path: Path, name: str, change: Mapping[str, Any], message: str) -> None:
    """Before anything is read, and by name."""
    info, module = make(tmp_path, SCHEMES[name][0]), "model.layers.0.mlp.down_proj"
    tensors = load_file(info.path / "model.safetensors")
    for kind, value in change.items():
        tensors[f"{module}.{kind}"] = value
    kept = {each: value for each, value in tensors.items() if value is not None}
    save_file(kept, info.path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        plain(info_of(info.path))
