"""Models that `transformers` computes over our KV cache: the proof of our own families, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from core_driver import Answer
from family_parity import NUM_TOKENS, TOP, FamilyUnderTest, Parity
from safetensors.torch import load_file, save_file
from tiny_fallbacks import TINY_FALLBACKS
from tiny_families import TINY_FAMILIES, WINDOW

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ConfigError
from quire.engine.model_source import SUPPORTED_ARCHITECTURES, load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.pooling import PoolingParams
from quire.engine.sampling_params import SamplingParams
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model
from quire.workers.models.sizes import check_ranks
from quire.workers.parallel import ParallelContext
from quire.workers.worker import Worker


@pytest.fixture(scope="module", params=list(TINY_FALLBACKS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyUnderTest]:
    under_test = FamilyUnderTest(TINY_FALLBACKS[request.param], tmp_path_factory.mktemp(request.param))
    yield under_test
    under_test.executor.shutdown()


def check(parity: Parity) -> None:
    assert parity.mismatches == []
    assert parity.max_logprob_difference < 1e-4


def test_none_of_them_is_native(model: FamilyUnderTest) -> None:
    assert model.info.implementation.kind == "transformers"
    assert not set(model.info.hf_config["architectures"]) & set(SUPPORTED_ARCHITECTURES)


def test_all_ways_of_running(model: FamilyUnderTest) -> None:
    for answers in model.modes().values():
        check(model.compare(answers))


def test_preempted(model: FamilyUnderTest) -> None:
    parity = model.preempted()
    check(parity)
    assert parity.num_preemptions > 0


def test_bfloat16(model: FamilyUnderTest) -> None:
    """Weights that are kept in float32 meet hidden states that are not, as in `transformers`."""
    sections = {"model": {"num_threads": 1, "dtype": "bfloat16"}, "cache": {"num_kv_blocks": 100}}
    executor = LocalExecutor(EngineConfig.model_validate(sections), model.info)
    answers = model.driver(executor, cache={"num_kv_blocks": 100}).greedy(model.prompts, 1, TOP)
    executor.shutdown()
    for prompt, answer in zip(model.prompts, answers, strict=True):
        expected = model.reference.logits(prompt, answer.token_ids).log_softmax(dim=-1)[0]
        ours = torch.tensor([logprob for _, logprob in answer.logprobs[0].top])
        torch.testing.assert_close(ours, expected.topk(TOP).values, atol=1.0, rtol=0)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma3", "mixtral", "gpt2", "phi3-long", "llama-dynamic", "gpt-oss"]
)
def test_native_families_forced_through_it(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Windows, soft caps, softcapped logits, experts and scaling by length: the same answers by two implementations."""
    caplog.set_level(logging.INFO)
    native = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    forced = FamilyUnderTest(TINY_FAMILIES[family], tmp_path, "transformers")

    def batched(model: FamilyUnderTest) -> list[Answer]:
        return model.driver().greedy(model.prompts, NUM_TOKENS, TOP)

    theirs, ours = batched(forced), batched(native)
    check(forced.compare(theirs))
    assert [answer.token_ids for answer in theirs] == [answer.token_ids for answer in ours]
    architecture = TINY_FAMILIES[family].architecture
    assert f"{architecture}, native ({architecture} is one of our own families)" in caplog.text
    assert f"{architecture}, transformers (model.implementation asks for it)" in caplog.text
    for model in (native, forced):
        model.executor.shutdown()


def test_layers_of_the_cache(tmp_path: Path) -> None:
    """Windows come from the masks that a model asks for; values that are shorter than keys are stored as long."""

    def specs(name: str) -> list[tuple[int, int, int | None]]:
        (TINY_FALLBACKS | TINY_FAMILIES)[name].make(tmp_path / name)
        worker = _worker(tmp_path / name, "transformers")
        worker.load_model()
        return [(spec.num_kv_heads, spec.head_dim, spec.sliding_window) for spec in worker.kv_cache_specs()]

    assert specs("gpt-oss") == [(2, 16, WINDOW), (2, 16, None)] * 2
    assert specs("exaone4") == [(2, 16, WINDOW)] * 3 + [(2, 16, None)]
    assert specs("deepseek-v3") == [(6, 24, None)] * 4
    assert specs("gpt-bigcode") == [(1, 16, None)] * 3


def test_check_says_who_computes(tmp_path: Path) -> None:
    model = TINY_FALLBACKS["deepseek-v3"].make(tmp_path)
    config = EngineConfig.model_validate({"model": {"model": str(tmp_path), "device": "cpu"}})
    result = check_model(config, load_model_info(config.model))
    reason = "transformers (DeepseekV3ForCausalLM is none of our own families)"
    assert str(result.implementation) == reason
    assert f"computed by  {reason}" in str(result)
    assert result.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert result.kv_bytes_per_token == 4 * 2 * 6 * 24 * 4


def test_more_ranks_are_refused_before_anything_starts(tmp_path: Path) -> None:
    TINY_FALLBACKS["olmo"].make(tmp_path)
    config = EngineConfig.model_validate({"model": str(tmp_path), "parallel": {"tensor_parallel_size": 2}})
    info = load_model_info(config.model)
    message = r"parallel: 2 ranks cannot share OlmoForCausalLM, .* Families that can be .*LlamaForCausalLM"
    with pytest.raises(ConfigError, match=message):
        check_ranks(config, info)
    with pytest.raises(ConfigError, match=message):
        check_model(config, info)


