"""The decoder: one transformer for all families, built from a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.engine.kv_cache_spec import KVCacheSpec, split_range
from quire.kernels.elementwise import Rotation
from quire.kernels.ops import AttentionMetadata
from quire.kernels.sampling import likeliest_tokens

from ..layers.attention import Attention, LayerCache
from ..layers.embedding import PositionEmbedding, VocabParallelEmbedding
from ..layers.linear import shard_heads
from ..layers.mlp import MLP, GatedMLP
from ..layers.moe import MixtureOfExperts
from ..layers.norm import Norm, optional_norm
from ..layers.rotary import RotaryEmbedding
from ..parallel import ParallelContext
from .model import TokenStates
from .sizes import check_sizes
from .spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, MoESpec


class Update(NamedTuple):
    """What a block adds to the residual stream."""

    value: Tensor  # [num_tokens, hidden_size]
    multiplier: float


class LayerInputs(NamedTuple):
    """What a layer reads in a step, beside the residual stream."""

    rotation: Rotation | None
    cache: LayerCache
    metadata: AttentionMetadata


class DecoderLayer(nn.Module):
    """Attention and an MLP, each added to the residual stream, one after the other or side by side."""

    def __init__(self, spec: LayerSpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        self.attention_norm = optional_norm(spec.attention_norm, hidden_size)
        self.attention = Attention(spec.attention, hidden_size, parallel)
        self.attention_out_norm = optional_norm(spec.attention_out_norm, hidden_size)
        self.mlp_norm = optional_norm(spec.mlp_norm, hidden_size)
        self.mlp = _mlp(spec.mlp, hidden_size, parallel)
        self._has_experts = isinstance(spec.mlp, MoESpec)
        self.mlp_out_norm = optional_norm(spec.mlp_out_norm, hidden_size)

    def forward(self, x: Tensor, update: Update | None, given: LayerInputs) -> tuple[Tensor, Update]:
        """x: [num_tokens, hidden_size], the residual stream, which nobody else needs any more.

        Returns the stream with `update` and the attention added, and what is still to be added: the next norm does that
        in the same pass.
        """
        x, heads, slots, *read = self.attend(x, update, given)
        attended = self._project(heads)
        del heads  # the MLP needs memory, too
        return self._add(x, attended, slots, *read)

    def attend(self, x: Tensor, update: Update | None, given: LayerInputs) -> TokenStates:
        """All of `forward` that lets tokens know of each other.

        Returns of each token the stream, which attention is to be added to, [num_tokens, hidden_size]; its heads,
        [num_tokens, num_heads * head_dim]; its slot, [num_tokens] int64, -1 of padding; and what attention has read,
        [num_tokens, hidden_size], if the MLP reads the same.
        """
        if update is None:
            normed = self.attention_norm(x)
        else:
            normed, x = self.attention_norm.after_adding(update.value, x, update.multiplier)
        states = x, self.attention(normed, *given), given.metadata.slot_mapping
        return (*states, normed) if self._spec.parallel and self._spec.mlp_norm is None else states

    def rest(self, states: TokenStates) -> tuple[Tensor, Update]:
        """What `forward` returns, of some tokens or all, from what `attend` did. Nobody needs their stream any more."""
        x, heads, slots, *read = states
        return self._add(x, self._project(heads), slots, *read)

    def _project(self, heads: Tensor) -> Tensor:
        """[num_tokens, num_heads * head_dim] -> [num_tokens, hidden_size], what attention adds to the stream."""
        attended: Tensor = self.attention_out_norm(self.attention.output(heads))
        return attended

    def _add(self, x: Tensor, attended: Tensor, slots: Tensor, read: Tensor | None = None) -> tuple[Tensor, Update]:
        """Both blocks to the stream. `read`: by attention, if the MLP reads the same."""
        spec = self._spec
        if spec.parallel:
            attended += self.mlp_out_norm(self._feed(self.mlp_norm(x) if read is None else read, slots))
            return x, Update(attended, spec.residual_multiplier)
        normed, x = self.mlp_norm.after_adding(attended, x, spec.residual_multiplier)
        return x, Update(self.mlp_out_norm(self._feed(normed, slots)), spec.residual_multiplier)

    def _feed(self, x: Tensor, slots: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        out: Tensor = self.mlp(x, slots) if self._has_experts else self.mlp(x)
        return out


class Decoder(nn.Module):
    """One rank of a decoder-only transformer. Weights are uninitialized until a loader fills them.

    A stage of the pipeline has only its own layers, under the names that they have in the whole model; the first has
    the embedding beside them, the last the final norm and the head, which may be the same embedding once more. Raises
    `ConfigError` when the model cannot be cut in as many ranks as there are.
    """

    embedding_multiplier: Tensor  # []

    def __init__(self, spec: DecoderSpec, parallel: ParallelContext) -> None:
        super().__init__()
        grid, first, last = parallel.grid, parallel.is_first_stage, parallel.is_last_stage
        check_sizes(spec, grid.tensor_size, grid.num_stages, expert_parallel=grid.expert_parallel)
        self.spec = spec
        self.own_layers = split_range(len(spec.layers), parallel.stage, grid.num_stages)
        self._parallel = parallel
        if first or (last and spec.tie_embeddings):
            self.embedding = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel)
        # A tensor, since it is rounded to the dtype of the model, as it was in training.
        self.register_buffer("embedding_multiplier", torch.tensor(spec.embedding_multiplier), persistent=False)
        self.positions = PositionEmbedding(spec.positions, spec.hidden_size) if first and spec.positions else None
        # Layers with equal specs share one rotation, computed once per step.
        own = {index: spec.layers[index] for index in self.own_layers}
        wanted = [layer.attention.rotary for layer in own.values()]
        rotary_specs = list(dict.fromkeys(rotary for rotary in wanted if rotary is not None))
        self.rotaries = nn.ModuleList(RotaryEmbedding(rotary) for rotary in rotary_specs)
        self._rotary_of_layer = [None if rotary is None else rotary_specs.index(rotary) for rotary in wanted]
        self._own_layers = [DecoderLayer(layer, spec.hidden_size, parallel) for layer in own.values()]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in zip(own, self._own_layers, strict=True)})
        if last:
            self.norm = Norm(spec.norm, spec.hidden_size)
            self.head = (
                self.embedding
                if spec.tie_embeddings
                else VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, parallel, bias=spec.head_bias)
            )

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def gives_logits(self) -> bool:
        return self._parallel.is_last_stage

    @property
    def is_capturable(self) -> bool:
        return True

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        metadata: Sequence[AttentionMetadata],
    ) -> TokenStates:
        """token_ids, positions: [num_tokens] int64; caches, metadata: one per own layer.

        A later stage starts from what the one before it sends, and every stage but the last sends what it has, and
        returns nothing. Of the last layer all that follows attention is left to `last_hidden_state`, which only the
        tokens go through whose logits are wanted: of a prompt, one.
        """
        x = self._embed(token_ids, positions) if self._parallel.is_first_stage else self._receive(len(token_ids))
        rotations = [rotary(positions) for rotary in self.rotaries]
        own = [None if rotary is None else rotations[rotary] for rotary in self._rotary_of_layer]
        inputs = [LayerInputs(*each) for each in zip(own, caches, metadata, strict=True)]
        *layers, last = self._own_layers
        update: Update | None = None
        for layer, given in zip(layers, inputs[:-1], strict=True):
            x, update = layer(x, update, given)
        attended = last.attend(x, update, inputs[-1])
        if self._parallel.is_last_stage:
            return attended
        x, update = last.rest(attended)
        self._parallel.send(x.add_(update.value, alpha=update.multiplier))
        return ()

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embedding(token_ids)
        if self.spec.embedding_multiplier != 1.0:
            x *= self.embedding_multiplier
        if self.positions is not None:
            x += self.positions(positions)
        return x

    def _receive(self, num_tokens: int) -> Tensor:
        """The residual stream as the stage before has left it."""
        like = self.embedding_multiplier
        return self._parallel.receive((num_tokens, self.spec.hidden_size), like.dtype, like.device)

    def last_hidden_state(self, states: TokenStates) -> Tensor:
        """As `Model` says."""
        x, update = self._own_layers[-1].rest(states)
        normed: Tensor = self.norm.after_adding(update.value, x, update.multiplier)[0]
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32."""
        logits = self.head.logits(hidden)
        if self.spec.logits_multiplier != 1.0:
            logits = logits * self.spec.logits_multiplier
        softcap = self.spec.logits_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows] int64."""
        if self.spec.logits_multiplier != 1.0 or self.spec.logits_softcap is not None:  # which round
            return likeliest_tokens(self.logits(hidden))
        return self.head.likeliest(hidden)

    def kv_cache_specs(self, block_size: int, dtype: torch.dtype) -> list[KVCacheSpec]:
        """What each layer of the whole model caches on a rank with this tensor rank, in layer order."""
        return [
            KVCacheSpec(
                block_size=block_size,
                num_kv_heads=self._num_kv_heads(layer.attention),
                head_dim=layer.attention.head_dim,
                dtype_bytes=dtype.itemsize,
                sliding_window=layer.attention.sliding_window,
            )
            for layer in self.spec.layers
        ]

    def _num_kv_heads(self, spec: AttentionSpec) -> int:
        rank, size = self._parallel.tensor_rank, self._parallel.tensor_size
        return len(shard_heads(spec.num_heads, spec.num_kv_heads, rank, size).kv_heads)


def _mlp(spec: MLPSpec | MoESpec, hidden_size: int, parallel: ParallelContext) -> nn.Module:
    if isinstance(spec, MoESpec):
        return MixtureOfExperts(spec, hidden_size, parallel)
    return (GatedMLP if spec.gated else MLP)(spec, hidden_size, parallel)
