"""Top-k, top-p and min-p: which tokens a row may still choose from.

Each takes scores [n, vocab] float32 (logits over temperature; excluded tokens are -inf) and excludes more tokens in
place. A row is filtered by nothing but its own scores, and none of the filters excludes its likeliest token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.engine.outputs import FloatArray, IntArray


def keep_top_k(scores: Tensor, top_k: IntArray) -> None:
    """Keep the k highest scores, and those equal to the k-th. 0 keeps all."""
    vocab_size = scores.shape[1]
    for row in np.flatnonzero((top_k > 0) & (top_k < vocab_size)).tolist():
        threshold = scores[row].topk(int(top_k[row])).values[-1]
        scores[row].masked_fill_(scores[row] < threshold, -torch.inf)


def keep_top_p(scores: Tensor, top_p: FloatArray) -> None:
    """Keep the likeliest tokens until their mass reaches p, with the token that crosses it. 1 keeps all.

    A token stays when the tokens before it, by probability and then by id, have a mass below p.
    """
    for row in np.flatnonzero(top_p < 1.0).tolist():
        probs = torch.softmax(scores[row], dim=-1)
        num_kept, threshold = _nucleus(probs, float(top_p[row]))
        scores[row].masked_fill_(probs < threshold, -torch.inf)
        at_threshold = torch.nonzero(probs == threshold)[:, 0]
        num_above = int((probs > threshold).sum())
        scores[row, at_threshold[num_kept - num_above :]] = -torch.inf


def keep_min_p(scores: Tensor, min_p: FloatArray) -> None:
    """Keep tokens whose probability is at least min_p times that of the likeliest. 0 keeps all."""
    used = np.flatnonzero(min_p > 0.0)
    if len(used) == 0:
        return
    rows = torch.from_numpy(used).to(scores.device)
    ratio = torch.from_numpy(np.log(min_p[used])).to(scores.device)
    selected = scores[rows]
    floor = selected.amax(dim=-1, keepdim=True) + ratio[:, None]
    scores[rows] = selected.masked_fill_(selected < floor, -torch.inf)


def _nucleus(probs: Tensor, top_p: float) -> tuple[int, float]:
    """How many tokens top-p keeps, and the probability of the last of them. `probs` is [vocab] float32.

    Tokens of at most (1 - p) / vocab each have a mass of at most 1 - p together, so none of them can be in the nucleus:
    leaving them out first makes the sort short.
    """
    candidates: npt.NDArray[np.float32] = probs[probs > (1.0 - top_p) / len(probs) * 0.99].cpu().numpy()
    descending = np.sort(candidates)[::-1]
    mass = np.cumsum(descending, dtype=np.float64)
    num_kept = min(int(np.searchsorted(mass, top_p, side="left")) + 1, len(descending))
    return num_kept, float(descending[num_kept - 1])
