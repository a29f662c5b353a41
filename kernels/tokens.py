"""Tokens that stay on the device: a step writes down what its rows sample, and the next one reads it there, before any
host has seen it.

What a step reads in place of such a token is a *reference*, -(row + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import backend_for


def resolve_tokens(token_ids: Tensor, last_token_ids: Tensor) -> Tensor:
    """[n] int64 with references -> the tokens, a new tensor. Does not wait for the device.

    last_token_ids: [rows] int64, the last token that each row has sampled; contiguous, as is `token_ids`.
    References are to rows that there are, or give any token. Raises `ValueError` or `TypeError` before anything runs.
    """
    _check(token_ids=token_ids, last_token_ids=last_token_ids)
    return backend_for(token_ids.device).resolve_tokens(token_ids, last_token_ids)


def keep_tokens(last_token_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """`rows` [n] have sampled `token_ids` [n], both int64 and contiguous: written to `last_token_ids` [rows] int64.

    Rows are some that there are; one that is given more than once keeps one of its tokens. Does not wait for the
    device. Raises `ValueError` or `TypeError` before anything is written.
    """
    _check(last_token_ids=last_token_ids, rows=rows, token_ids=token_ids)
    if rows.shape != token_ids.shape:
        raise ValueError(f"there must be a token for each row, got {len(token_ids)} for {len(rows)}")
    backend_for(token_ids.device).keep_tokens(last_token_ids, rows, token_ids)


def _check(**given: Tensor) -> None:
    devices = {tensor.device for tensor in given.values()}
    for name, tensor in given.items():
        if tensor.dim() != 1 or not tensor.is_contiguous() or len(devices) > 1:
            where = " and ".join(sorted(map(str, devices)))
            raise ValueError(f"{name} must be [n], contiguous, on one device, got {list(tensor.shape)} on {where}")
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