def test_wrong_tensors_are_named_together(tmp_path: Path) -> None:
    """Those of the file, and those that the model would make of them."""
    TINY_FALLBACKS["qwen2-moe"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.2.mlp.experts.3.up_proj.weight"] = torch.zeros(7, 96)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # of old checkpoints: ignored
    save_file(tensors, file)
    with pytest.raises(ConfigError) as caught:
        _worker(tmp_path).load_model()
    message = caught.value.message
    assert "missing: model.layers.1.self_attn.k_proj.weight; unexpected: model.layers.0.extra.weight;" in message
    assert "model.norm.weight [5] instead of [96]" in message
    assert "model.layers.2.mlp.experts.3.up_proj.weight [7, 96]" in message
    assert "cannot become model.layers.2.mlp.experts.gate_up_proj" in message


def test_tied_heads_and_bare_names(tmp_path: Path) -> None:
    """A checkpoint may hold a tied head all the same, or lack the prefix of the body."""
    TINY_FALLBACKS["gpt-bigcode"].make(tmp_path)
    file = tmp_path / "model.safetensors"
    worker = _worker(tmp_path)
    worker.load_model()
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file({**bare, "lm_head.weight": tensors["transformer.wte.weight"].clone()}, file)
    again = _worker(tmp_path)
    again.load_model()
    for mine, other in zip(again.model.parameters(), worker.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def make(directory: Path, architecture: str, config: Any) -> Path:
    torch.manual_seed(0)
    getattr(transformers, architecture)(config).save_pretrained(directory)
    return directory


_SMALL = {"vocab_size": 199, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "bloom": ("BloomForCausalLM", {"vocab_size": 199, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64},
              r"a bias that grows with the distance \(ALiBi\)"),
    "mamba": ("MambaForCausalLM", {**_SMALL, "state_size": 4}, r"a state besides keys and values \(MambaMixer\)"),
    "lfm2": ("Lfm2ForCausalLM", {**_SMALL, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
             r"a state besides keys and values \(Lfm2ShortConv\)"),
    "gptj": ("GPTJForCausalLM", {"vocab_size": 199, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
             "attention classes of its own"),
    "llama4_text": ("Llama4ForCausalLM", {**_SMALL, "attention_chunk_size": 8, "num_key_value_heads": 2, "head_dim": 8,
                    "intermediate_size": 32, "intermediate_size_mlp": 32, "num_local_experts": 2,
                    "moe_layers": []},
                    "masks that depend on more than positions"),
    "bert": ("BertLMHeadModel", {**_SMALL, "intermediate_size": 32, "is_decoder": False},
             "attention that is not causal|neither causal nor"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_cannot_work(tmp_path: Path, name: str) -> None:
    architecture, settings, found = REFUSED[name]
    make(tmp_path, architecture, transformers.CONFIG_MAPPING[name](**settings))
    fields = {"model": str(tmp_path), "max_model_len": 64, "device": "cpu"}
    config = EngineConfig.model_validate({"model": fields})
    info = load_model_info(config.model)
    message = f"{architecture} is not supported: .* it cannot run through transformers .* because it has .*({found})"
    with pytest.raises(ConfigError, match=message):
        check_model(config, info)
    with pytest.raises(ConfigError, match=message):
        LocalExecutor(config, info)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
         "it is an encoder with a decoder"),
        ({"architectures": ["MyForCausalLM"], "model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}},
         r"it needs the code in its own directory \(auto_map\), which is never run"),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"},
         "transformers knows no such decoder for model_type 'nosuch'"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
         "transformers knows no such decoder"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
         "it is a decoder inside a model for more than text"),
    ],
)  # fmt: skip
def test_refused_by_their_configuration(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"is not supported: {found}.* Supported are"):
        load_model_info(ModelConfig(model=str(tmp_path)))


def test_remote_code_of_a_known_class_is_not_needed(tmp_path: Path) -> None:
    TINY_FALLBACKS["olmo"].make(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoConfig": "there.is.No"}}))
    _worker(tmp_path).load_model()


def test_tokens_that_mix_outside_of_attention_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence that no structure gives away, as a model of the future may have it."""
    from transformers.models.olmo.modeling_olmo import OlmoMLP

    TINY_FALLBACKS["olmo"].make(tmp_path)
    forward = OlmoMLP.forward
    monkeypatch.setattr(OlmoMLP, "forward", lambda self, x: forward(self, x) + 0.1 * x.cumsum(dim=1))
    with pytest.raises(ConfigError, match="layers outside of attention that mix the tokens of a sequence"):
        _worker(tmp_path).load_model()


def _worker(path: Path, implementation: str = "auto") -> Worker:
    model = {"model": str(path), "num_threads": 1, "device": "cpu", "implementation": implementation}
    config = EngineConfig.model_validate({"model": model})
    return Worker(config, load_model_info(config.model), ParallelContext())


def test_embeddings_and_prompt_logprobs(model: FamilyUnderTest) -> None:
    prompt = model.prompts[-1]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=TOP)
    requests = [
        EngineRequest(request_id="s", prompt_token_ids=prompt, sampling_params=params, seed=0),
        EngineRequest(
            request_id="e", prompt_token_ids=prompt, sampling_params=params, seed=0, pooling=PoolingParams(type="mean")
        ),
    ]
    scored, embedded = model.driver(scheduler={"max_num_batched_tokens": 50}).run(requests)
    expected = model.reference.logits(prompt[:1], prompt[1:]).log_softmax(dim=-1).topk(TOP).values
    assert scored.prompt_logprobs is not None
    top = torch.tensor([[value for _, value in entry.top] for entry in scored.prompt_logprobs if entry is not None])
    torch.testing.assert_close(top, expected, atol=1e-4, rtol=0)
    mean = model.reference.hidden_states(prompt).mean(dim=0)
    assert embedded.embedding is not None
    torch.testing.assert_close(embedded.embedding, mean / mean.norm(), atol=1e-4, rtol=0)
