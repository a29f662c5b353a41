"""A GGUF file of each architecture is the model that its checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_files import SHIFTED, write_gguf
from safetensors.torch import load_file, save_file
from tiny_families import TINY_FAMILIES, TinyFamily
from torch import Tensor

from quire.engine.config import ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.gguf_config import ARCHITECTURES, gguf_config
from quire.engine.gguf_file import read_gguf
from quire.engine.model_source import ModelInfo, load_model_info
from quire.engine.sampling_params import SamplingParams
from quire.workers.blueprints import blueprint_of
from quire.workers.layers.parameter import PackedParameter
from quire.workers.layers.rotary import inverse_frequencies
from quire.workers.loader.load import load_weights
from quire.workers.models.decoder import Decoder
from quire.workers.models.families import family_of
from quire.workers.models.model import Model
from quire.workers.models.spec import ChannelScaling, DecoderSpec, LayerSpec
from quire.workers.parallel import Grid, ParallelContext
from quire.workers.quantization import blueprint_for


def changed(name: str, **settings: Any) -> TinyFamily:
    family = TINY_FAMILIES[name]
    return replace(family, settings={**family.settings, **settings})


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Files do not say these: windows of Mistral, Qwen 2 and StarCoder 2, and the scale of queries of Gemma 2 and 3.
CASES: Mapping[str, tuple[str, TinyFamily]] = {
    "llama": ("llama", TINY_FAMILIES["llama"]),
    "llama, biases": ("llama", changed("llama", attention_bias=True, mlp_bias=True)),
    "llama, tied": ("llama", changed("llama", tie_word_embeddings=True)),
    "llama, linear": ("llama", TINY_FAMILIES["llama-linear"]),
    "llama, yarn": ("llama", TINY_FAMILIES["llama-yarn"]),
    "mistral": ("llama", changed("mistral", sliding_window=None)),
    "mixtral": ("llama", TINY_FAMILIES["mixtral"]),
    "qwen2": ("qwen2", TINY_FAMILIES["qwen2"]),
    "qwen3": ("qwen3", TINY_FAMILIES["qwen3"]),
    "qwen3moe": ("qwen3moe", changed("qwen3-moe", mlp_only_layers=[])),
    "gemma": ("gemma", TINY_FAMILIES["gemma"]),
    "gemma2": ("gemma2", changed("gemma2", query_pre_attn_scalar=16)),
    "gemma3": ("gemma3", changed("gemma3", query_pre_attn_scalar=16)),
    "phi3": ("phi3", TINY_FAMILIES["phi3"]),
    "phi3, short": ("phi3", TINY_FAMILIES["phi3-short"]),
    "phi3, long": ("phi3", TINY_FAMILIES["phi3-long"]),
    "granite": ("granite", TINY_FAMILIES["granite"]),
    "smollm3": ("smollm3", TINY_FAMILIES["smollm3"]),
    "olmo2": ("olmo2", TINY_FAMILIES["olmo2"]),
    "olmoe": ("olmoe", changed("olmoe", clip_qkv=None)),
    "glm4": ("glm4", TINY_FAMILIES["glm4"]),
    "cohere": ("command-r", TINY_FAMILIES["cohere"]),
    "cohere2": ("cohere2", TINY_FAMILIES["cohere2"]),
    "stablelm": ("stablelm", TINY_FAMILIES["stablelm"]),
    "gpt-oss": ("gpt-oss", TINY_FAMILIES["gpt-oss"]),
    "starcoder2": ("starcoder2", changed("starcoder2", sliding_window=None)),
}


def loaded(path: Path, max_model_len: int) -> Decoder:
    info = load_model_info(ModelConfig(model=str(path), max_model_len=max_model_len))
    family = family_of(info.hf_config)[1]
    model = Decoder(family.decoder_spec(info.hf_config, info.max_model_len), ParallelContext())
    load_weights(model, family, info, progress=False)
    return model


def with_rounded_magnitudes(spec: DecoderSpec) -> DecoderSpec:
    """What sines and cosines are multiplied with is stored in float32."""

    def rounded(layer: LayerSpec) -> LayerSpec:
        rotary = layer.attention.rotary
        if rotary is not None:
            rotary = replace(rotary, magnitude=round(rotary.magnitude, 6))
        return replace(layer, attention=replace(layer.attention, rotary=rotary))

    return replace(spec, layers=tuple(map(rounded, spec.layers)))


def test_all_architectures_are_tried() -> None:
    assert {architecture for architecture, _ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_what_its_checkpoint_is(tmp_path: Path, case: str) -> None:
    """The same decoder, and the same bits in all weights."""
    architecture, family = CASES[case]
    family.make(tmp_path)
    write_gguf(tmp_path, architecture, tmp_path / "model.gguf")
    ours, expected = (loaded(path, family.max_model_len) for path in (tmp_path / "model.gguf", tmp_path))
    assert with_rounded_magnitudes(ours.spec) == with_rounded_magnitudes(expected.spec)
    parameters = dict(expected.named_parameters())
    assert dict(ours.named_parameters()).keys() == parameters.keys()
    for name, parameter in ours.named_parameters():
        if architecture in SHIFTED and "norm" in name:
            # 1 + w was rounded when the file was written; it is what activations are multiplied by.
            assert torch.equal(1.0 + parameter, 1.0 + parameters[name]), name
        else:
            assert torch.equal(parameter, parameters[name]), name


@pytest.mark.parametrize("begins_empty", [False, True])
def test_a_file_in_several_parts(tmp_path: Path, begins_empty: bool) -> None:
    """As `gguf-split` cuts them: what the first is given for is the whole, in which other parts are read."""
    family = changed("llama", rope_parameters=LLAMA_3 | {"original_max_position_embeddings": 64})
    family.make(tmp_path)
    cut = {"split_max_tensors": 11, "small_first_shard": begins_empty}
    write_gguf(tmp_path, "llama", tmp_path / "model.gguf", **cut)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 3
    assert {tensor.path for tensor in read_gguf(parts[0]).tensors.values()} == set(parts[begins_empty:])
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for i, part in enumerate(parts):  # as Hugging Face's cache has them
        blob = part.rename(tmp_path / f"{i}.blob")
        part.symlink_to(blob)
        (linked / part.name).symlink_to(blob)
    expected = loaded(tmp_path, family.max_model_len)
    for ours in (loaded(parts[0], family.max_model_len), loaded(linked / parts[0].name, family.max_model_len)):
        for (name, found), wanted in zip(ours.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, wanted), name
    with pytest.raises(ConfigError, match=rf"{parts[1].name} is part 2 of {len(parts)}; give the first"):
        loaded(parts[1], family.max_model_len)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ConfigError, match=rf"{parts[1].name} is not part 2 of {len(parts)}, as its name says"):
        loaded(parts[0], family.max_model_len)
    parts[1].unlink()
    with pytest.raises(ConfigError, match=rf"{parts[1].name} cannot be read \(No such file or directory\)"):
        loaded(parts[0], family.max_model_len)


def test_llama_3_is_rotated_by_its_factors(tmp_path: Path) -> None:
    family = changed("llama", rope_parameters=LLAMA_3 | {"original_max_position_embeddings": 64})
    family.make(tmp_path)
    write_gguf(tmp_path, "llama", tmp_path / "model.gguf")
    ours, expected = (
        loaded(path, family.max_model_len).spec.layers[0].attention.rotary
        for path in (tmp_path / "model.gguf", tmp_path)
    )
    assert ours is not None
    assert expected is not None
    assert isinstance(ours.scaling, ChannelScaling)
    assert len(set(ours.scaling.factors)) > 2  # short wavelengths, long ones, and between them
    torch.testing.assert_close(inverse_frequencies(ours), inverse_frequencies(expected), rtol=1e-6, atol=0)


def write(path: Path, architecture: str, num_layers: int = 1, **metadata: Any) -> None:
    writer = GGUFWriter(path, architecture)
    sizes = {"block_count": num_layers, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    heads = {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in {**sizes, **heads, **metadata}.items():
        if value is None:
            continue
        name = key if "." in key and key.split(".")[0] in ("general", "split") else f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        {**add, bool: writer.add_bool}[type(value)](name, value)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 64).numpy())
    for layer in range(num_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", torch.zeros(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("mamba", {}, r"the architecture of .* \(mamba\) is not supported; llama, qwen2, .* are\."),
        ("llama", {"split.count": 3}, r"m\.gguf has 3 parts, and its name is not NAME-00001-of-00003\.gguf"),
        ("llama", {"split.count": 3, "split.no": 1}, r"m\.gguf is part 2 of 3; give the first\."),
        ("llama", {"split.tensors.count": 7}, r"the parts of .* have 2 tensors instead of 7"),
        ("llama", {"rope.scaling.type": "twisted"}, r"scales rotary positions in a way that is not known \(twisted\)"),
        (
            "qwen3moe",
            {"expert_count": 4, "expert_used_count": 2},
            "has no metadata qwen3moe.expert_feed_forward_length",
        ),
        ("olmo2", {"attention.sliding_window": 32}, "is an OLMo 3, which is not read from GGUF files"),
        ("command-r", {"attention.layer_norm_epsilon": 1e-5}, "has no metadata command-r.logit_scale"),
        ("glm4", {"rope.dimension_sections": [8, 4, 4, 0]}, "rotates positions in sections, which is not supported"),
        ("glm4", {"nextn_predict_layers": 1}, "has layers that predict further tokens, which are not read"),
        ("qwen2", {"attention.head_count": True}, r"qwen2\.attention\.head_count of .* is True, no number"),
        ("qwen2", {"attention.head_count_kv": [2, 2]}, r"qwen2\.attention\.head_count_kv of .* is \[2, 2\], no number"),
        ("qwen2", {"rope.scaling.type": "yarn"}, r"has no metadata qwen2\.rope\.scaling\.factor"),
    ],
)
def test_refused_files(tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str) -> None:
    write(tmp_path / "m.gguf", architecture, **metadata)
    with pytest.raises(ConfigError, match=message):
        load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))


def test_advised_sampling(tmp_path: Path) -> None:
    advice = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    write(tmp_path / "m.gguf", "llama", **advice)
    info = load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert info.generation_defaults == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert SamplingParams(**info.generation_defaults).top_k == 20  # type: ignore[arg-type]


def test_no_epsilon(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "gemma", **{"attention.layer_norm_rms_epsilon": None})
    with pytest.raises(ConfigError, match=r"has no metadata gemma\.attention\.layer_norm_rms_epsilon"):
        load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))


def test_positions_of_older_files(tmp_path: Path) -> None:
    """They have a factor alone, which divides positions."""
    write(tmp_path / "m.gguf", "llama", **{"rope.scale_linear": 4.0})
    info = load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))
    assert info.hf_config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("damage", ["length", "cut"])
def test_factors_that_cannot_be(tmp_path: Path, damage: str) -> None:
    family = changed("llama", rope_parameters=LLAMA_3 | {"original_max_position_embeddings": 64})
    family.make(tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, "llama", path)
    if damage == "cut":
        place = read_gguf(path).tensors["rope_freqs.weight"].offset
        path.write_bytes(path.read_bytes()[: place + 5])
        with pytest.raises(ConfigError, match="ends"):
            load_model_info(ModelConfig(model=str(path)))
        return
    file = read_gguf(path)
    file.metadata["llama.rope.dimension_count"] = 8
    with pytest.raises(ConfigError, match=r"rope_freqs.weight of .* \(it is no vector of 4 numbers in float32\)"):
        gguf_config(file)


def test_a_qwen_with_the_names_of_llama(tmp_path: Path) -> None:
    """Biases of queries, keys and values alone."""
    changed("llama", attention_bias=True).make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith("o_proj.bias")}, tmp_path / "model.safetensors")
    write_gguf(tmp_path, "llama", tmp_path / "model.gguf")
    model = loaded(tmp_path / "model.gguf", 64)
    assert model.spec.layers[0].attention.qkv_bias
    assert not model.spec.layers[0].attention.output_bias
    bias = dict(model.named_parameters())["layers.1.attention.qkv.bias"]
    names = [f"model.layers.1.self_attn.{each}_proj.bias" for each in "qkv"]
    assert torch.equal(bias, torch.cat([tensors[name] for name in names]))


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scale_of_queries_of_gemma(tmp_path: Path, architecture: str, num_layers: int) -> None:
    """Of the largest models it is the hidden size per head, of others the size of a head."""
    for layers, expected in ((num_layers, 16), (num_layers - 1, 32)):
        window = {"attention.sliding_window": 32, "attention.key_length": 32}
        write(tmp_path / "m.gguf", architecture, layers, **window)
        info = load_model_info(ModelConfig(model=str(tmp_path / "m.gguf")))
        assert info.hf_config["query_pre_attn_scalar"] == expected


def moe_file(folder: Path, kind: GGMLQuantizationType) -> ModelInfo:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "head_dim": 32, "mlp_only_layers": [], "num_local_experts": 6}
    changed("qwen3-moe", **sizes, **heads).make(folder)
    write_gguf(folder, "qwen3moe", folder / "model.gguf", kind)
    return load_model_info(ModelConfig(model=str(folder / "model.gguf")))


def built(info: ModelInfo, parallel: ParallelContext, *, is_packed: bool, **fields: Any) -> Model:
    config = ModelConfig(model=str(info.path), **fields)
    blueprint = blueprint_for(config, info, torch.device("cpu")) if is_packed else blueprint_of(info)
    model = blueprint.build(parallel)
    blueprint.load(model, info, progress=False)
    return model


class Apart(ParallelContext):
    """A rank whose part of a sum is looked at."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("expert_parallel", [None, False, True], ids=["one rank", "slices", "some experts"])
