"""What happens to the logits before a token is picked, by values worked out by hand; logprobs; the random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_helpers import sampled

from quire.engine.outputs import NewRow
from quire.engine.sampling_params import SamplingParams
from quire.workers.sampler import SamplingRows
from quire.workers.sampler.rng import philox4x32, uniform
from quire.workers.sampler.sampler import _process

INF = float("inf")


def rows_with(params: SamplingParams, *, num_prompt_tokens: int = 2, eos: tuple[int, ...] = (), vocab_size: int = 6):
    rows = SamplingRows(1, vocab_size)
    new = NewRow(
        row=0,
        request_id="r",
        token_ids=[],
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=params,
        seed=1,
        choice_index=0,
        eos_token_ids=eos,
        block_ids=([],),
    )
    rows.set_row(new)
    return rows


def processed(rows: SamplingRows, logits: list[float], tokens: list[int]) -> list[float]:
    table = np.array([tokens + [0] * 4], np.int32)
    batch = rows.gather(np.array([0], np.int32), np.array([len(tokens)], np.int32), table)
    return _process(torch.tensor([logits]), batch)[0].tolist()


LOGITS = [1.0, 2.0, -1.0, 0.5, 4.0, -2.0]


def test_presence_penalty_counts_output_tokens_once() -> None:
    rows = rows_with(SamplingParams(presence_penalty=0.5))
    assert processed(rows, LOGITS, [1, 2]) == LOGITS  # the prompt does not count
    assert processed(rows, LOGITS, [1, 2, 4]) == [1.0, 2.0, -1.0, 0.5, 3.5, -2.0]
    assert processed(rows, LOGITS, [1, 2, 4, 4, 0]) == [0.5, 2.0, -1.0, 0.5, 3.5, -2.0]


def test_frequency_penalty_counts_every_output_token() -> None:
    rows = rows_with(SamplingParams(frequency_penalty=0.25))
    assert processed(rows, LOGITS, [4, 4, 4, 4, 0]) == [0.75, 2.0, -1.0, 0.5, 3.5, -2.0]
    rows = rows_with(SamplingParams(frequency_penalty=-0.25))
    assert processed(rows, LOGITS, [4, 4, 4, 4, 0]) == [1.25, 2.0, -1.0, 0.5, 4.5, -2.0]


def test_repetition_penalty_covers_prompt_and_output() -> None:
    rows = rows_with(SamplingParams(repetition_penalty=2.0))
    assert processed(rows, LOGITS, [1, 2]) == [1.0, 1.0, -2.0, 0.5, 4.0, -2.0]
    assert processed(rows, LOGITS, [1, 2, 4, 1]) == [1.0, 1.0, -2.0, 0.5, 2.0, -2.0]


def test_penalties_together_repetition_first() -> None:
    rows = rows_with(SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25))
    assert processed(rows, LOGITS, [1, 2, 4, 4, 2]) == [1.0, 1.0, -2.75, 0.5, 1.0, -2.0]


def test_counts_are_the_same_when_a_row_is_entered_again() -> None:
    """After a preemption the row is set anew and all tokens are counted at once, not one by one."""
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3)
    tokens = np.random.default_rng(0).integers(0, 300, 400).tolist()
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)).tolist()
    stepwise = rows_with(params, vocab_size=300)
    for length in range(2, 400):
        latest = processed(stepwise, logits, tokens[:length])
    assert processed(rows_with(params, vocab_size=300), logits, tokens[:399]) == latest


def test_a_row_taken_over_forgets_the_request_before() -> None:
    rows = rows_with(SamplingParams(presence_penalty=1.0, logit_bias={0: 5.0}, min_tokens=3), eos=(1,))
    assert processed(rows, LOGITS, [0, 0, 4]) == [6.0, -INF, -1.0, 0.5, 3.0, -2.0]
    plain = NewRow(
        row=0,
        request_id="s",
        token_ids=[],
        num_prompt_tokens=2,
        sampling_params=SamplingParams(),
        seed=1,
        choice_index=0,
        eos_token_ids=(1,),
        block_ids=([],),
    )
    rows.set_row(plain)
    assert processed(rows, LOGITS, [0, 0, 4]) == LOGITS


def test_logit_bias_is_added_first_and_ids_beyond_the_vocabulary_have_no_effect() -> None:
    rows = rows_with(SamplingParams(logit_bias={3: -100.0, 0: 1.5, 6: 50.0}))
    assert processed(rows, LOGITS, [1, 2]) == [2.5, 2.0, -1.0, -99.5, 4.0, -2.0]
    rows = rows_with(SamplingParams(logit_bias={0: -3.0}, repetition_penalty=2.0))
    assert processed(rows, LOGITS, [0, 2]) == [-4.0, 2.0, -2.0, 0.5, 4.0, -2.0]


def test_min_tokens_forbids_eos_and_stop_tokens_until_it_is_reached() -> None:
    rows = rows_with(SamplingParams(min_tokens=2, stop_token_ids=(4, 99)), eos=(5,))
    forbidden = [1.0, 2.0, -1.0, 0.5, -INF, -INF]
    assert processed(rows, LOGITS, [0, 0]) == forbidden
    assert processed(rows, LOGITS, [0, 0, 3]) == forbidden
    assert processed(rows, LOGITS, [0, 0, 3, 3]) == LOGITS


def test_min_tokens_wins_over_logit_bias() -> None:
    rows = rows_with(SamplingParams(temperature=0, min_tokens=1, logit_bias={5: 100.0}), eos=(5,))
    assert processed(rows, LOGITS, [0, 0])[5] == -INF
    assert processed(rows, LOGITS, [0, 0, 1])[5] == 98.0


def test_only_allowed_tokens_are_left() -> None:
    rows = rows_with(SamplingParams(allowed_token_ids=(5, 1, 1, 99), logit_bias={1: 1.0, 4: 50.0}))
    assert processed(rows, LOGITS, [0, 0]) == [-INF, 3.0, -INF, -INF, -INF, -2.0]


def test_a_bad_word_of_one_token_is_never_possible() -> None:
    rows = rows_with(SamplingParams(bad_words_token_ids=((4,), (7,)), logit_bias={4: 100.0}))
    for tokens in ([0, 0], [0, 0, 4], [0, 0, 1, 2]):
        assert processed(rows, LOGITS, tokens) == [1.0, 2.0, -1.0, 0.5, -INF, -2.0]


def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others() -> None:
    rows = rows_with(SamplingParams(bad_words_token_ids=((1, 2, 4), (2, 0), (3, 2, 5))))
    assert processed(rows, LOGITS, [0, 0]) == LOGITS
    assert processed(rows, LOGITS, [1, 2]) == LOGITS, "the prompt is no part of a word"
    assert processed(rows, LOGITS, [0, 1, 2]) == [-INF, *LOGITS[1:]], "only what was produced counts"
    assert processed(rows, LOGITS, [0, 0, 1]) == LOGITS
    assert processed(rows, LOGITS, [0, 0, 1, 2]) == [-INF, 2.0, -1.0, 0.5, -INF, -2.0]
    assert processed(rows, LOGITS, [0, 0, 1, 2, 3]) == LOGITS
    assert processed(rows, LOGITS, [0, 0, 1, 3, 2]) == [-INF, 2.0, -1.0, 0.5, 4.0, -INF]


def test_bad_words_do_not_depend_on_when_the_row_was_entered() -> None:
    params = SamplingParams(bad_words_token_ids=((1, 2), (2, 2, 3), (0,)))
    tokens = np.random.default_rng(3).integers(0, 4, 60).tolist()
    stepwise = rows_with(params)
    for length in range(2, 60):
        known = tokens[:length]
        assert processed(stepwise, LOGITS, known) == processed(rows_with(params), LOGITS, known)


def test_where_nothing_allowed_would_be_left_the_other_constraints_give_way() -> None:
    rows = rows_with(SamplingParams(allowed_token_ids=(2, 3), bad_words_token_ids=((2,), (2, 3)), min_tokens=0))
    assert processed(rows, LOGITS, [0, 0]) == [-INF, -INF, -INF, 0.5, -INF, -INF]
    assert processed(rows, LOGITS, [0, 0, 2]) == [-INF, -INF, -1.0, 0.5, -INF, -INF]
    rows = rows_with(SamplingParams(allowed_token_ids=(5,), min_tokens=3), eos=(5,))
    assert processed(rows, LOGITS, [0, 0]) == [-INF] * 5 + [-2.0]


def test_constraints_stand_through_penalties() -> None:
    """A negative penalty raises logits: not those that are impossible."""
    params = SamplingParams(
        allowed_token_ids=(3, 4), repetition_penalty=0.5, presence_penalty=-2.0, bad_words_token_ids=((4,),)
    )
    assert processed(rows_with(params), LOGITS, [0, 1, 4, 3]) == [-INF, -INF, -INF, 3.0, -INF, -INF]


def test_rows_without_constraints_cost_nothing() -> None:
    rows = rows_with(SamplingParams(bad_words_token_ids=((1, 2),)))
    table = np.array([[0, 0, 5]], np.int32)
    batch = rows.gather(np.array([0], np.int32), np.array([3], np.int32), table)
    assert batch.constraints is None
    logits = torch.tensor([LOGITS])
    assert _process(logits, batch) is logits


def test_logprobs_are_exact_and_raw() -> None:
    """Of the model's distribution: no bias, penalty, temperature or filter shows in them."""
    params = [
        SamplingParams(temperature=0, logprobs=2, logit_bias={2: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.1, top_k=1, logprobs=0),
        SamplingParams(temperature=0, logprobs=3, min_tokens=5),
    ]
    rows = SamplingRows(4, 6)
    for row, one in enumerate(params):
        rows.set_row(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=[],
                num_prompt_tokens=1,
                sampling_params=one,
                seed=0,
                choice_index=0,
                eos_token_ids=(4,),
                block_ids=([],),
            )
        )
    logits = torch.tensor([LOGITS] * 4)
    output = sampled(rows, logits, range(4), [1] * 4, np.zeros((4, 1), np.int32))
    assert output.token_ids.tolist() == [2, 4, 4, 1]
    exact = np.array(LOGITS, np.float64)
    exact -= np.log(np.exp(exact).sum())

    logprobs = output.logprobs
    assert logprobs is not None
    assert logprobs.indices.tolist() == [0, 2, 3]
    scores = logprobs.scores
    assert scores.token_ids.tolist() == [[2, 4, 1, 0], [4, 4, 1, 0], [1, 4, 1, 0]]
    assert scores.ranks.tolist() == [5, 1, 2]
    np.testing.assert_allclose(scores.logprobs, exact[scores.token_ids], atol=1e-6, rtol=0)


