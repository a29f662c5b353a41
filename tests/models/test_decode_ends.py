"""Decode graphs that end in tokens, or in logits where something else is asked for: the same tokens."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.workers.decode_graphs import End
from quire.workers.model_runner import ModelRunner

PROMPTS = [{"prompt_token_ids": list(range(start, start + 20))} for start in (5, 900, 7000)]
NUM_TOKENS = 24


GREEDY = {"temperature": 0.0, "ignore_eos": True}
DRAWN = {"temperature": 1.5, "ignore_eos": True, "seed": 1}


class Engine:
    """One that answers `PROMPTS`, and the ends of the graphs that it has recorded."""

    def __init__(self, **options: Any) -> None:
        others = {id(each) for each in gc.get_objects() if type(each) is ModelRunner}
        fixed = {"num_threads": 2, "num_kv_blocks": 64, "num_speculative_tokens": 0, "enable_prefix_caching": False}
        self._llm = LLM(**fixed, **options)
        (self._runner,) = (each for each in gc.get_objects() if type(each) is ModelRunner and id(each) not in others)

    def tokens(self, *params: SamplingParams) -> list[list[int]]:
        answers = self._llm.generate(PROMPTS, list(params), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    @property
    def ends(self) -> set[End]:
        return {end for _, end in self._runner._graphs._replays}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_whatever_else_is_asked_for(dtype: str) -> None:
    """With logprobs all logits are computed, and what is drawn is drawn behind the graph."""
    engine = Engine(dtype=dtype)
    greedy, drawn = SamplingParams(**GREEDY, max_tokens=NUM_TOKENS), SamplingParams(**DRAWN, max_tokens=NUM_TOKENS)
    plain = engine.tokens(greedy, greedy, greedy)
    assert engine.ends == {End.TOKENS}
    assert engine.tokens(*[SamplingParams(**GREEDY, max_tokens=NUM_TOKENS, logprobs=2)] * 3) == plain
    assert engine.ends == {End.TOKENS, End.LOGITS}
    mixed = engine.tokens(greedy, drawn, greedy)
    assert engine.ends == {End.TOKENS, End.LOGITS, End.DRAWN}
    assert mixed[::2] == plain[::2]
    assert mixed[1] != plain[1]
    assert engine.tokens(greedy, SamplingParams(**DRAWN, max_tokens=NUM_TOKENS, logprobs=2), greedy) == mixed


def test_a_graph_goes_on_with_the_tokens_of_another() -> None:
    """From logits to drawn tokens to the likeliest, with fewer requests each time. With one step in flight, tokens are
    written down before the next one begins."""
    params = [
        SamplingParams(**GREEDY, max_tokens=NUM_TOKENS),
        SamplingParams(**DRAWN, max_tokens=16),
        SamplingParams(**GREEDY, max_tokens=8, logprobs=1),
    ]
    one_by_one, planned_ahead = Engine(max_inflight_steps=1), Engine(max_inflight_steps=2)
    expected = one_by_one.tokens(*params)
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS, 16, 8]
    for _ in range(2):  # recorded, and repeated
        assert planned_ahead.tokens(*params) == expected
    assert planned_ahead.ends == {End.TOKENS, End.LOGITS, End.DRAWN}


def test_one_that_does_not_sample_yet_changes_nothing_for_those_that_do() -> None:
    """With three tokens a step, the last prompt comes token by token beside two answers."""
    greedy = SamplingParams(**GREEDY, max_tokens=NUM_TOKENS)
    expected = Engine().tokens(greedy, greedy, greedy)
    engine = Engine(max_num_batched_tokens=3, max_num_seqs=3)
    for _ in range(2):
        assert engine.tokens(greedy, greedy, greedy) == expected
    assert engine.ends == {End.TOKENS, End.LOGITS}
