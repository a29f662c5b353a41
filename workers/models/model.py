"""What a model is to the worker and the model runner, however it is built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from quire.engine.kv_cache_spec import KVCacheSpec
from quire.engine.model_source import Implementation, ModelInfo
from quire.kernels.ops import AttentionMetadata

from ..layers.attention import LayerCache
from ..parallel import ParallelContext

TokenStates = tuple[Tensor, ...]


def select_tokens(states: TokenStates, indices: Tensor) -> TokenStates:
    """Copies of some, [n] int64."""
    return tuple(each.index_select(0, indices) for each in states)


def slice_tokens(states: TokenStates, start: int, stop: int) -> TokenStates:
    """Those from `start` to before `stop`, in the memory that they have."""
    return tuple(each[start:stop] for each in states)


class Model(Protocol):
    """One rank of a decoder-only model: a module (`torch.nn.Module`) over the paged KV cache."""

    @property
    def vocab_size(self) -> int:
        """Columns of `logits`."""
        ...

    @property
    def own_layers(self) -> range:
        """The layers of the whole model that this rank computes: all of them without a pipeline."""
        ...

    @property
    def gives_logits(self) -> bool:
        """Whether this rank samples: it is of the last stage."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a forward launches the same kernels for all batches of one shape, and never waits for the device."""
        ...

    def __call__(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        caches: Sequence[LayerCache],  # one per own layer
        metadata: Sequence[AttentionMetadata],  # one per own layer
    ) -> TokenStates:
        """What there is of every token when the last token has written its keys and values to `caches`, and attention
        has read them: tensors whose first dimension is num_tokens. The rest of the model computes each token by itself,
        and only those that somebody wants.
        """
        ...

    def last_hidden_state(self, states: TokenStates) -> Tensor:
        """[num_rows, hidden_size], after the last norm: what `transformers` calls by this name.

        states: of some tokens, or all. Nobody needs them any more: they may be overwritten.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of the last hidden state, [num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        ...

    def likeliest(self, hidden: Tensor) -> Tensor:
        """`likeliest_tokens` of `logits`, [num_rows] int64, for which not all of these need be computed."""
        ...

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """What each layer of the whole model caches on a rank with this tensor rank, in layer order."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def to(self, device: torch.device) -> Self: ...

    def eval(self) -> Self: ...


class Blueprint(Protocol):
    """How a model is built and filled. Making one reads the configuration, not the weights."""

    @property
    def architecture(self) -> str: ...

    @property
    def implementation(self) -> Implementation: ...

    def build(self, parallel: ParallelContext) -> Model:
        """One rank, of torch's default type on torch's default device, its weights not yet filled.

        Raises `ConfigError` when the model cannot be cut in as many ranks as there are.
        """
        ...

    def load(self, model: Any, info: ModelInfo, *, progress: bool) -> None:
        """Fill what `build` made. Raises `ConfigError` naming every tensor that does not match."""
        ...

    def check(self, model: Any, info: ModelInfo) -> None:
        """Raise what `load` would, without reading a tensor. `model` may be on the meta device."""
        ...
