"""Models on a grid of ranks: stages of a pipeline, ranks of a stage, experts dealt out. The tokens are one rank's.

Ranks are threads here, each with its own part of the model, and as many steps are under way as there are stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from core_driver import Driver
from family_parity import NUM_TOKENS, FamilyUnderTest, Parity
from rank_executors import ProcessExecutor, ThreadExecutor
from tiny_families import TINY_FAMILIES
from tiny_llama import make_tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.engine.config import EngineConfig, GrammarConfig, ModelConfig
from quire.engine.core import EngineCore
from quire.engine.errors import ConfigError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.compiler import LlguidanceCompiler
from quire.engine.grammar.gate import GrammarGate
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams
from quire.workers.models.sizes import check_ranks
from quire.workers.parallel import Grid, ParallelContext
from quire.workers.worker import Worker

FAMILIES = ["llama", "smollm3", "qwen2", "gemma3", "gpt2", "opt", "phi", "qwen3-moe", "mixtral"]
MIXTURES = ["mixtral", "qwen3-moe", "olmoe"]
PIPELINES = [
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 3},  # divides none of the models
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
]
EXPERTS = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 5}, {"tensor_parallel_size": 2, **PIPELINES[0]}]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyUnderTest]:
    under_test = FamilyUnderTest(TINY_FAMILIES[request.param], tmp_path_factory.mktemp(request.param))
    yield under_test
    under_test.executor.shutdown()


def check(parity: Parity) -> None:
    assert parity.mismatches == []
    assert parity.max_logprob_difference < 1e-4


def grid_id(grid: dict[str, int]) -> str:
    return "-".join(f"{name[0]}p{size}" for name, size in grid.items())


@pytest.mark.parametrize("grid", PIPELINES, ids=grid_id)
def test_pipelines(model: FamilyUnderTest, grid: dict[str, int]) -> None:
    """Alone, batched, with prefix hits, in chunks, preempted."""
    with model.on_ranks(**grid):
        for answers in model.modes().values():
            check(model.compare(answers))
        parity = model.preempted()
    check(parity)
    assert parity.num_preemptions > 0


@pytest.mark.parametrize("section", [{"cache": {"kv_cache_dtype": "fp8_e4m3"}}, {"model": {"quantization": "int8"}}])
def test_stages_in_8_bits(tmp_path: Path, section: dict[str, dict[str, str]]) -> None:
    """Rounding is a matter of a row of a matrix, or of a token and head, so stages say what one rank says."""
    family = TINY_FAMILIES["qwen3-moe"]
    family.make(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path), max_model_len=family.max_model_len))
    prompts = [list(range(1, 40)), [7] * 20, [5]]
    answers = []
    for num_stages in (1, 2):
        sections = {"parallel": {"pipeline_parallel_size": num_stages}, **section}
        sections["model"] = {"num_threads": 1, **section.get("model", {})}
        executor = ThreadExecutor(EngineConfig.model_validate(sections), info)
        answers.append(Driver(executor, family.max_model_len, **sections).greedy(prompts, NUM_TOKENS, 1))
        executor.shutdown()
    for one, two in zip(*answers, strict=True):
        assert one.token_ids == two.token_ids
        for mine, theirs in zip(one.logprobs, two.logprobs, strict=True):
            assert abs(mine.logprob - theirs.logprob) < 1e-4


@pytest.mark.parametrize("grid", [{"tensor_parallel_size": 2}, PIPELINES[0], PIPELINES[2]], ids=grid_id)
def test_grammars(tmp_path: Path, grid: dict[str, int]) -> None:
    """Masks reach the ranks that sample: answers are those of one rank, and valid."""
    TINY_FAMILIES["llama"].make(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    letters = [*map(chr, range(33, 127)), "Ġ"]  # which is the space: the model has no room for all bytes
    eos = len(letters)
    bytes_alone = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens(["<|end|>"])
    compiler = LlguidanceCompiler(
        lambda: SimpleNamespace(backend_tokenizer=bytes_alone), info.vocab_size, [eos], GrammarConfig()
    )
    source = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    spec = GrammarSpec(kind="json_schema", source=source)
    requests = [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=[5 + i, 6, 7],
            sampling_params=SamplingParams(temperature=i % 2, max_tokens=24),
            seed=i,
            eos_token_ids=(eos,),
            grammar=spec,
        )
        for i in range(6)
    ]
    answers = []
    for parallel in ({}, grid):
        sections: dict[str, dict[str, object]] = {"model": {"num_threads": 1}, "parallel": {**parallel}}
        executor = ThreadExecutor(EngineConfig.model_validate(sections), info)
        driver = Driver(executor, info.max_model_len, **sections)
        gate = GrammarGate(compiler.compile, lambda driver=driver: driver.core.wake())
        driver.core = EngineCore(EngineConfig.model_validate(sections), executor, info.max_model_len, gates=(gate,))
        answers.append([answer.token_ids for answer in driver.run(requests)])
        gate.close()
        executor.shutdown()
    assert answers[0] == answers[1]
    for token_ids in answers[1]:
        text = bytes_alone.decode([token_id for token_id in token_ids if token_id != eos])
        assert isinstance(json.loads(text)["a"], str)


@pytest.mark.parametrize("grid", EXPERTS, ids=grid_id)
@pytest.mark.parametrize("family", [*MIXTURES, "gpt-oss"])
def test_experts_are_dealt_out(tmp_path: Path, family: str, grid: dict[str, int]) -> None:
    """5 experts on 2 ranks, and on 5 (6 heads, 2 KV heads)."""
    model = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    with model.on_ranks(**grid, expert_parallel=True):
        check(model.batched())
    model.executor.shutdown()


@pytest.mark.parametrize("family", MIXTURES)
def test_stacked_experts(tmp_path: Path, family: str) -> None:
    """Checkpoints with one tensor for all experts load as those with one tensor each, whole and in parts."""
    model = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    grids = [Grid(), Grid(tensor_size=2), Grid(tensor_size=2, num_stages=2, expert_parallel=True)]
    separate = [parameters_of(tmp_path, grid) for grid in grids]
    model.reference.model.save_pretrained(tmp_path, save_original_format=False)
    with (tmp_path / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["model.layers.0.mlp.experts.gate_up_proj"]["shape"][0] == 5
    for grid, expected in zip(grids, separate, strict=True):
        for mine, theirs in zip(parameters_of(tmp_path, grid), expected, strict=True):
            assert torch.equal(mine, theirs)
    model.executor.shutdown()


def parameters_of(path: Path, grid: Grid) -> list[torch.Tensor]:
    """Those of the last rank."""
    config = EngineConfig.model_validate({"model": {"model": str(path), "num_threads": 1}})
    worker = Worker(config, load_model_info(config.model), ParallelContext(grid.world_size - 1, grid))
    worker.load_model()
    return list(worker.model.parameters())


def test_a_wrong_shape_of_stacked_experts_is_named(tmp_path: Path) -> None:
    model = FamilyUnderTest(TINY_FAMILIES["mixtral"], tmp_path)
    model.executor.shutdown()
    model.reference.model.save_pretrained(tmp_path, save_original_format=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 60}))
    with pytest.raises(ConfigError, match=r"experts.down_proj \[5, 96, 70\] instead of \[5, 96, 60\]"):
        parameters_of(tmp_path, Grid())


@pytest.mark.parametrize("grid", [PIPELINES[0], PIPELINES[2]], ids=grid_id)
def test_processes(tmp_path: Path, grid: dict[str, int]) -> None:
    """Over gloo, as the worker actors of a cluster: answers with several steps in flight are those of one rank."""
    make_tiny_llama(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    model = FamilyUnderTest(TINY_FAMILIES["llama"], tmp_path)
    config = EngineConfig.model_validate({"model": {"num_threads": 1}, "parallel": grid})
    executor = ProcessExecutor(config, model.info)
    driver = Driver(executor, info.max_model_len, parallel=grid, scheduler={"max_num_batched_tokens": 40})
    for _ in range(2):
        check(model.compare(driver.greedy(model.prompts, NUM_TOKENS, 4)))
    assert driver.stats().prefix_cache_hits > 0
    executor.shutdown()
    model.executor.shutdown()


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        (
            "llama",
            {"pipeline_parallel_size": 5},
            "pipeline_parallel_size: 5 stages cannot share 4 layers; sizes 1 to 4",
        ),
        (
            "llama",
            {"tensor_parallel_size": 7},
            "tensor_parallel_size: 7 ranks cannot share 6 attention heads; sizes 1 to 6",
        ),
        ("llama", {"expert_parallel": True}, "expert_parallel: the model has no experts"),
        (
            "mixtral",
            {"tensor_parallel_size": 6, "expert_parallel": True},
            "expert_parallel: 6 ranks cannot share 5 experts; tensor_parallel_size sizes 1 to 5 work",
        ),
    ],
)
def test_sizes_that_cannot_work(tmp_path: Path, family: str, parallel: dict[str, object], message: str) -> None:
    TINY_FAMILIES[family].make(tmp_path)
    info = load_model_info(ModelConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=message):
        check_ranks(EngineConfig.model_validate({"parallel": parallel}), info)
    largest = {"tensor_parallel_size": 6, "pipeline_parallel_size": 4}
    check_ranks(EngineConfig.model_validate({"parallel": largest}), info)