def test_no_logprobs_when_nobody_asks() -> None:
    rows = rows_with(SamplingParams())
    assert sampled(rows, torch.tensor([LOGITS]), [0], [2]).logprobs is None


def test_more_logprobs_than_tokens() -> None:
    rows = rows_with(SamplingParams(temperature=0, logprobs=20))
    logprobs = sampled(rows, torch.tensor([LOGITS]), [0], [2]).logprobs
    assert logprobs is not None
    assert logprobs.scores.token_ids.tolist() == [[4, 4, 1, 0, 3, 2, 5]]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The published vectors for philox4x32 with 10 rounds (Random123, kat_vectors), each word as an array of two."""
    words = philox4x32(
        tuple(np.full(2, word, np.uint64) for word in counter),  # type: ignore[arg-type]
        tuple(np.full(2, word, np.uint64) for word in key),  # type: ignore[arg-type]
    )
    assert [word.tolist() for word in words] == [[word, word] for word in expected]


def test_uniform_is_the_first_53_bits_of_the_block() -> None:
    zero = np.zeros(1, np.int32)
    (number,) = uniform(np.zeros(1, np.uint64), zero, zero, 0).tolist()
    assert number == (0x6627E8D5 << 21 | 0xE169C58D >> 11) / 2**53
    seeds = np.array([0x299F31D0_A4093822], np.uint64)
    expected = philox4x32(
        tuple(np.array([word], np.uint64) for word in (70_000, 3, 2, 0)),  # type: ignore[arg-type]
        (np.array([0xA4093822], np.uint64), np.array([0x299F31D0], np.uint64)),
    )
    (number,) = uniform(seeds, np.array([3]), np.array([70_000]), 2).tolist()
    assert number == (int(expected[0][0]) << 21 | int(expected[1][0]) >> 11) / 2**53


def test_uniform_numbers_fill_the_interval() -> None:
    """Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded by one seed in a thousand."""
    numbers = np.sort(uniform(np.full(20_000, 9, np.uint64), np.zeros(20_000, np.int32), np.arange(20_000), 0))
    assert numbers[0] >= 0
    assert numbers[-1] < 1
    assert np.abs(numbers - np.arange(20_000) / 20_000).max() < 1.95 / np.sqrt(20_000)
