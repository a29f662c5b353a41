"""What follows the attention of the last layer is computed of tokens that somebody wants something of, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest
from quire.engine.pooling import PoolingParams
from quire.engine.sampling_params import SamplingParams
from quire.kernels import dispatch
from quire.workers.local_executor import LocalExecutor
from tests.models.core_driver import Answer, Driver
from tests.models.tiny_families import TINY_FAMILIES

PROMPT = list(range(1, 100))
MOST = 40  # tokens in a step
STEPS = [40, 40, 19, 1, 1]  # tokens of the prompt, then what was sampled


def make_driver(path: Path, family: str) -> tuple[Driver, LocalExecutor]:
    TINY_FAMILIES[family].make(path)
    model = {"model": str(path), "device": "cpu", "enforce_eager": True}
    executor = LocalExecutor(
        EngineConfig.model_validate({"model": model}), load_model_info(ModelConfig(model=str(path)))
    )
    return Driver(executor, 128, scheduler={"max_num_batched_tokens": MOST}), executor


def run(
    path: Path, family: str, params: SamplingParams, pooling: PoolingParams | None = None
) -> tuple[list[int], list[int], Answer]:
    """How many tokens the MLP of the first layer, and that of the last one, computed at a time."""
    driver, executor = make_driver(path, family)
    layers = list(executor._worker.model.layers.values())
    rows: list[list[int]] = [[], []]
    for layer, of_layer in zip((layers[0], layers[-1]), rows, strict=True):
        layer.mlp.register_forward_hook(lambda _mlp, given, _out, found=of_layer: found.append(len(given[0])))
    request = EngineRequest(request_id="0", prompt_token_ids=PROMPT, sampling_params=params, seed=0, pooling=pooling)
    (answer,) = driver.run([request])
    return *rows, answer


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "mixtral"])
def test_of_a_prompt_one(tmp_path: Path, family: str) -> None:
    """And of a chunk that is not its last one, none."""
    first, last, _ = run(tmp_path, family, SamplingParams(temperature=0.0, max_tokens=3))
    assert (first, last) == (STEPS, [1, 1, 1])


def test_all_whose_logprobs_are_wanted(tmp_path: Path) -> None:
    """In a chunk, from the one before its first token on. What samples is computed by itself."""
    first, last, answer = run(tmp_path, "llama", SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1))
    assert (first, last) == (STEPS, [40, 40, 18, 1, 1, 1])
    assert len(answer.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(("type", "rows"), [("mean", [40, 40, 19]), ("cls", [1]), ("last", [1])])
def test_what_an_embedding_is_made_of(tmp_path: Path, type: str, rows: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    first, last, answer = run(tmp_path, "llama", params, PoolingParams(type=type))
    assert (first, last) == (STEPS[:3], rows)
    assert torch.isfinite(answer.embedding).all()


@pytest.mark.parametrize("family", ["llama", "phi", "gpt2", "mixtral", "gemma2", "olmo2", "cohere"])
def test_whoever_comes_last_may_overwrite_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As the norms of a GPU do: nobody reads it behind them."""
    backend: Any = dispatch.backend_for(torch.device("cpu"))
    add_rms_norm, num_overwritten = backend.add_rms_norm, 0

    def stored_in_place(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        nonlocal num_overwritten
        normed, total = add_rms_norm(x, residual, *rest)
        num_overwritten += 1
        return normed, residual.copy_(total)

    def answers() -> list[Answer]:
        driver, _ = make_driver(tmp_path, family)
        requests = []
        for i, length in enumerate((1, 2, 3, 90, 5, 60, 7)):
            pooling = PoolingParams(type=("mean", "cls", "last")[i // 2]) if i % 2 else None
            params = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1 if i % 4 == 0 else None)
            requests.append(
                EngineRequest(
                    request_id=str(i), prompt_token_ids=PROMPT[:length], sampling_params=params, seed=0, pooling=pooling
                )
            )
        return driver.run(requests)

    expected = answers()
    monkeypatch.setattr(backend, "add_rms_norm", stored_in_place)
    for answer, other in zip(answers(), expected, strict=True):
        assert (answer.token_ids, answer.prompt_logprobs) == (other.token_ids, other.prompt_logprobs)
        assert answer.embedding is None or torch.equal(answer.embedding, other.embedding)
    assert (num_overwritten > 0) == (family not in ("phi", "gpt2", "cohere"))  # which have layer norms
