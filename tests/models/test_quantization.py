"""Weights in 8 bits: exact where they lie on the grid of int8, close where they do not; and where kernels round what
multiplies them as well, as the reference does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core_driver import Answer
from family_parity import TOP, FamilyUnderTest
from hf_reference import Reference
from tiny_families import TINY_FAMILIES, TinyFamily

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.kernels import ops
from quire.kernels.dispatch import forced_backend
from quire.kernels.packed import IN_8_BITS
from quire.workers.layers.parameter import (
    Fp8Parameter,
    Int8Parameter,
    PackedParameter,
    ShardedParameter,
    num_bytes,
    replicated,
)
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_check import check_model
from quire.workers.parallel import ParallelContext
from quire.workers.quantization import blueprint_for
from quire.workers.worker import Worker

NUM_TOKENS = 12


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(dim=-1, keepdim=True) / 127
    return (weight / scales).round() * scales


def executor_of(model: FamilyUnderTest, quantization: str = "int8") -> LocalExecutor:
    sections = {"model": {"num_threads": 1, "quantization": quantization}, "cache": {"num_kv_blocks": 100}}
    return LocalExecutor(EngineConfig.model_validate(sections), model.info)


class OnGrid:
    """A tiny family whose matrices lie on the grid of 8 bits."""

    def __init__(self, family: TinyFamily) -> None:
        self._family = family
        self.max_model_len, self.min_length = family.max_model_len, family.min_length

    def make(self, directory: Path) -> object:
        model = self._family.make(directory)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(on_grid(parameter))
        model.save_pretrained(directory)
        return model


@pytest.fixture
def never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs that have no kernel which rounds what multiplies packed weights."""
    monkeypatch.setattr(PackedParameter, "can_pack", staticmethod(lambda *_, **__: False))


@pytest.mark.usefixtures("never_packed")
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3-moe"])
def test_exact_on_the_grid(tmp_path: Path, family: str) -> None:
    """Tied embeddings, fused projections and experts among them; alone, batched, and in chunks too large for tiles.

    The same tokens; logprobs move by what multiplies the weights being rounded to 16 bits of its row's largest (where
    the CPU multiplies bytes), by up to 0.002 with the large weights of these models.
    """
    model = FamilyUnderTest(OnGrid(TINY_FAMILIES[family]), tmp_path)  # type: ignore[arg-type]
    executor = executor_of(model)
    cache: dict[str, object] = {"num_kv_blocks": 100}
    for answers in (
        model.driver(executor, cache=cache).greedy(model.prompts, NUM_TOKENS, TOP),
        [model.driver(executor, cache=cache).greedy([prompt], NUM_TOKENS, TOP)[0] for prompt in model.prompts],
    ):
        parity = model.compare(answers)
        assert parity.mismatches == []
        assert parity.max_logprob_difference < 5e-3
    executor.shutdown()
    model.executor.shutdown()


@pytest.mark.skipif(
    not ops.fits_packed((64, 64), IN_8_BITS, torch.float32, torch.device("cpu"), in_int8=True),
    reason="no kernel rounds x here",
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3-moe"])
def test_packed_as_the_reference_computes_it(tmp_path: Path, family: str) -> None:
    """Alone and batched the same, and what the reference kernels give, which round alike: where a number lies in the
    middle between two, to the other one, perhaps. With the same weights, and nothing else rounded, all is farther."""
    model = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    cache: dict[str, object] = {"num_kv_blocks": 100}
    executor = executor_of(model)
    packed = [p for p in executor._worker.model.parameters() if isinstance(p, PackedParameter)]
    assert sum(each.in_int8 for each in packed) >= 8
    batched = model.driver(executor, cache=cache).greedy(model.prompts, NUM_TOKENS, TOP)
    for prompt, answer in zip(model.prompts, batched, strict=True):
        (alone,) = model.driver(executor, cache=cache).greedy([prompt], NUM_TOKENS, TOP)
        assert alone.token_ids == answer.token_ids
    with forced_backend("reference"):
        other = executor_of(model)
        expected = model.driver(other, cache=cache).greedy(model.prompts, NUM_TOKENS, TOP)
    for each in packed:
        each.in_int8 = False
    exact = model.driver(executor, cache=cache).greedy(model.prompts, NUM_TOKENS, TOP)
    distances, others = distances_of(batched, expected), distances_of(exact, expected)
    assert sum(distances) < 0.005 * len(distances)
    assert max(distances) < 0.05
    assert sum(others) / len(others) > 5 * sum(distances) / len(distances)
    for each in (executor, other, model.executor):
        each.shutdown()


def distances_of(answers: list[Answer], references: list[Answer]) -> list[float]:
    """Of the logprobs of the likeliest tokens, up to the first that is another one."""
    distances = []
    for answer, reference in zip(answers, references, strict=True):
        for ours, theirs in zip(answer.logprobs, reference.logprobs, strict=True):
            distances.append(abs(ours.top[0][1] - theirs.top[0][1]))
            if ours.token_id != theirs.token_id:
                break
    return distances


@pytest.mark.parametrize(("family", "quantization"), [("llama", "int8"), ("llama", "fp8"), ("qwen3-moe", "fp8")])
def test_close_off_the_grid(tmp_path: Path, family: str, quantization: str) -> None:
    """An element is off by at most half a step, 1/127 of its row's largest in int8 and 1/8 of itself in fp8; such large
    weights move logprobs."""
    model = FamilyUnderTest(TINY_FAMILIES[family], tmp_path)
    executor = executor_of(model, quantization)
    answers = model.driver(executor, cache={"num_kv_blocks": 100}).greedy(model.prompts, 1, TOP)
    executor.shutdown()
    model.executor.shutdown()
    for prompt, answer in zip(model.prompts, answers, strict=True):
        expected = model.reference.logits(prompt, answer.token_ids).log_softmax(dim=-1)[0]
        ours = torch.tensor([logprob for _, logprob in answer.logprobs[0].top])
        difference = (ours - expected.topk(TOP).values).abs().max().item()
        assert 0 < difference < 1.0


def test_rounding() -> None:
    parameter = Int8Parameter.like(ShardedParameter(torch.empty(3, 4), replicated((3, 4))), torch.device("cpu"))
    parameter.fill(torch.tensor([[1.27, -1.27, 0.014, 0.016], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 2.9, 3.1]]))
    assert parameter.data.tolist() == [[127, -127, 1, 2], [0, 0, 0, 0], [-127, 0, 1, 2]]
    assert parameter.scales[0].item() == pytest.approx(0.01)
    assert parameter.scales[2].item() == pytest.approx(2.0)
    assert parameter.embed(torch.tensor([1, 2])).tolist() == [[0.0, 0.0, 0.0, 0.0], [-254.0, 0.0, 2.0, 4.0]]


