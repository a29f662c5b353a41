"""Mixtures of experts for the kernel tests, shared by the CPU tests and the checks of the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quire.kernels import fp8, ops


@dataclass(frozen=True)
class ExpertCase:
    num_tokens: int
    num_experts: int = 5
    experts_per_token: int = 2
    hidden_size: int = 48
    size: int = 40
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    weights: torch.dtype | None = None  # in 8 bits
    group: int | None = None  # numbers of a row that share a scale, where not all do
    has_bias: bool = False
    elsewhere: int = 0  # experts that other ranks have: half of them before ours, half behind

    @property
    def name(self) -> str:
        shape = f"{self.num_tokens}x{self.experts_per_token}of{self.num_experts}-{self.hidden_size}-{self.size}"
        parts = ["experts", shape, self.activation, str(self.dtype).removeprefix("torch.")]
        parts += [str(self.weights).removeprefix("torch.")] if self.weights else []
        parts += [f"by{self.group}"] if self.group else []
        parts += ["bias"] if self.has_bias else []
        return "-".join([*parts, *([f"elsewhere{self.elsewhere}"] if self.elsewhere else [])])


EXPERT_CASES = [
    ExpertCase(1),
    ExpertCase(37, activation="gelu"),
    ExpertCase(70, num_experts=3, experts_per_token=3, activation="gelu_tanh"),
    ExpertCase(9, num_experts=17, experts_per_token=4, activation="relu", elsewhere=6),
    ExpertCase(40, dtype=torch.bfloat16, elsewhere=2),
    ExpertCase(2100, num_experts=3, hidden_size=16, size=16, elsewhere=1),  # sorted in several parts
    ExpertCase(20, weights=torch.int8),
    ExpertCase(20, dtype=torch.bfloat16, weights=fp8.DTYPE),
    ExpertCase(20, activation="swiglu_oai", has_bias=True, elsewhere=2),
    ExpertCase(11, activation="swiglu_oai", has_bias=True, dtype=torch.bfloat16),
    ExpertCase(5, weights=torch.int8, has_bias=True),
    ExpertCase(30, weights=fp8.DTYPE, group=16, size=64, elsewhere=2),
    ExpertCase(3, dtype=torch.bfloat16, weights=fp8.DTYPE, group=48, size=96),
]

# Sums of some tens of products of order 1, twice. In bfloat16 what lies between the two products is rounded as well.
EXPERT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.3}


def build_experts(case: ExpertCase, device: str = "cpu") -> dict[str, Tensor | str | int | None]:
    """Arguments of `ops.experts`. One expert at least is chosen by nobody where there are more than are chosen."""
    generator = torch.Generator().manual_seed(case.num_tokens)
    everywhere = case.num_experts + case.elsewhere
    most = everywhere if everywhere == case.experts_per_token else everywhere - 1
    scores = torch.rand(case.num_tokens, most, generator=generator)
    routing, chosen = scores.topk(case.experts_per_token, dim=-1)
    arguments: dict[str, Tensor | str | int | None] = {
        "x": torch.randn(case.num_tokens, case.hidden_size, generator=generator).to(device, case.dtype),
        "chosen": (chosen - case.elsewhere // 2).to(device),
        "routing": routing.to(device),
        "activation": case.activation,
        # (Where it is not told, what is chosen may still be elsewhere.)
        "num_experts_in_all": None if case.elsewhere == 6 else everywhere,
    }
    shapes = {"gate_up": (2 * case.size, case.hidden_size), "down": (case.hidden_size, case.size)}
    for name, shape in shapes.items():
        weight = torch.randn(case.num_experts, *shape, generator=generator) / shape[1] ** 0.5
        groups = weight.view(*weight.shape[:2], -1, case.group or shape[1])
        scales = groups.abs().amax(dim=-1) / 127
        if case.has_bias:
            arguments[f"{name}_bias"] = torch.randn(weight.shape[:2], generator=generator).to(device, case.dtype)
        if case.weights is None:
            arguments[name] = weight.to(device, case.dtype)
            continue
        stored = (groups / scales[..., None]).flatten(2)
        arguments[name] = (stored.round() if case.weights == torch.int8 else stored).to(case.weights).to(device)
        arguments[f"{name}_scales"] = (scales.transpose(1, 2) if case.group else scales[..., 0]).contiguous().to(device)
    return arguments


@dataclass(frozen=True)
class ChoiceCase:
    num_tokens: int
    num_experts: int
    experts_per_token: int
    renormalize: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        shape = f"{self.num_tokens}x{self.experts_per_token}of{self.num_experts}"
        parts = ["choose_experts", shape, str(self.dtype).removeprefix("torch.")]
        return "-".join([*parts, *(["renormalized"] if self.renormalize else [])])


CHOICES = [
    ChoiceCase(1, 8, 2),
    ChoiceCase(7, 60, 4, renormalize=False),
    ChoiceCase(33, 128, 8, dtype=torch.bfloat16),
    ChoiceCase(3, 5, 5, renormalize=False, dtype=torch.float16),
    ChoiceCase(4, 17, 1),
]


def choice_problem(case: ChoiceCase, device: str) -> str | None:
    """How choices of the backend differ from what is right: of experts with different logits, and of equal ones."""
    generator = torch.Generator().manual_seed(case.num_experts)
    ranks = torch.rand(case.num_tokens, case.num_experts + 3, generator=generator).argsort(dim=-1)
    logits = (ranks / 16).to(device, case.dtype)[:, : case.num_experts]  # each another, in any dtype; rows lie apart
    chosen, routing = ops.choose_experts(logits, case.experts_per_token, renormalize=case.renormalize)
    slots = torch.arange(case.num_tokens + 1, device=device)[1:] % 3 - 1  # 0, 1, -1, ...
    with_slots, _ = ops.choose_experts(
        logits, case.experts_per_token, renormalize=case.renormalize, slots=slots.contiguous()
    )
    is_padding = (slots < 0)[:, None]
    if not torch.where(is_padding, (with_slots == chosen) | (with_slots == -1), with_slots == chosen).all():
        return f"with slots {slots.tolist()} chose {with_slots.tolist()}, not {chosen.tolist()}"
    wanted, experts = logits.double().softmax(dim=-1).sort(dim=-1, descending=True)
    wanted, experts = wanted[:, : case.experts_per_token], experts[:, : case.experts_per_token]
    if case.renormalize:
        wanted = wanted / wanted.sum(dim=-1, keepdim=True)
    if chosen.dtype != torch.int64 or not torch.equal(chosen, experts):
        return f"chose {chosen.tolist()}, not {experts.tolist()}"
    if routing.dtype != torch.float32 or not torch.allclose(routing.double(), wanted, rtol=1e-5, atol=0):
        return f"they count {routing.tolist()}, not {wanted.tolist()}"
    equal = 1 / (case.experts_per_token if case.renormalize else case.num_experts)
    only_last = torch.zeros_like(logits)
    only_last[:, -1] = 1000.0  # beside which no other has a probability
    one = torch.tensor([1.0] + [0.0] * (case.experts_per_token - 1))
    for given, count in (
        (torch.zeros_like(logits), torch.full_like(one, equal)),
        (only_last, one),
        (torch.full_like(logits, torch.nan), torch.full_like(one, torch.nan)),
    ):
        chosen, routing = ops.choose_experts(given, case.experts_per_token, renormalize=case.renormalize)
        if not torch.allclose(routing.cpu(), count.expand(len(logits), -1), equal_nan=True):
            return f"of {given[0].tolist()}, they count {routing.tolist()}, not {count.tolist()}"
        if any(len(set(row)) < len(row) or not set(row) <= set(range(case.num_experts)) for row in chosen.tolist()):
            return f"of {given[0].tolist()} chose {chosen.tolist()}"
        if given is only_last and not (chosen[:, 0] == case.num_experts - 1).all():
            return f"of the last alone chose {chosen.tolist()}"
    return None


def run_experts(arguments: dict[str, Tensor | str | int | None]) -> Tensor:
    """With memory that holds NaN where nobody has written: what is fresh often holds zeros."""
    empty = torch.empty

    def unwritten(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    given = {name: value for name, value in arguments.items() if not name.startswith(("gate_up", "down"))}
    for name in ("gate_up", "down"):
        scales, bias = (arguments.get(f"{name}_{each}") for each in ("scales", "bias"))
        given[name] = ops.ExpertMatrices(arguments[name], scales, bias=bias)  # type: ignore[arg-type]
    with patch.object(torch, "empty", unwritten):
        return ops.experts(**given)  # type: ignore[arg-type]
