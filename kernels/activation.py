"""Activation functions by name, for the backends that compute them in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# Of gpt-oss (https://github.com/openai/gpt-oss): x * sigmoid(SCALE * x) * (up + 1), neither above LIMIT, nor up below
# its negative.
SWIGLU_OAI_SCALE, SWIGLU_OAI_LIMIT = 1.702, 7.0
GATED = (*ACTIVATIONS, "swiglu_oai")  # of a gate and an up


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, or what a name of `GATED` makes of both."""
    if activation != "swiglu_oai":
        return ACTIVATIONS[activation](gate) * up
    gate, up = gate.clamp(max=SWIGLU_OAI_LIMIT), up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gate * torch.sigmoid(SWIGLU_OAI_SCALE * gate) * (up + 1)