def test_experts_stay_packed(tmp_path: Path, kind: GGMLQuantizationType, expert_parallel: bool | None) -> None:
    """With the numbers that they have unpacked, on one rank and on two that share them. A slice of 48 of 96 columns is
    no whole number of blocks, and is unpacked."""
    info = moe_file(tmp_path, kind)
    ranks = [ParallelContext()]
    if expert_parallel is not None:
        grid = Grid(tensor_size=2, expert_parallel=expert_parallel)
        ranks = [Apart(rank, grid) for rank in range(2)]
    whole = built(info, ParallelContext(), is_packed=False)
    ours = [built(info, rank, is_packed=True) for rank in ranks]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    for layer, expected in whole.layers.items():
        mlps = [model.layers[layer].mlp for model in ours]
        for mlp in mlps:
            for matrices, is_cut in ((mlp.gate_up.weight, False), (mlp.down.weight, expert_parallel is False)):
                assert isinstance(matrices, PackedParameter) is not is_cut
                assert is_cut or matrices.packing.name == kind.name.lower()
        found, wanted = sum(mlp(x) for mlp in mlps), expected.mlp(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def test_experts_in_int8(tmp_path: Path) -> None:
    """What multiplies them is rounded to 8 bits where kernels do that; their numbers are those of the file."""
    info = moe_file(tmp_path, GGMLQuantizationType.Q8_0)
    whole = built(info, ParallelContext(), is_packed=False)
    ours = built(info, ParallelContext(), is_packed=True, quantization="int8")
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    for mine, expected in zip(ours.layers.values(), whole.layers.values(), strict=True):
        found, wanted = mine.mlp(x), expected.mlp(x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))
