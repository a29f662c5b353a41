"""A causal language model of `transformers` as the worker sees a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from quire.engine.kv_cache_spec import KVCacheSpec
from quire.kernels.ops import AttentionMetadata
from quire.kernels.sampling import likeliest_tokens

from ..layers.attention import LayerCache
from ..models.model import TokenStates
from .interface import answering
from .probe import AttentionCall, body_of


class FallbackModel(nn.Module):
    """The whole model on one rank; its n-th attention call of a forward is layer n of the cache.

    `transformers` splits a causal language model into a body, which ends with the last norm, and what makes logits of
    that. Both are used as they are: the tokens of all requests go through the body as one sequence with positions that
    jump, which nothing but attention notices, and the rows that sample go through the rest, in which the body only
    hands over what it is given.
    """

    def __init__(self, causal_lm: Any, calls: Sequence[AttentionCall]) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._calls = calls
        body = body_of(causal_lm)
        body.forward = _hand_over
        self._body_forward = type(body).forward.__get__(body)

    @property
    def vocab_size(self) -> int:
        return int(self.causal_lm.config.get_text_config().vocab_size)

    @property
    def own_layers(self) -> range:
        return range(len(self._calls))

    @property
    def gives_logits(self) -> bool:
        return True

    @property
    def is_capturable(self) -> bool:
        return False  # nobody knows what the code of all these models does

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        metadata: Sequence[AttentionMetadata],
    ) -> TokenStates:
        """As `Model` says."""
        step = _Step(self._calls, caches, metadata)
        with answering(step.attend):
            hidden = self.body(token_ids, positions)
        step.check_complete()
        return (hidden,)

    def body(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], the attention calls answered by whoever is around."""
        out = self._body_forward(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.causal_lm(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        return likeliest_tokens(self.logits(hidden))

    def last_hidden_state(self, states: TokenStates) -> Tensor:
        (hidden,) = states
        return hidden  # the body ends with its norm

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        return [
            KVCacheSpec(
                block_size=block_size,
                num_kv_heads=call.num_kv_heads,
                head_dim=call.head_dim,
                dtype_bytes=dtype.itemsize,
                sliding_window=call.sliding_window,
            )
            for call in self._calls
        ]


@dataclass
class _HandedOver(MoeModelOutputWithPast):
    """The output of any body: with all fields that heads look at."""

    cross_attentions: None = None


def _hand_over(*_: Any, inputs_embeds: Tensor, **__: Any) -> _HandedOver:
    """In place of the body's forward: the hidden states are there already."""
    return _HandedOver(last_hidden_state=inputs_embeds)


class _Step:
    """Answers the attention calls of one forward, in order."""

    def __init__(
        self, calls: Sequence[AttentionCall], caches: Sequence[LayerCache], metadata: Sequence[AttentionMetadata]
    ) -> None:
        self._layers = iter(zip(calls, caches, metadata, strict=True))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, arguments: dict[str, Any]
    ) -> Tensor:
        call, cache, metadata = next(self._layers)
        key_dim, value_dim = key.shape[3], value.shape[3]
        scale = arguments.get("scaling") or getattr(module, "scaling", None) or key_dim**-0.5
        query, key, value = (_rows(x, call.head_dim) for x in (query, key, value))
        sinks = arguments.get("s_aux")
        attended = cache.attend(
            query,
            key,
            value,
            metadata,
            scale=scale,
            sliding_window=call.sliding_window,
            softcap=arguments.get("softcap"),
            sinks=None if sinks is None else sinks.float(),
        )
        return attended[None, :, :, :value_dim].contiguous()

    def check_complete(self) -> None:
        if next(self._layers, None) is not None:
            raise RuntimeError("the model called attention fewer times than when it was probed")


def _rows(x: Tensor, head_dim: int) -> Tensor:
    """[1, heads, tokens, d] -> [tokens, heads, head_dim], zeros behind d: they change no score, and are cut off."""
    rows = x[0].transpose(0, 1)
    return F.pad(rows, (0, head_dim - x.shape[3])) if x.shape[3] < head_dim else rows
