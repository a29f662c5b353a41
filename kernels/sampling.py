"""From logits to tokens: masks of what is allowed, then the likeliest, or one that is drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import backend_for


class Draws(NamedTuple):
    """How the token of each row is drawn: [n] each, contiguous, on the device of the logits."""

    temperature: Tensor  # float32; 0 takes the likeliest token, whatever the others say
    top_k: Tensor  # int32; 0 keeps all
    top_p: Tensor  # float32; 1 keeps all
    min_p: Tensor  # float32; 0 keeps all
    numbers: Tensor  # float64 in [0, 1)


DTYPES = dict(
    zip(Draws._fields, (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64), strict=True)
)


def exclude_tokens(logits: Tensor, indices: Tensor, allowed: Tensor) -> None:
    """Make -inf what a mask does not allow, in place; so are tokens beyond its end.

    Args:
        logits: [n, vocab] float32, rows contiguous. Modified.
        indices: [m] int64, contiguous: the rows that have a mask, each at most once.
        allowed: [m, words] int32, contiguous: token t may stay where bit t % 32 of word t // 32 is set.
    Raises `ValueError` or `TypeError` before anything is written.
    """
    _check_logits(logits)
    if allowed.dim() != 2:
        raise ValueError(f"allowed must be [m, words], got {list(allowed.shape)}")
    _check("indices", indices, torch.int64, allowed.shape[:1], logits.device)
    _check("allowed", allowed, torch.int32, allowed.shape, logits.device)
    backend_for(logits.device).exclude_tokens(logits, indices, allowed)


def likeliest_tokens(logits: Tensor) -> Tensor:
    """The first token with the highest logit of each row, or the first with NaN if there is one.

    logits: [n, vocab] float32, rows contiguous. Returns [n] int64, a new tensor. Does not wait for the device.
    Raises `ValueError` or `TypeError` before anything runs.
    """
    _check_logits(logits)
    return backend_for(logits.device).likeliest_tokens(logits)


def draw_tokens(logits: Tensor, draws: Draws) -> Tensor:
    """One token of each row. Does not wait for the device, sorts nothing, and modifies nothing.

    A logit's score is its distance from the highest of the row, divided by the temperature; its weight is
    exp(score). Of the tokens are kept, one filter after the other:

        top_k   the k highest scores, and those equal to the k-th
        top_p   the likeliest of what is left until their mass reaches p of its mass, with the one that crosses it;
                of equal ones those with the lowest ids
        min_p   weights of at least min_p times the highest

    The token drawn is the one at which the running sum of the kept weights, in vocabulary order, passes `number` times
    their sum. A row with NaN gives the first of these, one whose highest logit is infinite the first such: its
    distribution is broken. What a row gets does not depend on the others.

    logits: [n, vocab] float32, rows contiguous; excluded tokens are -inf. Returns [n] int64, a new tensor.
    Raises `ValueError` or `TypeError` before anything runs.
    """
    _check_logits(logits)
    for name, values in draws._asdict().items():
        _check(name, values, DTYPES[name], logits.shape[:1], logits.device)
    return backend_for(logits.device).draw_tokens(logits, draws)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [n, vocab] with contiguous rows, got {list(logits.shape)}")
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")


def _check(name: str, values: Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if values.shape != shape or not values.is_contiguous() or values.device != device:
        raise ValueError(
            f"{name} must be {list(shape)}, contiguous and on {device}, got {list(values.shape)} on {values.device}"
        )
    if values.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {values.dtype}")
