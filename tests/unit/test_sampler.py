"""The sampler draws from exactly the distribution that the parameters define, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sampler_helpers import sampled

from quire.engine.outputs import NewRow
from quire.engine.sampling_params import SamplingParams
from quire.workers.sampler import SamplerOutput, SamplingRows
from quire.workers.sampler.rng import uniform

VOCAB = 40
EOS = 0
NUM_DRAWS = 10_000


def new_row(row: int, params: SamplingParams, **changes: object) -> NewRow:
    fields = {
        "row": row,
        "request_id": f"request-{row}",
        "token_ids": [0],
        "num_prompt_tokens": 1,
        "sampling_params": params,
        "seed": 1000 + row,
        "choice_index": 0,
        "eos_token_ids": (),
        "block_ids": ([],),
    }
    return NewRow(**{**fields, **changes})  # type: ignore[arg-type]


def rows_of(*params: SamplingParams, vocab_size: int = VOCAB, **changes: object) -> SamplingRows:
    rows = SamplingRows(len(params), vocab_size)
    for row, one in enumerate(params):
        rows.set_row(new_row(row, one, **changes))
    return rows


def draw(logits: torch.Tensor, params: SamplingParams, num_draws: int = 2000) -> np.ndarray:
    """Tokens sampled for one request at `num_draws` positions."""
    rows = rows_of(params, vocab_size=len(logits))
    zeros, positions = np.zeros(num_draws), np.arange(num_draws)
    return sampled(rows, logits.expand(num_draws, -1), zeros, positions).token_ids.numpy()


def draw_after(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Tokens sampled at one position, with as many seeds."""
    rows = SamplingRows(NUM_DRAWS, len(logits))
    for row in range(NUM_DRAWS):
        rows.set_row(new_row(row, params, num_prompt_tokens=len(prompt), eos_token_ids=(EOS,)))
    tokens = np.broadcast_to(np.array(prompt + output, np.int32), (NUM_DRAWS, len(prompt) + len(output)))
    positions = np.full(NUM_DRAWS, tokens.shape[1])
    return sampled(rows, logits.expand(NUM_DRAWS, -1), np.arange(NUM_DRAWS), positions, tokens).token_ids.numpy()


def constrained(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> npt.NDArray[np.float64]:
    """The logits after everything that comes before the temperature, one token at a time."""
    scores: list[float] = logits.double().tolist()
    for token, score in enumerate(scores):
        score += (params.logit_bias or {}).get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = -np.inf
        for word in params.bad_words_token_ids:
            before = list(word[:-1])
            if token == word[-1] and output[len(output) - len(before) :] == before:
                score = -np.inf
        if len(output) < params.min_tokens and token in (EOS, *params.stop_token_ids):
            score = -np.inf
        if token in prompt + output:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        scores[token] = score
    return np.array(scores)


def distribution(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> np.ndarray:
    """What the parameters say in words, in float64, one token at a time."""
    scores = constrained(logits, params, list(prompt), list(output)) / params.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if params.top_k:
        probs[probs < probs[order[min(params.top_k, len(order)) - 1]]] = 0
        probs /= probs.sum()
    mass = 0.0
    for token in order:
        before, mass = mass, mass + probs[token]
        if before >= params.top_p:
            probs[token] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def assert_drawn_from(tokens: np.ndarray, probs: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0, "a token was drawn that the filters exclude"
    expected = probs * len(tokens)
    common = expected >= 5
    rare_count, rare_expected = counts[~common].sum(), expected[~common].sum()
    chi_square = (((counts - expected) ** 2)[common] / expected[common]).sum()
    if rare_expected > 0:
        chi_square += (rare_count - rare_expected) ** 2 / max(rare_expected, 1.0)
    freedom = max(int(common.sum()) - 1, 1)
    # Four standard deviations above the mean of the chi-square distribution: one seed in some ten thousand would fail.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=VOCAB + 7),
        SamplingParams(top_p=0.8),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=0.999),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=12, top_p=0.7),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
    ids=lambda params: f"T{params.temperature}-k{params.top_k}-p{params.top_p}-min_p{params.min_p}",
)
def test_draws_follow_the_distribution(logits: torch.Tensor, params: SamplingParams) -> None:
    assert_drawn_from(draw(logits, params, NUM_DRAWS), distribution(logits, params))


