"""A mixture of experts: every rank has a slice of every expert, as it has of a plain MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models.spec import MoESpec
from ..parallel import ParallelContext
from .activation import ACTIVATIONS
from .parameter import Piece, ShardedParameter, replicated, whole


class Router(nn.Module):
    """Scores the experts for each token. Every rank has all of it, so that all choose the same."""

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        super().__init__()
        shape = (num_experts, hidden_size)
        self.weight = ShardedParameter(torch.empty(shape), replicated(shape))

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_experts] probabilities, float32."""
        return self.weight.linear(x).float().softmax(dim=-1)


class ExpertWeights(nn.Module):
    """One matrix per expert, all in one parameter; the checkpoint tensor of expert e is piece `name.e`.

    `names` are matrices of equal shape that lie below each other (gate and up). `part` is what this rank has of their
    rows (`split_rows`) or columns.
    """

    def __init__(
        self, num_experts: int, names: tuple[str, ...], shape: tuple[int, int], part: range, *, split_rows: bool
    ) -> None:
        super().__init__()
        own = (len(part), shape[1]) if split_rows else (shape[0], len(part))
        cut = slice(part.start, part.stop)
        source = (cut, slice(0, shape[1])) if split_rows else (slice(0, shape[0]), cut)
        pieces = {}
        for expert in range(num_experts):
            for index, name in enumerate(names):
                rows = slice(index * own[0], (index + 1) * own[0])
                target = (slice(expert, expert + 1), rows, *whole(own[1:]))
                pieces[f"{name}.{expert}"] = Piece(shape, source, target)
        self.weight = ShardedParameter(torch.empty(num_experts, len(names) * own[0], own[1]), pieces)


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts that its router probabilities choose, weighted by them."""

    def __init__(self, spec: MoESpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        self._parallel = parallel
        self._activation = ACTIVATIONS[spec.activation]
        size, part = spec.intermediate_size, parallel.split(spec.intermediate_size)
        self.router = Router(spec.num_experts, hidden_size)
        self.gate_up = ExpertWeights(spec.num_experts, ("gate", "up"), (size, hidden_size), part, split_rows=True)
        self.down = ExpertWeights(spec.num_experts, ("down",), (hidden_size, size), part, split_rows=False)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        weights, experts = self.router(x).topk(self._spec.num_experts_per_token, dim=-1)
        if self._spec.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Assignments sorted by expert, so that each expert's tokens are one matrix.
        order = experts.flatten().argsort(stable=True)
        tokens = order // self._spec.num_experts_per_token
        weights = weights.flatten()[order, None].to(x.dtype)
        counts = experts.flatten().bincount(minlength=self._spec.num_experts).tolist()
        out = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                own = slice(start, start + count)
                out.index_add_(0, tokens[own], self._run(expert, x[tokens[own]]).mul_(weights[own]))
                start += count
        return self._parallel.all_reduce(out)

    def _run(self, expert: int, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> this rank's part of the expert's sum, the same shape."""
        gate, up = self.gate_up.weight.expert_linear(expert, x).chunk(2, dim=-1)
        return self.down.weight.expert_linear(expert, self._activation(gate).mul_(up))
