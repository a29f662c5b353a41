# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""What needs exponentials, as LLVM vectors: softmax and gated activations. The compiler makes half-width ones of
loops."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..activation import SWIGLU_OAI_LIMIT, SWIGLU_OAI_SCALE
from .vectors import FLOAT, FLOATS, INTS, LANES, broadcast, call, fma, splat
from .walk import load_lanes, store_lanes, sum_of, walk


class Gate(NamedTuple):
    """What `gated` computes: x * sigmoid(scale * (x + cube * x^3)) * (up + added), neither x nor up above `limit`, nor
    up below its negative. That is silu and, as 1 + tanh(u) = 2 sigmoid(2u), gelu by tanh."""

    scale: Any = 1.0
    cube: Any = 0.0
    limit: Any = math.inf
    added: Any = 0.0


GATES = {
    "silu": Gate(),
    "gelu_tanh": Gate(2.0 * (2.0 / math.pi) ** 0.5, 0.044715),
    "swiglu_oai": Gate(SWIGLU_OAI_SCALE, limit=SWIGLU_OAI_LIMIT, added=1.0),
}
FARTHEST = 87.0  # exp(-87) is 2e-38: what is below is 0
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes' expf: a polynomial for [-ln(2) / 2, ln(2) / 2].
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@intrinsic
def largest(typing_context: Any, numbers: Any, count: Any, start: Any) -> Any:
    """The largest of `count` float32 and of `start`. NaN may be passed over."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        numbers, count, start = arguments

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            vector = load_lanes(b, numbers, k, mask, -math.inf)
            return [b.select(b.fcmp_ordered(">", vector, state[0]), vector, state[0])]

        (tops,) = walk(b, count, [broadcast(b, start, LANES)], step)
        return call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, [tops])

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def soften(typing_context: Any, numbers: Any, count: Any, top: Any) -> Any:
    """Each of `count` float32 becomes exp(number - top), to 2 units; 0 below exp(-FARTHEST). Returns their sum."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        numbers, count, top = arguments
        tops = broadcast(b, top, LANES)

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            weights = exponential(b, b.fsub(load_lanes(b, numbers, k, mask, -math.inf), tops))
            store_lanes(b, weights, numbers, k, mask)
            if mask is not None:
                weights = b.select(mask, weights, splat(FLOATS, 0.0))
            return [b.fadd(state[0], weights)]

        (sums,) = walk(b, count, [splat(FLOATS, 0.0)], step)
        return sum_of(b, sums)

    return types.float32(types.int64, types.int64, types.float32), generate


def gated(b: ir.IRBuilder, x: Any, up: Any, gate: Gate) -> Any:
    """x / (1 + exp(-scale * (x + cube * x^3))) * up, see `Gate`, here of vectors. NaN stays NaN."""
    (scales, cubes, limits, added), one = gate, splat(FLOATS, 1.0)
    x, up = (b.select(b.fcmp_ordered(">", each, limits), limits, each) for each in (x, up))
    least = b.fneg(limits)
    up = b.fadd(b.select(b.fcmp_ordered("<", up, least), least, up), added)
    # scale * (x + cube * x^3), its sign turned
    turned = b.fneg(b.fmul(scales, b.fmul(x, fma(b, b.fmul(cubes, x), x, one))))
    return b.fmul(b.fdiv(x, b.fadd(one, exponential(b, turned))), up)


def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """exp of each lane, to 2 units of float32: at most 2 ** 126, 0 below exp(-FARTHEST). NaN stays NaN."""
    is_far = b.fcmp_ordered("<", x, splat(FLOATS, -FARTHEST))
    near = b.select(b.fcmp_ordered(">", x, splat(FLOATS, FARTHEST)), splat(FLOATS, FARTHEST), x)
    scaled = fma(b, near, splat(FLOATS, math.log2(math.e)), splat(FLOATS, 0.5))
    whole = call(b, "llvm.floor.v16f32", FLOATS, [scaled])
    r = fma(b, whole, splat(FLOATS, -_LN2_HIGH), near)
    r = fma(b, whole, splat(FLOATS, -_LN2_LOW), r)
    p = splat(FLOATS, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = fma(b, p, r, splat(FLOATS, coefficient))
    p = fma(b, p, b.fmul(r, r), b.fadd(r, splat(FLOATS, 1.0)))
    exponent = b.fptosi(b.select(b.fcmp_unordered("uno", whole, whole), splat(FLOATS, 0.0), whole), INTS)
    power = b.bitcast(b.shl(b.add(exponent, splat(INTS, 127)), splat(INTS, 23)), FLOATS)
    return b.select(is_far, splat(FLOATS, 0.0), b.fmul(p, power))