PROMPT, OUTPUT = [1, 2, 3, 3, 0], [4, 5, 5, 1, 5, 6]  # likely and unlikely tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.4},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"logit_bias": {0: 3.0, 5: -2.0, 39: 4.5}},
        {"allowed_token_ids": (1, 5, 8, 20, 21, 30)},
        {"bad_words_token_ids": ((4,), (6, 9), (5, 6, 10), (5, 5, 11), (1, 2, 3, 7))},
        {"min_tokens": 7, "stop_token_ids": (6, 9)},
        {"min_tokens": 6, "stop_token_ids": (6, 9)},
        {"allowed_token_ids": (1, 5, 8, 20), "bad_words_token_ids": ((5,),), "logit_bias": {20: 2.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {5: 2.0}},
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.2,
            "bad_words_token_ids": ((6, 9),),
            "min_tokens": 9,
            "temperature": 1.4,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.02,
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_draws_after_tokens_follow_the_distribution(logits: torch.Tensor, fields: dict[str, Any]) -> None:
    """Each of the filters that look at the tokens before, or at single ids."""
    params = SamplingParams(**fields, max_tokens=20)
    probs = distribution(logits, params, PROMPT, OUTPUT)
    plain = distribution(logits, SamplingParams(temperature=params.temperature))
    if fields.get("min_tokens") != 6:  # of which there are as many already
        assert np.abs(probs - plain).max() > 0.01, "the parameters change nothing"
    assert_drawn_from(draw_after(logits, params, PROMPT, OUTPUT), probs)


def test_draws_over_a_vocabulary_of_several_blocks() -> None:
    """The running sum is taken in blocks of 256 tokens; every token of every block must keep its share."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    params = SamplingParams()
    assert_drawn_from(draw(logits, params, 20_000), distribution(logits, params))


def test_top_k_keeps_ties_and_top_p_breaks_them_by_token_id() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 3.0, 3.0, 0.0])
    assert set(draw(logits, SamplingParams(top_k=2))) == {1, 3, 4}
    # Three tokens of about 0.30 each; 0.5 is crossed by the second of them.
    assert set(draw(logits, SamplingParams(top_p=0.5))) == {1, 3}
    uniform = torch.zeros(10)
    assert set(draw(uniform, SamplingParams(top_p=0.45))) == {0, 1, 2, 3, 4}


def test_tiny_temperature_is_the_likeliest_token(logits: torch.Tensor) -> None:
    assert set(draw(logits * 100, SamplingParams(temperature=1e-42), 100)) == {int(logits.argmax())}


def test_excluded_logits_are_never_drawn(logits: torch.Tensor) -> None:
    logits[::2] = -torch.inf
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=30), SamplingParams(min_p=0.001)):
        assert (draw(logits, params) % 2 == 1).all()


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=3),
    SamplingParams(temperature=0.7, top_p=0.8, logprobs=4),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=0),
    SamplingParams(min_p=0.2, frequency_penalty=0.5),
    SamplingParams(temperature=0, logit_bias={7: 100.0}),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, presence_penalty=-1.0),
    SamplingParams(allowed_token_ids=tuple(range(5, 25))),
    SamplingParams(temperature=0, bad_words_token_ids=tuple((a, b) for a in range(VOCAB) for b in (3, 7, 9))),
    SamplingParams(bad_words_token_ids=((1,), (2,)), allowed_token_ids=(1, 2, 3, 4, 5), top_p=0.9),
]


def sample_rows(order: list[int], logits: torch.Tensor, tokens: np.ndarray, position: int) -> SamplerOutput:
    return sampled(rows_of(*MIXED), logits[order], order, [position] * len(order), tokens)


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(11)
    tokens = np.random.default_rng(2).integers(0, VOCAB, (len(MIXED), 64)).astype(np.int32)
    for position in range(5, 60, 6):
        logits = torch.randn(len(MIXED), VOCAB, generator=generator) * 3
        alone = [int(sample_rows([row], logits, tokens, position).token_ids[0]) for row in range(len(MIXED))]
        for order in (list(range(11)), list(range(10, -1, -1)), [3, 0, 5], [1, 4, 7, 2], [0, 9], [8, 4]):
            assert sample_rows(order, logits, tokens, position).token_ids.tolist() == [alone[row] for row in order]


def test_sampling_modifies_nothing() -> None:
    tokens = np.random.default_rng(2).integers(0, VOCAB, (len(MIXED), 64)).astype(np.int32)
    logits = torch.randn(len(MIXED), VOCAB, generator=torch.Generator().manual_seed(1))
    before, tokens_before = logits.clone(), tokens.copy()
    sample_rows(list(range(len(MIXED))), logits, tokens, 30)
    assert torch.equal(logits, before)
    assert (tokens == tokens_before).all()


def test_seed_choice_and_position_each_change_the_draws(logits: torch.Tensor) -> None:
    rows = SamplingRows(3, VOCAB)
    rows.set_row(new_row(0, SamplingParams(), seed=5))
    rows.set_row(new_row(1, SamplingParams(), seed=6))
    rows.set_row(new_row(2, SamplingParams(), seed=5, choice_index=1))

    def tokens(row: int, first: int) -> list[int]:
        positions = np.arange(first, first + 50)
        return sampled(rows, logits.expand(50, -1), np.full(50, row), positions).token_ids.tolist()

    assert tokens(0, 0) == tokens(0, 0)
    assert tokens(0, 0)[10:] == tokens(0, 10)[:40]
    assert tokens(0, 0) != tokens(1, 0)
    assert tokens(0, 0) != tokens(2, 0)


def test_negative_and_largest_seeds_are_seeds(logits: torch.Tensor) -> None:
    rows = SamplingRows(2, VOCAB)
    rows.set_row(new_row(0, SamplingParams(), seed=-(2**63)))
    rows.set_row(new_row(1, SamplingParams(), seed=2**63 - 1))
    draws = rows.draws(np.array([0, 1], np.int32), np.array([4, 4], np.int32))
    assert draws is not None
    seeds = np.array([2**63, 2**63 - 1], np.uint64)
    assert (draws.numbers == uniform(seeds, np.zeros(2, np.int32), np.full(2, 4), 0)).all()
    assert sampled(rows, logits.expand(2, -1), [0, 1], [4, 4]).token_ids.shape == (2,)


def test_wrong_logits_are_refused(logits: torch.Tensor) -> None:
    rows = rows_of(SamplingParams())
    with pytest.raises(ValueError, match=r"must be \[1, vocab\] float32, got \[2, 40\]"):
        sampled(rows, logits.expand(2, -1), [0], [1])
    with pytest.raises(ValueError, match="float32"):
        sampled(rows, logits[None].double(), [0], [1])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_hurts_no_other(logits: torch.Tensor, broken: float) -> None:
    rows = rows_of(*[SamplingParams(temperature=1.0, top_p=0.9)] * 3)
    whole = logits.repeat(3, 1)
    expected = sampled(rows, whole, range(3), [5] * 3).token_ids.tolist()
    whole[1] = broken
    tokens = sampled(rows, whole, range(3), [5] * 3).token_ids.tolist()
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=0),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(min_tokens=2, stop_token_ids=[4]),
        SamplingParams(allowed_token_ids=[1, 2]),
        SamplingParams(bad_words_token_ids=[[1]]),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(repetition_penalty=1.1),
    ],
    ids=["logprobs", "logit_bias", "min_tokens", "allowed", "bad_words", "presence", "repetition"],
)
def test_plain_rows_ask_for_nothing(params: SamplingParams) -> None:
    """Whatever the rows beside them ask for, or asked for once."""
    rows = rows_of(SamplingParams(), params, SamplingParams())
    assert not rows.is_plain(np.array([0, 1]))
    assert rows.is_plain(np.array([0, 2]))


def test_ignored_eos_is_not_forbidden_by_min_tokens() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0] + [0.0] * (VOCAB - 3)])
    for ignore_eos, expected in ((True, 1), (False, 2)):
        params = SamplingParams(temperature=0.0, min_tokens=4, ignore_eos=ignore_eos)
        rows = rows_of(params, eos_token_ids=(1,))
        assert sampled(rows, logits, [0], [1]).token_ids.tolist() == [expected]
