# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""Norms and rotations of a row in memory, as LLVM vectors. Loops over scalars take about twice as long.

Rows are float32 or, where the constant `short` says so, bfloat16. All is computed in float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import FLOAT, FLOATS, INT8, INT64, LANES, broadcast, call, fma, splat
from .walk import load_lanes, store_lanes, sum_of, walk


@intrinsic(prefer_literal=True)
def add_rows(typing_context: Any, short: Any, x: Any, factor: Any, other: Any, out: Any, count: Any) -> Any:
    """Store other + factor * x, `count` numbers of each. Returns the sum of the squares of what is stored; where
    `other` is 0, of x, and nothing is stored."""
    is_short = short.literal_value

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, x, factor, other, out, count = arguments
        factors, nothing = broadcast(b, factor, LANES), splat(FLOATS, 0.0)

        def square(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            given = load_lanes(b, x, k, mask, 0.0, is_short=is_short)
            return [fma(b, given, given, state[0])]

        def add(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            given, another = (load_lanes(b, place, k, mask, 0.0, is_short=is_short) for place in (x, other))
            total = fma(b, factors, given, another)
            stored = store_lanes(b, total, out, k, mask, is_short=is_short)
            return [fma(b, stored, stored, state[0])]

        is_alone = b.icmp_signed("==", other, INT64(0))
        sums, ends = [], []
        with b.if_else(is_alone) as branches:
            for branch, step in zip(branches, (square, add), strict=True):
                with branch:
                    (squares,) = walk(b, count, [nothing], step)
                    sums.append(sum_of(b, squares))
                    ends.append(b.block)
        result = b.phi(FLOAT)
        for value, end in zip(sums, ends, strict=True):
            result.add_incoming(value, end)
        return result

    return types.float32(short, types.int64, types.float32, *[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def scale_row(
    typing_context: Any, short: Any, x: Any, scale: Any, weight: Any, offset: Any, out: Any, count: Any
) -> Any:
    """Store x * scale * (weight + offset), `count` numbers of each."""
    is_short = short.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, x, scale, weight, offset, out, count = arguments
        scales, offsets = (broadcast(b, each, LANES) for each in (scale, offset))

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            given, weights = (load_lanes(b, place, k, mask, 0.0, is_short=is_short) for place in (x, weight))
            scaled = b.fmul(b.fmul(given, scales), b.fadd(weights, offsets))
            store_lanes(b, scaled, out, k, mask, is_short=is_short)
            return state

        walk(b, count, [], step)
        return context.get_dummy_value()

    arguments = (types.int64, types.float32, types.int64, types.float32, types.int64, types.int64)
    return types.void(short, *arguments), generate


@intrinsic(prefer_literal=True)
def turn_halves(typing_context: Any, short: Any, head: Any, cos: Any, sin: Any, out: Any, count: Any) -> Any:
    """Rotate `count` pairs, each a number of a head's first half and one of its second. `out` may be `head`; cosines
    and sines are float32."""
    is_short = short.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, head, cos, sin, out, count = arguments
        half = b.mul(count, INT64(2 if is_short else 4))

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            x, y = (load_lanes(b, place, k, mask, 0.0, is_short=is_short) for place in (head, b.add(head, half)))
            cosines, sines = (load_lanes(b, place, k, mask, 0.0) for place in (cos, sin))
            store_lanes(b, fma(b, x, cosines, b.fneg(b.fmul(y, sines))), out, k, mask, is_short=is_short)
            store_lanes(b, fma(b, y, cosines, b.fmul(x, sines)), b.add(out, half), k, mask, is_short=is_short)
            return state

        walk(b, count, [], step)
        return context.get_dummy_value()

    return types.void(short, *[types.int64] * 5), generate


@intrinsic
def copy_bytes(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """`count` bytes, from one address to another one that is not amid them."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        source, target, count = arguments
        places = [b.inttoptr(place, INT8.as_pointer()) for place in (target, source)]
        call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [*places, count, ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
