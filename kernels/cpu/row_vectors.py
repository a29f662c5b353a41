# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="call-arg, misc, no-untyped-call, untyped-decorator"
"""Norms, gated activations and rotations of a row in memory, as LLVM vectors: norms and rotations take half the time of
loops over scalars.

Rows are float32 or, where `short` is not 0, bfloat16, which is a constant of the code for either. All is computed in
float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .exponential import Gate, gated
from .vectors import FLOAT, FLOATS, INT8, INT64, LANES, broadcast, call, fma, splat
from .walk import load_lanes, store_lanes, sum_of, walk


@njit(error_model="numpy")
def add_rows(short: int, x: int, factor: Any, other: int, out: int, count: int) -> Any:
    """Store other + factor * x, `count` numbers of each. Returns the sum of the squares of what is stored; where
    `other` is 0, of x, and nothing is stored."""
    return _add_rows(True, x, factor, other, out, count) if short else _add_rows(False, x, factor, other, out, count)


@njit(error_model="numpy")
def scale_row(short: int, x: int, scale: Any, weight: int, offset: Any, out: int, count: int) -> None:
    """Store x * scale * (weight + offset), `count` numbers of each."""
    if short:
        _scale_row(True, x, scale, weight, offset, out, count)
    else:
        _scale_row(False, x, scale, weight, offset, out, count)


@njit(error_model="numpy")
def gate_row(short: int, gates: int, ups: int, gate: Any, out: int, count: int) -> None:
    """Store what `exponential.gated` makes of `count` gates and ups. `gate`: the numbers of a `Gate`."""
    if short:
        _gate_row(True, gates, ups, gate, out, count)
    else:
        _gate_row(False, gates, ups, gate, out, count)


@njit(error_model="numpy")
def turn_halves(short: int, head: int, cos: int, sin: int, out: int, count: int) -> None:
    """Rotate `count` pairs, each a number of a head's first half and one of its second. `out` may be `head`; cosines
    and sines are float32."""
    if short:
        _turn_halves(True, head, cos, sin, out, count)
    else:
        _turn_halves(False, head, cos, sin, out, count)


@intrinsic(prefer_literal=True)
def _add_rows(typing_context: Any, short: Any, x: Any, factor: Any, other: Any, out: Any, count: Any) -> Any:
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
def _scale_row(
    typing_context: Any, short: Any, x: Any, scale: Any, weight: Any, offset: Any, out: Any, count: Any
) -> Any:
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
def _gate_row(typing_context: Any, short: Any, gates: Any, ups: Any, gate: Any, out: Any, count: Any) -> Any:
    is_short = short.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, gates, ups, numbers, out, count = arguments
        own = Gate(*(broadcast(b, b.extract_value(numbers, i), LANES) for i in range(len(Gate._fields))))

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            gate, up = (load_lanes(b, place, k, mask, 0.0, is_short=is_short) for place in (gates, ups))
            store_lanes(b, gated(b, gate, up, own), out, k, mask, is_short=is_short)
            return state

        walk(b, count, [], step)
        return context.get_dummy_value()

    arguments = (types.int64, types.int64, types.UniTuple(types.float32, len(Gate._fields)), types.int64, types.int64)
    return types.void(short, *arguments), generate


@intrinsic(prefer_literal=True)
def _turn_halves(typing_context: Any, short: Any, head: Any, cos: Any, sin: Any, out: Any, count: Any) -> Any:
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