def test_rounding_to_fp8() -> None:
    parameter = Fp8Parameter.like(ShardedParameter(torch.empty(2, 4), replicated((2, 4))), torch.device("cpu"))
    parameter.fill(torch.tensor([[4.48, -4.48, 0.30, 0.0], [-896.0, 2.0, 34.0, 35.0]]))
    assert parameter.data.float().tolist() == [[448.0, -448.0, 30.0, 0.0], [-448.0, 1.0, 16.0, 18.0]]
    assert parameter.scales.tolist() == pytest.approx([0.01, 2.0])
    assert parameter.embed(torch.tensor([1])).tolist() == [[-896.0, 2.0, 32.0, 36.0]]


def test_a_quarter_of_the_memory(tmp_path: Path) -> None:
    """`quire check` and the worker count the same, and dummy weights are not all zero."""
    TINY_FAMILIES["llama"].make(tmp_path)
    config = EngineConfig.model_validate({"model": {"model": str(tmp_path), "quantization": "int8", "num_threads": 1}})
    info = load_model_info(config.model)
    short, full = (check_model(c, info) for c in (config, EngineConfig(model=ModelConfig(model=str(tmp_path)))))
    assert str(short.implementation).startswith("native (Llama")
    assert short.implementation.reason.endswith("int8")
    assert short.weight_bytes[0] < 0.27 * full.weight_bytes[0]  # the norms keep their 4 bytes
    dummy = config.model_copy(update={"model": config.model.model_copy(update={"load_format": "dummy"})})
    worker = Worker(dummy, info, ParallelContext())
    worker.load_model()
    int8 = [p for p in worker.model.parameters() if isinstance(p, Int8Parameter)]
    packed = [p for p in worker.model.parameters() if isinstance(p, PackedParameter)]
    assert num_bytes(worker.model.parameters()) == short.weight_bytes[0]
    assert int8
    assert all(p.data.abs().amax() == 127 for p in int8)
    for each in packed:
        numbers = each.linear(torch.eye(each.matrix_shape[1]))
        assert 0.015 < numbers.std() < 0.025  # as they were drawn


def test_the_reference_is_on_the_grid(tmp_path: Path) -> None:
    """The exactness above would mean nothing if the reference had kept its old weights."""
    model = OnGrid(TINY_FAMILIES["llama"]).make(tmp_path)
    assert isinstance(Reference(model), Reference)
    weight = model.model.layers[0].mlp.up_proj.weight  # type: ignore[attr-defined]
    steps = weight / (weight.abs().amax(dim=-1, keepdim=True) / 127)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)


def test_on_a_gpu_the_weights_are_never_there_as_they_were_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is built on the host takes no memory there, as nobody writes to it."""
    model = FamilyUnderTest(TINY_FAMILIES["qwen3-moe"], tmp_path)
    gpu, built = torch.device("cuda", 0), []

    def like(parameter: ShardedParameter, device: torch.device, _scale_columns: int | None) -> Int8Parameter:
        built.append((parameter.device.type, device))
        return made(parameter, parameter.device)

    moved: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: [moved.append(str(device)), model][1])
    made = Int8Parameter.like
    monkeypatch.setattr(Int8Parameter, "like", like)
    monkeypatch.setattr(torch, "get_default_device", lambda: gpu)
    blueprint_for(ModelConfig(quantization="int8"), model.info, torch.device("cpu")).build(ParallelContext())
    assert len(built) > 5
    assert set(built) == {("cpu", gpu)}
    assert moved == ["cuda:0"], "what is not quantized, before it is filled"
