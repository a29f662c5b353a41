"""Decode graphs that end in tokens, or in logits where something else is asked for: the same tokens."""

from __future__ import annotations

import gc

import pytest

from quire import LLM, SamplingParams
from quire.workers.decode_graphs import DecodeGraphs, End

PROMPTS = [{"prompt_token_ids": list(range(start, start + 20))} for start in (5, 900, 7000)]
NUM_TOKENS = 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_are_the_same_whatever_else_is_asked_for(dtype: str) -> None:
    """With logprobs, or beside a request that draws its tokens, all logits are computed; what is drawn is so by the
    graph, or behind it."""
    others = {id(each) for each in gc.get_objects() if type(each) is DecodeGraphs}
    llm = LLM(dtype=dtype, num_threads=2, num_kv_blocks=64, num_speculative_tokens=0, enable_prefix_caching=False)
    (graphs,) = (each for each in gc.get_objects() if type(each) is DecodeGraphs and id(each) not in others)
    greedy = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

    def tokens(*params: SamplingParams) -> list[list[int]]:
        answers = llm.generate(PROMPTS, list(params), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    plain = tokens(*[SamplingParams(**greedy)] * 3)
    assert {end for _, end in graphs._replays} == {End.TOKENS}
    assert tokens(*[SamplingParams(**greedy, logprobs=2)] * 3) == plain
    assert {end for _, end in graphs._replays} == {End.TOKENS, End.LOGITS}
    drawn = {"temperature": 1.5, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 1}
    mixed = tokens(SamplingParams(**greedy), SamplingParams(**drawn), SamplingParams(**greedy))
    assert mixed[::2] == plain[::2]
    assert {end for _, end in graphs._replays} == {End.TOKENS, End.LOGITS, End.DRAWN}
    assert tokens(SamplingParams(**greedy), SamplingParams(**drawn, logprobs=2), SamplingParams(**greedy)) == mixed
    assert mixed[1] != plain[1]
