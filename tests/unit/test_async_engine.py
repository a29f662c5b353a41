"""The engine as an asynchronous iterator, and what leaving it early gives back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from engine_helpers import make_core
from fake_executor import VOCABULARY, FakeExecutor, expected_tokens, pooled, prompt_logprobs_of, states_of
from small_tokenizers import byte_level

from quire.engine.async_engine import AsyncEngine
from quire.engine.core import EngineCore
from quire.engine.errors import EngineError, InvalidRequestError, OverloadedError
from quire.engine.input_processor import InputProcessor
from quire.engine.outputs import RequestOutput
from quire.engine.pooling import PoolingParams
from quire.engine.sampling_params import SamplingParams

INFO = SimpleNamespace(
    vocab_size=VOCABULARY, max_model_len=200, eos_token_ids=(), hidden_size=8, pooling=PoolingParams(type="mean")
)


def make(core: EngineCore | None = None, **options: object) -> AsyncEngine:
    tokenizer = byte_level()
    return AsyncEngine(core or make_core(), InputProcessor(INFO, tokenizer), tokenizer, **options)  # type: ignore[arg-type]


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate({"prompt_token_ids": prompt}, params)]


async def test_many_streams_at_once_get_their_own_tokens() -> None:
    engine = make()
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    params = SamplingParams(max_tokens=9, seed=3)
    streams = await asyncio.gather(*[collect(engine, prompt, params) for prompt in prompts])
    for prompt, outputs in zip(prompts, streams, strict=True):
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens == expected_tokens(prompt, 9, seed=3)
        assert [output.finished for output in outputs].count(True) == 1
    await engine.shutdown()


async def test_choices_of_one_prompt_end_together() -> None:
    engine = make(kind="final")
    (output,) = await collect(engine, [1, 2, 3], SamplingParams(max_tokens=5, seed=1, n=3))
    assert [choice.token_ids for choice in output.outputs] == [
        expected_tokens([1, 2, 3], 5, seed=1, choice_index=i) for i in range(3)
    ]
    await engine.shutdown()


async def test_leaving_early_aborts_and_frees() -> None:
    core = make_core()
    engine = make(core)
    stream = engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=190, seed=1))
    await anext(stream)
    await stream.aclose()
    after = await collect(engine, [4], SamplingParams(max_tokens=1, seed=1))
    assert after[-1].finished
    await engine.shutdown()
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def test_a_refused_request_leaves_the_others_alone() -> None:
    engine = make()
    with pytest.raises(InvalidRequestError, match="prompt"):
        await collect(engine, [], SamplingParams())
    with pytest.raises(InvalidRequestError, match="token ids must be"):
        await collect(engine, [VOCABULARY], SamplingParams())
    assert (await collect(engine, [1], SamplingParams(max_tokens=1, seed=0)))[-1].finished
    await engine.shutdown()


async def test_a_dead_engine_raises_everywhere() -> None:
    class Unrepairable(FakeExecutor):
        def restart(self) -> None:
            raise RuntimeError("no machine left")

    engine = make(make_core(Unrepairable(fail_steps=(2,))))
    with pytest.raises(EngineError, match="no machine left"):
        await collect(engine, [1, 2, 3], SamplingParams(max_tokens=9))
    with pytest.raises(EngineError, match="no machine left"):
        await collect(engine, [1], SamplingParams())
    await engine.shutdown()


async def test_a_full_queue_raises_with_an_estimate() -> None:
    engine = make(make_core(max_num_seqs=1, max_queued_requests=1))
    first = engine.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=190, seed=0))
    await anext(first)
    second = asyncio.create_task(collect(engine, [2], SamplingParams(max_tokens=2, seed=0)))
    while engine.stats().num_waiting == 0:
        await anext(first)
    with pytest.raises(OverloadedError) as caught:
        await collect(engine, [3], SamplingParams(max_tokens=2, seed=0, n=2))
    assert caught.value.retry_after_s >= 1.0
    await first.aclose()
    assert (await second)[-1].finished
    await engine.shutdown()


async def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    engine = make()
    prompt, params = [1, 2], SamplingParams(max_tokens=30, seed=0)
    first = engine.generate({"prompt_token_ids": prompt}, params, "a")
    outputs = [await anext(first)]
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        await anext(engine.generate({"prompt_token_ids": prompt}, params, "a"))
    outputs += [output async for output in first]
    assert [token for output in outputs for token in output.outputs[0].token_ids] == expected_tokens(prompt, 30)
    await engine.shutdown()


@pytest.mark.parametrize("num_read", [0, 3])
async def test_an_id_may_be_used_again_when_its_owner_has_left(num_read: int) -> None:
    """What the engine says of the first one arrives when the second one runs."""
    engine = make()
    bystander = asyncio.create_task(collect(engine, [9, 9], SamplingParams(max_tokens=100, seed=2)))
    first = engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=150, seed=1), "x")
    if num_read:
        for _ in range(num_read):
            await anext(first)
        await first.aclose()
    else:
        reader = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    second = engine.generate({"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=5, seed=1), "x")
    outputs = [output async for output in second]
    assert [token for output in outputs for token in output.outputs[0].token_ids] == expected_tokens([4, 5], 5, seed=1)
    assert {output.request_id for output in outputs} == {"x"}
    assert (await asyncio.wait_for(bystander, 20))[-1].finished
    await engine.shutdown()


async def test_a_request_that_the_engine_gives_up_raises() -> None:
    engine = make(make_core(FakeExecutor(poison=frozenset({"bad~0"}))))
    with pytest.raises(EngineError, match="3 times in a row"):
        async for _ in engine.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=5), "bad"):
            pass
    assert (await collect(engine, [4], SamplingParams(max_tokens=2, seed=0)))[-1].finished
    await engine.shutdown()


async def test_nothing_hangs_on_an_engine_that_has_ended() -> None:
    engine = make()
    await engine.shutdown()
    with pytest.raises(EngineError):
        await collect(engine, [1], SamplingParams())


async def test_embeddings_next_to_streams() -> None:
    engine = make()
    prompts = [[i, i + 1, i + 2] for i in range(9)]
    vectors, outputs = await asyncio.gather(
        asyncio.gather(*[engine.embed({"prompt_token_ids": prompt}) for prompt in prompts]),
        collect(engine, [4, 5], SamplingParams(max_tokens=5, seed=1)),
    )
    for prompt, output in zip(prompts, vectors, strict=True):
        expected = pooled(PoolingParams(type="mean"), dict(enumerate(states_of(prompt))), 3)
        assert (output.prompt_token_ids, output.embedding.tolist()) == (prompt, expected.tolist())
    assert [token for output in outputs for token in output.outputs[0].token_ids] == expected_tokens([4, 5], 5, seed=1)
    first = await engine.embed({"prompt_token_ids": [1, 2]}, PoolingParams(type="cls"))
    assert first.embedding.tolist() == pooled(PoolingParams(type="cls"), dict(enumerate(states_of([1, 2]))), 2).tolist()
    with pytest.raises(InvalidRequestError, match="dimensions: must be an integer from 1 to 8"):
        await engine.embed({"prompt_token_ids": [1]}, PoolingParams(dimensions=9))
    await engine.shutdown()
    with pytest.raises(EngineError):
        await engine.embed({"prompt_token_ids": [1]})


async def test_an_embedding_that_nobody_waits_for_is_aborted() -> None:
    core = make_core(max_num_batched_tokens=1)
    engine = make(core)
    prompt = {"prompt_token_ids": [i % VOCABULARY for i in range(150)]}
    waiting = asyncio.ensure_future(engine.embed(prompt, request_id="e"))
    await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await collect(engine, [4], SamplingParams(max_tokens=1, seed=1)))[-1].finished
    again = await engine.embed({"prompt_token_ids": [1, 2]}, request_id="e")
    assert again.request_id == "e"
    assert core.stats().num_used_blocks == 0
    await engine.shutdown()


@pytest.mark.parametrize("kind", ["final", "cumulative", "delta"])
async def test_prompt_logprobs_are_told_once_per_prompt(kind: str) -> None:
    engine, prompt = make(kind=kind), [3, 1, 4, 1, 5]
    outputs = await collect(engine, prompt, SamplingParams(max_tokens=4, seed=1, n=2, prompt_logprobs=0))
    expected = prompt_logprobs_of(prompt, range(1, 5), states_of(prompt)[:-1]).logprobs[:, 0].tolist()
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) == (1 if kind == "delta" else len(outputs))
    for entries in told:
        assert entries[0] is None
        assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
        assert [entry.logprob for entry in entries[1:] if entry] == expected
    await engine.shutdown()
