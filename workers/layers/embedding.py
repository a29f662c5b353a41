"""The token embedding and the head that turns hidden states into logits, both split by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.sampling import likeliest_tokens

from ..models.spec import WHOLE, PositionSpec
from ..parallel import ParallelContext
from .parameter import Piece, ShardedParameter, replicated, rows


class VocabParallelEmbedding(nn.Module):
    """One rank's rows of the vocabulary, which is padded with zeros to a multiple of the ranks.

        50 tokens, 4 ranks, 13 rows each:   0-12 | 13-25 | 26-38 | 39-49 and 2 rows of padding

    It serves as embedding (`forward`), as head (`logits`), or as both where the model ties them. `bias` is the head's.
    """

    def __init__(self, vocab_size: int, hidden_size: int, parallel: ParallelContext, *, bias: bool = False) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._parallel = parallel
        num_rows = -(-vocab_size // parallel.tensor_size)
        self._start = parallel.tensor_rank * num_rows
        own = range(min(self._start, vocab_size), min(self._start + num_rows, vocab_size))

        def share(shape: tuple[int, ...]) -> ShardedParameter:
            piece = Piece(shape, rows(own, shape), rows(range(len(own)), shape))
            return ShardedParameter(torch.zeros(num_rows, *shape[1:]), {WHOLE: piece})

        self.weight = share((vocab_size, hidden_size))
        self.bias = share((vocab_size,)) if bias else None

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        if self._parallel.tensor_size == 1:
            return self.weight.embed(token_ids)
        local = token_ids - self._start
        foreign = (local < 0) | (local >= self.weight.shape[0])
        found = self.weight.embed(local.masked_fill(foreign, 0))
        return self._parallel.all_reduce(found.masked_fill(foreign[:, None], 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] float32, whole on every rank."""
        # Of several ranks one may hold its share packed and another not: what they gather is in one dtype.
        multiply = self.weight.logits if self._parallel.tensor_size == 1 else self.weight.linear
        return self._parallel.all_gather(multiply(hidden, self.bias))[:, : self._vocab_size].float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows] int64: `likeliest_tokens` of `logits`."""
        if self._parallel.tensor_size == 1 and self.bias is None:
            return self.weight.likeliest(hidden)
        return likeliest_tokens(self.logits(hidden))


class PositionEmbedding(nn.Module):
    """Learned absolute positions, whole on every rank."""

    def __init__(self, spec: PositionSpec, hidden_size: int) -> None:
        super().__init__()
        self._offset = spec.offset
        shape = (spec.num_rows, hidden_size)
        self.weight = ShardedParameter(torch.empty(shape), replicated(shape))

    def forward(self, positions: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size]."""
        return F.embedding(positions + self._offset, self.weight)
