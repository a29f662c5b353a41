# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""Gated activations (`..activation`), of numbers in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import SWIGLU_OAI_LIMIT, SWIGLU_OAI_SCALE

_SCALE, _LIMIT = tl.constexpr(SWIGLU_OAI_SCALE), tl.constexpr(SWIGLU_OAI_LIMIT)


@triton.jit
def bounded(gate, up, ACTIVATION: tl.constexpr):
    """What is activated, and what that is multiplied by. NaN stays NaN."""
    if ACTIVATION == "swiglu_oai":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
    return gate, up


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    # One result of all branches: the compiler goes on behind a `return`.
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "swiglu_oai":
        y = x * tl.sigmoid(x * _SCALE)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 y)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu", "an activation that there is no code for")
        y = tl.maximum(x, 0.0)
    return y
