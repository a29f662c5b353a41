"""Top-k and top-p over a whole batch are, bit by bit, what they are row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.outputs import NewRow
from quire.engine.sampling_params import SamplingParams
from quire.workers.sampler import SamplingRows, sample
from quire.workers.sampler.filters import keep_top_k, keep_top_p

VOCAB = 1000


def top_k_of_one(scores: Tensor, top_k: int) -> Tensor:
    if not 0 < top_k < len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)


def top_p_of_one(scores: Tensor, top_p: float) -> Tensor:
    """One token after the other, by probability and then by id, until their mass reaches p."""
    probs = torch.softmax(scores, dim=-1).numpy()
    kept, mass = np.zeros(len(probs), bool), 0.0
    for token_id in np.lexsort((np.arange(len(probs)), -probs)).tolist():
        # Far below what the nucleus may hold: only rounding could keep the mass of the others from reaching p.
        if mass >= top_p or probs[token_id] <= (1.0 - top_p) / len(probs) * 0.99:
            break
        kept[token_id] = True
        mass += float(probs[token_id])
    return torch.where(torch.from_numpy(kept), scores, -torch.inf)


def many_rows() -> Tensor:
    """Peaked and flat rows, rows of ties, and rows in which other filters left little."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(VOCAB, generator=generator) * peak for peak in (0.0, 0.1, 1.0, 2.0, 4.0, 10.0, 60.0)]
    rows += [torch.randint(0, levels, (VOCAB,), generator=generator).float() for levels in (2, 3, 8)]
    few = torch.full((VOCAB,), -torch.inf)
    few[[3, 500, 999]] = torch.tensor([0.5, 0.5, 0.1])
    one = torch.full((VOCAB,), -torch.inf)
    one[77] = 0.0
    scores = torch.stack([*rows, few, one])
    return scores - scores.amax(dim=-1, keepdim=True)


@pytest.mark.parametrize("top_k", [1, 2, 50, 129, 999, 1000, 5000])
def test_top_k(top_k: int) -> None:
    scores = many_rows()
    expected = torch.stack([top_k_of_one(row, top_k) for row in scores])
    keep_top_k(scores, np.full(len(scores), top_k, np.int32))
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999])
def test_top_p(top_p: float) -> None:
    scores = many_rows()
    exact = float(np.float32(top_p))
    expected = torch.stack([top_p_of_one(row, exact) for row in scores])
    alone = [row[None].clone() for row in scores]
    keep_top_p(scores, np.full(len(scores), top_p, np.float32))
    for i, (row, wanted) in enumerate(zip(scores, expected, strict=True)):
        assert torch.equal(row, wanted), f"row {i}"
        keep_top_p(alone[i], np.full(1, top_p, np.float32))
        assert torch.equal(alone[i][0], wanted), f"row {i}, alone"


def test_rows_of_a_mixed_batch_are_filtered_by_their_own_values() -> None:
    generator = np.random.default_rng(1)
    scores = many_rows().repeat(4, 1)
    top_k = generator.choice(np.array([0, 1, 7, 300, VOCAB], np.int32), len(scores))
    top_p = generator.choice(np.array([1.0, 0.3, 0.95], np.float32), len(scores))
    expected = [
        row if p == 1 else top_p_of_one(row, float(p))
        for row, p in zip((top_k_of_one(row, k) for row, k in zip(scores, top_k, strict=True)), top_p, strict=True)
    ]
    keep_top_k(scores, top_k)
    keep_top_p(scores, top_p)
    assert torch.equal(scores, torch.stack(expected))


def test_rows_without_filters_are_left_as_they_are() -> None:
    scores = many_rows()
    before = scores.clone()
    off_k, off_p = np.zeros(len(scores), np.int32), np.ones(len(scores), np.float32)
    keep_top_k(scores, off_k)
    keep_top_p(scores, off_p)
    assert torch.equal(scores, before)
    off_k[3], off_p[4] = 5, 0.5
    keep_top_k(scores, off_k)
    keep_top_p(scores, off_p)
    others = [i for i in range(len(scores)) if i not in (3, 4)]
    assert torch.equal(scores[others], before[others])
    assert not torch.equal(scores[[3, 4]], before[[3, 4]])


def test_greedy_rows_are_not_disturbed_by_filters_of_others() -> None:
    rows = SamplingRows(3, VOCAB)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=3, top_p=0.5), SamplingParams(temperature=0)]
    for row, one in enumerate(params):
        rows.set_row(
            NewRow(
                row=row,
                request_id=str(row),
                token_ids=[0],
                num_prompt_tokens=1,
                sampling_params=one,
                seed=row,
                choice_index=0,
                eos_token_ids=(),
                block_ids=(),
            )
        )
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    batch = rows.gather(np.arange(3, dtype=np.int32), np.full(3, 9, np.int32), np.zeros((3, 10), np.int32))
    token_ids = sample(logits, batch).token_ids
    assert token_ids[[0, 2]].tolist() == logits.argmax(dim=-1)[[0, 2]].tolist()
    assert int(token_ids[1]) in logits[1].topk(3).indices.tolist()
