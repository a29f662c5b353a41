"""Draws of tokens on CPU, and by the reference, against what the filters say in words."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import MASKS, VOCABS, broken, cases, excluded, mistakes

from quire.kernels.dispatch import forced_backend
from quire.kernels.sampling import Draws, draw_tokens, exclude_tokens, likeliest_tokens


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_what_the_filters_say(backend: str, vocab: int) -> None:
    with forced_backend(backend):
        assert mistakes(vocab) == []


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 511, 1024, 5000])
def test_the_likeliest_is_the_first_of_the_highest(backend: str, vocab: int) -> None:
    """As `argmax` says, ties, infinities and NaN included, on whatever side of a block they are."""
    generator = torch.Generator().manual_seed(vocab)
    rows = [torch.randint(0, 9, (64, vocab), generator=generator).float(), torch.full((1, vocab), -torch.inf)]
    rows += [torch.zeros(2, vocab).copysign(torch.randn(2, vocab, generator=generator))]  # 0.0 is no more than -0.0
    for special in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(8, vocab, generator=generator)
        places = torch.randint(0, vocab, (8, 3), generator=generator)
        rows.append(row.scatter(1, places, special))
    logits = torch.cat(rows)
    wide = torch.full((len(logits), vocab + 3), torch.nan)
    wide[:, 1 : vocab + 1] = logits
    with forced_backend(backend):
        assert torch.equal(likeliest_tokens(logits), logits.argmax(dim=-1))
        assert torch.equal(likeliest_tokens(wide[:, 1 : vocab + 1]), logits.argmax(dim=-1))
        assert likeliest_tokens(logits[:0]).shape == (0,)


def plain(num_rows: int, **changes: float) -> Draws:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "numbers": 0.5, **changes}
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    return Draws(*(torch.full((num_rows,), v, dtype=d) for v, d in zip(values.values(), dtypes, strict=True)))


def test_a_row_does_not_depend_on_its_batch_nor_on_where_it_lies() -> None:
    logits, draws = cases(1000)
    together = draw_tokens(logits, draws)
    wide = torch.full((len(logits), 1003), torch.nan)
    wide[:, 1:1001] = logits
    assert torch.equal(draw_tokens(wide[:, 1:1001], draws), together)
    for i in range(0, len(logits), 97):
        alone = draw_tokens(logits[i : i + 1], Draws(*(values[i : i + 1] for values in draws)))
        assert alone[0] == together[i]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_token_where_the_running_sum_passes_the_number(backend: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]).log().expand(7, -1)
    numbers = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, 1.0 - 2.0**-53], dtype=torch.float64)
    with forced_backend(backend):
        assert draw_tokens(logits, plain(7)._replace(numbers=numbers)).tolist() == [1, 1, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_broken_rows_are_taken_as_argmax_takes_them(backend: str) -> None:
    with forced_backend(backend):
        drawn = broken().tolist()
    assert [drawn[row] for row in (1, 2, 5, 6, 7)] == [40, 40, 0, 0, 0]
    with forced_backend("reference"):
        assert drawn == broken().tolist()


def test_a_min_p_above_1_keeps_the_likeliest() -> None:
    assert draw_tokens(torch.tensor([[-torch.inf, 1.0, 2.0]]), plain(1, min_p=1.5)).tolist() == [2]


def test_nothing_is_drawn_from_no_rows_and_nothing_is_modified() -> None:
    assert draw_tokens(torch.empty(0, 10), plain(0)).shape == (0,)
    logits, draws = cases(256)
    before = logits.clone(), [values.clone() for values in draws]
    draw_tokens(logits, draws)
    assert torch.equal(logits, before[0])
    assert all(torch.equal(now, then) for now, then in zip(draws, before[1], strict=True))


def test_wrong_arguments_are_refused() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"logits must be \[n, vocab\] with contiguous rows, got \[8\]"):
        draw_tokens(logits[0], plain(2))
    with pytest.raises(TypeError, match=r"logits must be float32, got torch\.float64"):
        draw_tokens(logits.double(), plain(2))
    with pytest.raises(ValueError, match=r"logits must be \[n, vocab\] with contiguous rows, got \[8, 2\]"):
        likeliest_tokens(logits.T)
    with pytest.raises(ValueError, match=r"temperature must be \[2\], contiguous and on cpu, got \[3\] on cpu"):
        draw_tokens(logits, plain(3))
    with pytest.raises(TypeError, match=r"top_k must be torch\.int32, got torch\.int64"):
        draw_tokens(logits, plain(2)._replace(top_k=torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize(("vocab", "num_words"), MASKS)
def test_masks_are_those_of_the_reference(vocab: int, num_words: int) -> None:
    got = excluded(vocab, num_words)
    with forced_backend("reference"):
        assert torch.equal(got, excluded(vocab, num_words))


def test_a_mask_by_hand() -> None:
    logits = torch.arange(70.0).repeat(2, 1)
    exclude_tokens(logits, torch.tensor([1]), torch.tensor([[0b101, -(2**31)]], dtype=torch.int32))
    assert logits[0].tolist() == list(range(70))
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [0, 2, 63]


def test_wrong_masks_are_refused() -> None:
    logits, indices, allowed = (
        torch.zeros(2, 8),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match=r"indices must be \[2\], contiguous and on cpu, got \[1\] on cpu"):
        exclude_tokens(logits, indices, allowed.repeat(2, 1))
    with pytest.raises(TypeError, match=r"allowed must be torch\.int32, got torch\.int64"):
        exclude_tokens(logits, indices, allowed.long())
    with pytest.raises(TypeError, match=r"indices must be torch\.int64, got torch\.int32"):
        exclude_tokens(logits, indices.int(), allowed)
