"""`LLM.embed` and prompt logprobs of `LLM.generate` on the default model, against `transformers` on the same file."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hf_reference import Reference

from quire import LLM, PoolingParams, SamplingParams
from quire.engine.errors import InvalidRequestError

TEXTS = ["The capital of France is Paris.", "year 2024 and 1,234", "Hi"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, num_kv_blocks=64) as llm:
        yield llm


def test_an_interrupt_leaves_the_engine_usable(llm: LLM) -> None:
    """Whenever it comes: in planning, while a forward is computed or recorded, or between steps."""
    prompts = [{"prompt_token_ids": list(range(2, 40 + i))} for i in range(3)]
    short, long = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 400))

    def answers() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, short, use_tqdm=False)]

    def interrupted_after(delay_s: float) -> None:
        """Starts the timer itself: on a busy machine it may have run down before the first line of `generate`."""
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        llm.generate(prompts, long, use_tqdm=False)

    wanted = answers()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for delay_s in (0.001, 0.01, 0.05, 0.1, 0.15, 0.2, 0.3):
            with pytest.raises(KeyboardInterrupt):
                interrupted_after(delay_s)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert llm.stats().num_used_blocks == 0
            assert answers() == wanted
    finally:
        signal.signal(signal.SIGINT, before)


def expected(reference: Reference, ids: list[int], kind: str, normalize: bool, dimensions: int | None) -> torch.Tensor:
    hidden = reference.hidden_states(ids)
    vector = {"last": hidden[-1], "mean": hidden.mean(dim=0), "cls": hidden[0]}[kind][:dimensions]
    return vector / vector.norm() if normalize else vector


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_embeddings_of_the_default_model(llm: LLM, smollm2_reference: Reference, kind: Any) -> None:
    for normalize, dimensions in ((True, None), (False, 64), (True, 64)):
        pooling = PoolingParams(type=kind, normalize=normalize, dimensions=dimensions)
        for output, text in zip(llm.embed(TEXTS, pooling, use_tqdm=False), TEXTS, strict=True):
            assert output.prompt == text
            assert output.embedding.dtype == np.float32
            wanted = expected(smollm2_reference, output.prompt_token_ids, kind, normalize, dimensions)
            torch.testing.assert_close(torch.tensor(output.embedding), wanted, atol=1e-4, rtol=1e-4)


def test_by_default_the_last_token_normalized(llm: LLM) -> None:
    (output,) = llm.embed(TEXTS[0], use_tqdm=False)
    (same,) = llm.embed({"prompt_token_ids": output.prompt_token_ids}, PoolingParams(), use_tqdm=False)
    assert output.embedding.shape == (576,)
    assert np.linalg.norm(output.embedding) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(output.embedding, same.embedding, atol=1e-5)
    assert llm.stats().num_used_blocks == 0


def test_what_cannot_be_embedded(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions: must be an integer from 1 to 576"):
        llm.embed("x", PoolingParams(dimensions=577))
    with pytest.raises(InvalidRequestError, match="at most 512 are allowed"):
        llm.embed({"prompt_token_ids": [1] * 513})
    assert len(llm.embed({"prompt_token_ids": [1] * 512}, use_tqdm=False)) == 1


def test_prompt_logprobs_of_the_default_model(llm: LLM, smollm2_reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=2)
    scored, plain = llm.generate(TEXTS[:2], [params, SamplingParams(max_tokens=0)], use_tqdm=False)
    told = scored.prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert len(scored.outputs) == 2
    prompt = scored.prompt_token_ids
    logits = smollm2_reference.logits(prompt[:1], prompt[1:]).log_softmax(dim=-1)
    own = torch.tensor([entry.logprob for entry in told if entry])
    torch.testing.assert_close(own, logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], atol=1e-4, rtol=1e-4)
    assert [[token_id for token_id, _ in entry.top] for entry in told if entry] == logits.topk(2).indices.tolist()
    assert plain.prompt_logprobs is None
    assert (plain.outputs[0].token_ids, plain.outputs[0].finish_reason) == ([], "length")
