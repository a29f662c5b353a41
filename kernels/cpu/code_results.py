# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""What becomes of the totals that `code_tiles.multiply` leaves: rows of results, or of gates and ups their product."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .code_words import WIDTH
from .exponential import GATES, gated
from .tile_product import STEP_BYTES
from .vectors import (
    FLOATS,
    INT16,
    INT64,
    LANES,
    from_bfloat16,
    joined,
    load,
    loop_over,
    splat,
    store,
    to_bfloat16,
    to_bfloat16_by_instruction,
)

_HALVES = ir.VectorType(INT16, LANES)


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    activation: Any,
    short: Any,
    bias_short: Any,
    totals: Any,
    totals_step: Any,
    num_rows: Any,
    bias: Any,
    bias_step: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Store the totals of WIDTH panels, with their bias if its address is not 0, as rows of results side by side; or,
    where `activation` is not "", those of a panel of gates and one of ups as activation(gate) * up.

    From a panel to the next are `totals_step` bytes of totals and `bias_step` of biases. The first three are constants;
    `short`: results, and biases, are bfloat16 and not float32.
    """
    factors, is_short = GATES.get(activation.literal_value), short.literal_value

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        totals, totals_step, num_rows, bias, bias_step, out, out_row = arguments[3:]
        added = [_bias(b, bias, b.mul(bias_step, INT64(j)), bias_short.literal_value) for j in range(WIDTH)]

        def of_row(row: Any, _state: list[Any]) -> list[Any]:
            start = b.add(totals, b.mul(row, INT64(STEP_BYTES)))
            places = [b.add(start, b.mul(totals_step, INT64(j))) for j in range(WIDTH)]
            results = [b.fadd(load(b, place, FLOATS), each) for place, each in zip(places, added, strict=True)]
            target = b.add(out, b.mul(row, out_row))
            if factors is not None:
                scale, cube = (splat(FLOATS, factor) for factor in factors)
                gate, up = results
                product = gated(b, gate, up, (scale, cube))
                store(b, to_bfloat16(b, product) if is_short else product, target)
            elif is_short:
                store(b, to_bfloat16_by_instruction(b, *results), target)
            else:
                for j, result in enumerate(results):
                    store(b, result, b.add(target, INT64(STEP_BYTES * j)))
            return []

        loop_over(b, num_rows, 1, [], of_row)
        return context.get_dummy_value()

    return types.void(activation, short, bias_short, *[types.int64] * 7), generate


def _bias(b: ir.IRBuilder, bias: Any, offset: Any, is_short: bool) -> Any:
    """Of a panel's 16 rows, as float32; what changes nothing where there is none."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", bias, INT64(0))):
        place = b.add(bias, offset)
        given = from_bfloat16(b, load(b, place, _HALVES)) if is_short else load(b, place, FLOATS)
        inside = b.block
    return joined(b, (splat(FLOATS, -0.0), before), (given, inside))
