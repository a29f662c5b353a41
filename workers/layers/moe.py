"""A mixture of experts, split over the ranks of a stage: a slice of every expert, as of a plain MLP, or some experts
whole (expert parallel). Either way each rank adds its part of every token's sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels import ops

from ..models.spec import MoESpec
from ..parallel import ParallelContext
from .parameter import Piece, ShardedParameter, replicated, whole

_LEAST_ROWS = 8  # of a router: what kernels multiply at a time, on any CPU


class Router(nn.Module):
    """Scores the experts for each token. Every rank has all of it, so that all choose the same.

    The matrix of few experts has rows of zeros behind theirs: it then has as many as kernels multiply at a time.
    """

    def __init__(self, num_experts: int, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self._num_experts = num_experts
        num_rows = max(num_experts, _LEAST_ROWS)
        pieces = replicated((num_experts, hidden_size))
        self.weight = ShardedParameter(torch.zeros(num_rows, hidden_size), pieces)
        self.bias = ShardedParameter(torch.zeros(num_rows), replicated((num_experts,))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_experts] logits."""
        return self.weight.linear(x, self.bias)[:, : self._num_experts]


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """What one rank has of the experts: `part` of the intermediate features of `experts`."""

    experts: range
    part: range

    @classmethod
    def of(cls, spec: MoESpec, parallel: ParallelContext) -> ExpertShard:
        if parallel.grid.expert_parallel:
            return cls(parallel.split(spec.num_experts), range(spec.intermediate_size))
        return cls(range(spec.num_experts), parallel.split(spec.intermediate_size))


class ExpertWeights(nn.Module):
    """One matrix per expert of this rank, all in one parameter; the checkpoint tensor of expert e is piece `name.e`.

    `names` are matrices of equal shape that lie below each other (gate and up). The intermediate features are their
    rows (`split_rows`) or their columns.
    """

    def __init__(
        self, names: tuple[str, ...], shape: tuple[int, int], shard: ExpertShard, *, split_rows: bool, bias: bool
    ) -> None:
        super().__init__()
        part = shard.part
        own = (len(part), shape[1]) if split_rows else (shape[0], len(part))
        cut = slice(part.start, part.stop)
        source = (cut, slice(0, shape[1])) if split_rows else (slice(0, shape[0]), cut)
        pieces, biases = {}, {}
        for place, expert in enumerate(shard.experts):
            for index, name in enumerate(names):
                rows = slice(index * own[0], (index + 1) * own[0])
                target = (slice(place, place + 1), rows)
                pieces[f"{name}.{expert}"] = Piece(shape, source, (*target, *whole(own[1:])))
                biases[f"{name}.{expert}"] = Piece(shape[:1], source[:1], target)
        of_all = len(shard.experts), len(names) * own[0]
        self.weight = ShardedParameter(torch.empty(*of_all, own[1]), pieces)
        self.bias = ShardedParameter(torch.empty(of_all), biases) if bias else None

    def matrices(self, *, adds_bias: bool = True) -> ops.ExpertMatrices:
        bias = None if self.bias is None or not adds_bias else self.bias.data
        return self.weight.matrices._replace(bias=bias)


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts that its router probabilities choose, weighted by them."""

    def __init__(self, spec: MoESpec, hidden_size: int, parallel: ParallelContext) -> None:
        super().__init__()
        self._spec = spec
        self._parallel = parallel
        size, shard = spec.intermediate_size, ExpertShard.of(spec, parallel)
        self._experts = shard.experts
        # What ranks have slices of is added up, and the bias once.
        self._adds_bias = parallel.grid.expert_parallel or parallel.tensor_rank == 0
        self.router = Router(spec.num_experts, hidden_size, bias=spec.bias)
        self.gate_up = ExpertWeights(("gate", "up"), (size, hidden_size), shard, split_rows=True, bias=spec.bias)
        self.down = ExpertWeights(("down",), (hidden_size, size), shard, split_rows=False, bias=spec.bias)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape. `slots`: [num_tokens] int64, -1 of padding, for which no expert
        need be read."""
        spec, first = self._spec, self._experts.start
        chosen, routing = ops.choose_experts(
            self.router(x), spec.num_experts_per_token, renormalize=spec.renormalize, slots=slots
        )
        out = ops.experts(
            x,
            chosen - first if first else chosen,
            routing,
            self.gate_up.matrices(),
            self.down.matrices(adds_bias=self._adds_bias),
            activation=spec.activation,
            num_experts_in_all=spec.num_experts,
        )
        return self._parallel.all_reduce(out)
