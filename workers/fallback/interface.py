"""Our side of the interface through which the models of `transformers` call attention.

Models look up a function by the name in their configuration and call it with their own module, so that nothing of ours
reaches it by argument in every model. Whoever runs a forward therefore says, for its duration, who answers the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

PAGED = "quire_paged"  # no masks are made for it: paged attention has its own
PROBING = "quire_probing"  # masks are asked for, to learn what the model wants masked; experts compute nothing

# (module, query [1, heads, tokens, head_dim], key and value [1, KV heads, tokens, head_dim], mask, other arguments)
# -> [1, tokens, heads, head_dim]
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, dict[str, Any]], Tensor]
MakeMask = Callable[[dict[str, Any]], Any]

_attend: ContextVar[Attend] = ContextVar("attend")
_make_mask: ContextVar[MakeMask] = ContextVar("make_mask")


@contextmanager
def answering(attend: Attend, make_mask: MakeMask | None = None) -> Iterator[None]:
    """Attention calls of forwards inside, in this thread, go to `attend`; with `PROBING`, masks to `make_mask`."""
    token = _attend.set(attend)
    mask_token = None if make_mask is None else _make_mask.set(make_mask)
    try:
        yield
    finally:
        _attend.reset(token)
        if mask_token is not None:
            _make_mask.reset(mask_token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **arguments: Any
) -> tuple[Tensor, None]:
    return _attend.get()(module, query, key, value, attention_mask, arguments), None


def _mask(**arguments: Any) -> Any:
    return _make_mask.get()(arguments)


def _experts(_module: nn.Module, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """For probing only: which experts a token goes to is not known without weights."""
    return torch.empty_like(hidden)


AttentionInterface.register(PAGED, _attention)
AttentionInterface.register(PROBING, _attention)
AttentionMaskInterface.register(PROBING, _mask)
ExpertsInterface.register(PROBING, _experts)
