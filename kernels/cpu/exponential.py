# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""What needs exponentials, as LLVM vectors: softmax and gated activations. The compiler makes half-width ones of loops.

Numbers are at addresses; the last ones of a row are read and written under a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import (
    FLOAT,
    FLOATS,
    INT16,
    INT64,
    INTS,
    LANES,
    broadcast,
    call,
    from_bfloat16,
    joined,
    load,
    splat,
    store,
    to_bfloat16,
)

FARTHEST = 87.0  # exp(-87) is 2e-38: what is below is 0
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes' expf: a polynomial for [-ln(2) / 2, ln(2) / 2].
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_HALVES = ir.VectorType(INT16, LANES)


@intrinsic
def largest(typing_context: Any, numbers: Any, count: Any, start: Any) -> Any:
    """The largest of `count` float32 and of `start`. NaN may be passed over."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        numbers, count, start = arguments

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            vector = _load(b, numbers, k, mask, -math.inf)
            return [b.select(b.fcmp_ordered(">", vector, state[0]), vector, state[0])]

        (tops,) = _walk(b, count, [broadcast(b, start, LANES)], step)
        return call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, [tops])

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def soften(typing_context: Any, numbers: Any, count: Any, top: Any) -> Any:
    """Each of `count` float32 becomes exp(number - top), to 2 units; 0 below exp(-FARTHEST). Returns their sum."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        numbers, count, top = arguments
        tops = broadcast(b, top, LANES)

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            weights = exponential(b, b.fsub(_load(b, numbers, k, mask, -math.inf), tops))
            _store(b, weights, numbers, k, mask)
            if mask is not None:
                weights = b.select(mask, weights, splat(FLOATS, 0.0))
            return [b.fadd(state[0], weights)]

        (sums,) = _walk(b, count, [splat(FLOATS, 0.0)], step)
        return _sum(b, sums)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def gate(typing_context: Any, like: Any, gates: Any, ups: Any, out: Any, count: Any, scale: Any, cube: Any) -> Any:
    """`count` times x / (1 + exp(-scale * (x + cube * x^3))) * up, in the type of `like`: float32, or bfloat16 as
    uint16."""
    is_short = like.dtype.bitwidth == 16

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        _, gates, ups, out, count, scale, cube = arguments
        scales, cubes = broadcast(b, scale, LANES), broadcast(b, cube, LANES)
        one = splat(FLOATS, 1.0)

        def step(k: Any, mask: Any, state: list[Any]) -> list[Any]:
            x, up = (_load(b, place, k, mask, 0.0, is_short=is_short) for place in (gates, ups))
            # scale * (x + cube * x^3), its sign turned
            turned = b.fneg(b.fmul(scales, b.fmul(x, _fma(b, b.fmul(cubes, x), x, one))))
            activated = b.fdiv(x, b.fadd(one, exponential(b, turned)))
            _store(b, b.fmul(activated, up), out, k, mask, is_short=is_short)
            return state

        _walk(b, count, [], step)
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 4, types.float32, types.float32), generate


def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """exp of each lane, to 2 units of float32: at most 2 ** 126, 0 below exp(-FARTHEST). NaN stays NaN."""
    is_far = b.fcmp_ordered("<", x, splat(FLOATS, -FARTHEST))
    near = b.select(b.fcmp_ordered(">", x, splat(FLOATS, FARTHEST)), splat(FLOATS, FARTHEST), x)
    scaled = _fma(b, near, splat(FLOATS, math.log2(math.e)), splat(FLOATS, 0.5))
    whole = call(b, "llvm.floor.v16f32", FLOATS, [scaled])
    r = _fma(b, whole, splat(FLOATS, -_LN2_HIGH), near)
    r = _fma(b, whole, splat(FLOATS, -_LN2_LOW), r)
    p = splat(FLOATS, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = _fma(b, p, r, splat(FLOATS, coefficient))
    p = _fma(b, p, b.fmul(r, r), b.fadd(r, splat(FLOATS, 1.0)))
    exponent = b.fptosi(b.select(b.fcmp_unordered("uno", whole, whole), splat(FLOATS, 0.0), whole), INTS)
    power = b.bitcast(b.shl(b.add(exponent, splat(INTS, 127)), splat(INTS, 23)), FLOATS)
    return b.select(is_far, splat(FLOATS, 0.0), b.fmul(p, power))


def _walk(b: ir.IRBuilder, count: Any, start: list[Any], step: Callable[[Any, Any, list[Any]], list[Any]]) -> list[Any]:
    """`state = step(k, None, state)` for each whole vector of `count` numbers, and once with a mask for the rest."""
    before = b.block
    head, body, rest, tail, after = (b.append_basic_block(name) for name in ("head", "body", "rest", "tail", "after"))
    whole = b.and_(count, INT64(-LANES))
    b.branch(head)
    b.position_at_end(head)
    k, state = b.phi(INT64), [b.phi(value.type) for value in start]
    b.cbranch(b.icmp_signed("<", k, whole), body, rest)
    b.position_at_end(body)
    new = step(k, None, list(state))
    for phi, first, value in zip([k, *state], [INT64(0), *start], [b.add(k, INT64(LANES)), *new], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(rest)
    b.cbranch(b.icmp_signed("<", whole, count), tail, after)
    b.position_at_end(tail)
    left = broadcast(b, b.trunc(b.sub(count, whole), INTS.element), LANES)
    mask = b.icmp_signed("<", ir.Constant(INTS, list(range(LANES))), left)
    last, end = step(whole, mask, list(state)), b.block
    b.branch(after)
    b.position_at_end(after)
    return [joined(b, (value, rest), (masked, end)) for value, masked in zip(state, last, strict=True)]


def _load(b: ir.IRBuilder, place: Any, k: Any, mask: Any, other: float, *, is_short: bool = False) -> Any:
    """Numbers k and following; where there is a mask, `other`, or 0 for short ones, in place of those it leaves out."""
    name, kind, width = ("v16i16", _HALVES, 2) if is_short else ("v16f32", FLOATS, 4)
    address = b.add(place, b.mul(k, INT64(width)))
    if mask is None:
        loaded = load(b, address, kind)
    else:
        pointer = b.inttoptr(address, kind.as_pointer())
        arguments = [pointer, INTS.element(width), mask, splat(kind, 0 if is_short else other)]
        loaded = call(b, f"llvm.masked.load.{name}.p0", kind, arguments)
    return from_bfloat16(b, loaded) if is_short else loaded


def _store(b: ir.IRBuilder, values: Any, place: Any, k: Any, mask: Any, *, is_short: bool = False) -> None:
    name, kind, width = ("v16i16", _HALVES, 2) if is_short else ("v16f32", FLOATS, 4)
    stored, address = to_bfloat16(b, values) if is_short else values, b.add(place, b.mul(k, INT64(width)))
    if mask is None:
        store(b, stored, address)
    else:
        pointer = b.inttoptr(address, kind.as_pointer())
        call(b, f"llvm.masked.store.{name}.p0", ir.VoidType(), [stored, pointer, INTS.element(width), mask])


def _fma(b: ir.IRBuilder, x: Any, y: Any, sums: Any) -> Any:
    return call(b, "llvm.fma.v16f32", FLOATS, [x, y, sums])


def _sum(b: ir.IRBuilder, vector: Any) -> Any:
    """Of the lanes, by halves."""
    total = vector
    for half in (8, 4, 2, 1):
        places = [ir.Constant(ir.VectorType(INTS.element, half), list(range(i, i + half))) for i in (0, half)]
        low, high = (b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), each) for each in places)
        total = b.fadd(low, high)
    return b.extract_element(total, INTS.element(0))
