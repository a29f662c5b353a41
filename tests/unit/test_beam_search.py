"""Beam search against an exhaustive search on a small table of probabilities."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from quire.engine.beam_search import Beam, BeamSearchParams, beam_search
from quire.engine.errors import InvalidRequestError
from quire.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.engine.sampling_params import SamplingParams

VOCABULARY = 4
EOS = 3


def distribution(tokens: tuple[int, ...]) -> list[float]:
    rng = random.Random(repr(tokens))
    weights = [rng.random() ** 2 + 0.01 for _ in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def generate(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    """An engine that knows the table."""
    assert params.logprobs is not None
    outputs = []
    for prompt in prompts:
        values = distribution(tuple(prompt))
        top = sorted(enumerate(values), key=lambda entry: -entry[1])[: params.logprobs]
        entry = TokenLogprobs(top[0][0], top[0][1], 1, top)
        completion = CompletionOutput(index=0, text="", token_ids=[top[0][0]], logprobs=[entry])
        outputs.append(
            RequestOutput(request_id="", prompt=None, prompt_token_ids=prompt, outputs=[completion], finished=True)
        )
    return outputs


def exhaustive(prompt: list[int], max_tokens: int, length_penalty: float) -> list[Beam]:
    beams = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            ended = tokens[-1] == EOS
            if EOS in tokens[:-1] or (not ended and length < max_tokens):
                continue
            total = sum(distribution((*prompt, *tokens[:i]))[tokens[i]] for i in range(length))
            beams.append(Beam(token_ids=list(tokens), cumulative_logprob=total, finished=ended))
    return sorted(beams, key=lambda beam: -beam.score(length_penalty))


@pytest.mark.parametrize("length_penalty", [10.1, -600, 1e308, float("nan"), float("inf")])
def test_a_length_penalty_beyond_what_floats_hold_is_refused(length_penalty: float) -> None:
    with pytest.raises(InvalidRequestError, match="length_penalty: must be a number from -10 to 10") as caught:
        BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=length_penalty)
    assert caught.value.param == "length_penalty"


@pytest.mark.parametrize("length_penalty", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("prompt", [[0], [1, 2], [2, 2, 1]])
def test_a_wide_beam_finds_the_best_answer(prompt: list[int], length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=10, max_tokens=3, length_penalty=length_penalty)
    (found,) = beam_search(generate, [prompt], params, [EOS], 100)
    expected = exhaustive(prompt, 3, length_penalty)
    assert found[0].token_ids == expected[0].token_ids
    assert found[0].cumulative_logprob == pytest.approx(expected[0].cumulative_logprob)


def test_prompts_are_searched_together_as_alone() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    prompts = [[0], [1], [2, 1]]
    together = beam_search(generate, prompts, params, [EOS], 100)
    assert together == [beam_search(generate, [prompt], params, [EOS], 100)[0] for prompt in prompts]
    assert all(len(beams) == 2 for beams in together)


def test_width_one_is_greedy_without_eos() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True)
    (found,) = beam_search(generate, [[1]], params, [EOS], 100)
    tokens = [1]
    for _ in range(5):
        values = distribution(tuple(tokens))
        tokens.append(values.index(max(values)))
    assert found[0].token_ids == tokens[1:]


def test_the_context_ends_the_search() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
    (found,) = beam_search(generate, [[1, 2]], params, [EOS], 6)
    assert [len(beam.token_ids) for beam in found] == [4, 4]


def test_refusals() -> None:
    with pytest.raises(InvalidRequestError, match="beam_width: must be an integer from 1 to 10, got 11"):
        BeamSearchParams(beam_width=11, max_tokens=1)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        BeamSearchParams(beam_width=1, max_tokens=0)
