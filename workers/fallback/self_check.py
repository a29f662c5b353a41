"""What can only be seen when a model has weights: that nothing but attention lets tokens know of each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .interface import answering
from .model import FallbackModel
from .probe import refusal

_TOKENS = 6
_CLOSE = 1e-2  # of the largest value: sums in another order, in bfloat16 as well, and far below what any mixing does


def check_tokens_apart(model: FallbackModel, architecture: str) -> None:
    """Run some tokens in two orders with attention replaced by a function of each token alone.

    The tokens of all requests go through the model as one sequence, so a convolution, a recurrent state, or positions
    that are counted instead of read, would mix requests without any error. Raises `ConfigError` when the hidden state
    of a token depends on anything but the token and its position.
    """
    device = next(iter(model.parameters())).device
    tokens = torch.arange(1, _TOKENS + 1, device=device) % model.vocab_size
    positions = torch.arange(_TOKENS, device=device)
    order = torch.tensor([3, 0, 5, 1, 4, 2], device=device)
    with torch.inference_mode(), answering(_each_for_itself):
        straight, shuffled = (
            model.body(tokens[rows], positions[rows]).float() for rows in (torch.arange(_TOKENS, device=device), order)
        )
        alone = model.body(tokens[:1], positions[:1]).float()
    difference = max((straight[order] - shuffled).abs().max(), (straight[:1] - alone).abs().max())
    if not difference <= _CLOSE * straight.abs().max():
        raise refusal(architecture, "layers outside of attention that mix the tokens of a sequence")


def _each_for_itself(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Any, _arguments: dict[str, Any]
) -> Tensor:
    """[1, tokens, heads, value dim]: the value of the token, weighted by something that its position turns."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    weight = torch.sigmoid((query * key.roll(1, dims=-1)).mean(dim=-1, keepdim=True))
    return (weight * value).transpose(1, 2).contiguous()
