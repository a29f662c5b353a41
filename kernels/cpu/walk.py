# mypy: disable-error-code="misc, untyped-decorator"
"""Words to go along a row of numbers in LLVM vectors. They are at an address, float32 or bfloat16; its last ones are
read and written under a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .vectors import (
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

_HALVES = ir.VectorType(INT16, LANES)


def walk(b: ir.IRBuilder, count: Any, start: list[Any], step: Callable[[Any, Any, list[Any]], list[Any]]) -> list[Any]:
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


def load_lanes(b: ir.IRBuilder, place: Any, k: Any, mask: Any, other: float, *, is_short: bool = False) -> Any:
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


def store_lanes(b: ir.IRBuilder, values: Any, place: Any, k: Any, mask: Any, *, is_short: bool = False) -> Any:
    """Returns what is stored, as float32."""
    name, kind, width = ("v16i16", _HALVES, 2) if is_short else ("v16f32", FLOATS, 4)
    stored, address = to_bfloat16(b, values) if is_short else values, b.add(place, b.mul(k, INT64(width)))
    if mask is None:
        store(b, stored, address)
    else:
        pointer = b.inttoptr(address, kind.as_pointer())
        call(b, f"llvm.masked.store.{name}.p0", ir.VoidType(), [stored, pointer, INTS.element(width), mask])
    return from_bfloat16(b, stored) if is_short else stored


def sum_of(b: ir.IRBuilder, vector: Any) -> Any:
    """Of the lanes, by halves."""
    total = vector
    for half in (8, 4, 2, 1):
        places = [ir.Constant(ir.VectorType(INTS.element, half), list(range(i, i + half))) for i in (0, half)]
        low, high = (b.shuffle_vector(total, ir.Constant(total.type, ir.Undefined), each) for each in places)
        total = b.fadd(low, high)
    return b.extract_element(total, INTS.element(0))
