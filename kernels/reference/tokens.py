"""Reference of what is read and written of tokens on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def resolve_tokens(token_ids: Tensor, last_token_ids: Tensor) -> Tensor:
    """See `tokens.resolve_tokens`."""
    sampled = last_token_ids.index_select(0, (-1 - token_ids).clamp_(0, len(last_token_ids) - 1))
    return torch.where(token_ids < 0, sampled, token_ids)


def keep_tokens(last_token_ids: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """See `tokens.keep_tokens`."""
    last_token_ids.index_copy_(0, rows, token_ids)
