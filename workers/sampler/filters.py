"""Top-k, top-p and min-p: which tokens a row may still choose from.

Each takes scores [n, vocab] float32 (logits over temperature; excluded tokens are -inf) and excludes more tokens in
place. A row is filtered by nothing but its own scores, and none of the filters excludes its likeliest token.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.outputs import FloatArray, IntArray

T = TypeVar("T", float, Tensor)

_NUM_PEAKED = 128  # the nucleus of nearly every row of a language model is among so many of its likeliest tokens
_MIN_ROWS = 4  # fewer are sorted in less time than it takes to see whether that can be spared


def keep_top_k(scores: Tensor, top_k: IntArray) -> None:
    """Keep the k highest scores, and those equal to the k-th. 0 keeps all."""
    used = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]))
    if len(used) == 0:
        return
    highest = _rows_of(scores, used).topk(int(top_k[used].max()), dim=-1).values
    kth = torch.from_numpy(top_k[used].astype(np.int64) - 1).to(scores.device)
    thresholds = torch.full((scores.shape[0], 1), -torch.inf, device=scores.device)
    thresholds[torch.from_numpy(used).to(scores.device)] = highest.gather(1, kth[:, None])
    scores.masked_fill_(scores < thresholds, -torch.inf)


def keep_top_p(scores: Tensor, top_p: FloatArray) -> None:
    """Keep the likeliest tokens until their mass reaches p, with the token that crosses it. 1 keeps all.

    A token stays when the tokens before it, by probability and then by id, have a mass below p.
    """
    used = np.flatnonzero(top_p < 1.0)
    if len(used) == 0:
        return
    selected = _rows_of(scores, used)
    probs = torch.softmax(selected, dim=-1)
    limits = torch.from_numpy(top_p[used].astype(np.float64)).to(scores.device)[:, None]
    threshold, num_ties = _nucleus(probs, limits)
    selected.masked_fill_(probs < threshold, -torch.inf)
    (partly,) = torch.nonzero(num_ties[:, 0] >= 0, as_tuple=True)
    if len(partly):  # of equal tokens at the border, those with the lowest ids
        at_threshold = probs[partly] == threshold[partly]
        excess = at_threshold & (at_threshold.cumsum(dim=-1) > num_ties[partly])
        selected[partly] = selected[partly].masked_fill_(excess, -torch.inf)
    if selected is not scores:
        scores[torch.from_numpy(used).to(scores.device)] = selected


def keep_min_p(scores: Tensor, min_p: FloatArray) -> None:
    """Keep tokens whose probability is at least min_p times that of the likeliest. 0 keeps all."""
    used = np.flatnonzero(min_p > 0.0)
    if len(used) == 0:
        return
    ratio = torch.from_numpy(np.log(min_p[used])).to(scores.device)
    selected = _rows_of(scores, used)
    floor = selected.amax(dim=-1, keepdim=True) + ratio[:, None]
    selected.masked_fill_(selected < floor, -torch.inf)
    if selected is not scores:
        scores[torch.from_numpy(used).to(scores.device)] = selected


def _rows_of(scores: Tensor, used: npt.NDArray[np.intp]) -> Tensor:
    """`scores` itself where all of its rows are used, else a copy of those that are."""
    if len(used) == scores.shape[0]:
        return scores
    return scores.index_select(0, torch.from_numpy(used).to(scores.device))


def _nucleus(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Where top-p cuts: the probability of the last token that it keeps, and how many of that probability it keeps.

    probs [r, vocab] float32, top_p [r, 1] float64. Returns [r, 1] float32 and [r, 1] int64, which is -1 where all of
    them stay. Few rows need more than their likeliest tokens to reach p, and only those are sorted.
    """
    num_rows, vocab_size = probs.shape
    on_cpu = probs.device.type == "cpu"
    if on_cpu and num_rows < _MIN_ROWS:
        return _nucleus_by_row(probs, top_p)
    threshold, num_ties, enough = _cut(probs.topk(min(_NUM_PEAKED, vocab_size), dim=-1).values, top_p, vocab_size)
    (flat,) = torch.nonzero(~enough[:, 0], as_tuple=True)
    if vocab_size > _NUM_PEAKED and len(flat):
        if on_cpu:
            threshold[flat], num_ties[flat] = _nucleus_by_row(probs[flat], top_p[flat])
        else:
            descending = probs[flat].sort(dim=-1, descending=True).values
            threshold[flat], num_ties[flat], _ = _cut(descending, top_p[flat], vocab_size)
    return threshold, num_ties


def _cut(descending: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two results of `_nucleus` from the highest probabilities of each row, and whether these were enough."""
    mass = descending.cumsum(dim=-1, dtype=torch.float64)
    num_candidates = (descending > _negligible(top_p, vocab_size)).sum(dim=-1, keepdim=True)
    num_kept = torch.minimum((mass < top_p).sum(dim=-1, keepdim=True) + 1, num_candidates)
    threshold = descending.gather(1, num_kept - 1)
    num_above = (descending > threshold).sum(dim=-1, keepdim=True)
    num_at = (descending == threshold).sum(dim=-1, keepdim=True)
    num_wanted = num_kept - num_above
    enough = (mass[:, -1:] >= top_p) & (descending[:, -1:] < threshold)
    return threshold, torch.where(num_wanted < num_at, num_wanted, -1), enough


def _nucleus_by_row(probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """`_nucleus` on CPU, of rows that are sorted one by one: NumPy does that ten times as fast as torch."""
    threshold, num_ties = torch.empty_like(top_p, dtype=torch.float32), torch.full_like(top_p, -1, dtype=torch.int64)
    for row, (row_probs, limit) in enumerate(zip(probs.numpy(), top_p[:, 0].tolist(), strict=True)):
        ascending = np.sort(row_probs[row_probs > _negligible(limit, len(row_probs))])
        mass = np.cumsum(ascending[::-1], dtype=np.float64)
        num_kept = min(int(np.searchsorted(mass, limit, side="left")) + 1, len(ascending))
        last = ascending[-num_kept]
        first_at, end_at = np.searchsorted(ascending, last, side="left"), np.searchsorted(ascending, last, side="right")
        threshold[row] = float(last)
        num_wanted = num_kept - (len(ascending) - int(end_at))
        if num_wanted < end_at - first_at:
            num_ties[row] = num_wanted
    return threshold, num_ties


def _negligible(top_p: T, vocab_size: int) -> T:
    """Tokens of at most (1 - p) / vocab each have a mass of at most 1 - p together: none of them is in the nucleus.

    Also where rounding keeps the mass of all others below p.
    """
    return (1.0 - top_p) / vocab_size * 0.99
