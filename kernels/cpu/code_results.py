# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
# mypy: disable-error-code="misc, untyped-decorator"
"""What becomes of the totals that products of codes leave (`code_tiles`, `dot_vectors`, `byte_vectors`): rows of
results, or of gates and ups their product.

Memory of some rows, int64: the address of their totals, [panel][row][row of the panel], panels PANEL_TOTALS apart, and
how many there are; that of biases or 0, and the bytes from a panel's to the next one's; where they go, and the bytes
from a row to the next there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .code_words import PANEL_TOTALS, WIDTH, Step
from .exponential import GATES, Gate, gated
from .features import cpu_features
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

# Words of the memory of rows.
TOTALS, COUNT, BIASES, BIASES_STEP, RESULTS, RESULTS_STEP, NUM_WORDS = range(7)

_HALVES = ir.VectorType(INT16, LANES)


class Form(NamedTuple):
    """What results are."""

    activation: str  # "", or activation(gate) * up of a panel of gates and one of ups
    is_short: bool  # bfloat16 and not float32
    has_short_bias: bool


class ResultRows:
    """Generates how rows of results are stored. `address`: that of their memory."""

    def __init__(self, b: ir.IRBuilder, form: Form, address: Any) -> None:
        self._b, self._form = b, form
        words = [load(b, b.add(address, INT64(8 * word)), INT64) for word in range(NUM_WORDS)]
        self._totals, self._num_rows, bias, bias_step, self._out, self._out_row = words
        steps = [b.mul(bias_step, INT64(j)) for j in range(WIDTH)]
        self._biases = [_bias(b, bias, step, form.has_short_bias) for step in steps]

    def all(self) -> None:
        with self._b.if_then(self._b.icmp_signed(">", self._num_rows, INT64(0))):
            self._some(INT64(0), self._num_rows)

    def in_shares(self, num_shares: Any) -> Callable[[Any], list[Step]]:
        """What gives, by the number of a share of them, the step that stores it: all together store all rows."""
        b = self._b
        size = b.sdiv(b.add(self._num_rows, b.sub(num_shares, INT64(1))), num_shares)

        def share(k: Any) -> None:
            first = b.mul(k, size)
            left = b.sub(self._num_rows, first)
            count = b.select(b.icmp_signed("<", left, size), left, size)
            with b.if_then(b.icmp_signed(">", count, INT64(0))):
                self._some(first, count)

        return lambda k: [lambda: share(k)]

    def _some(self, first: Any, count: Any) -> None:
        def step(i: Any, _state: list[Any]) -> list[Any]:
            self._one(self._b.add(first, i))
            return []

        loop_over(self._b, count, 1, [], step)

    def _one(self, row: Any) -> None:
        b, numbers, is_short = self._b, GATES.get(self._form.activation), self._form.is_short
        start = b.add(self._totals, b.mul(row, INT64(STEP_BYTES)))
        places = [b.add(start, INT64(PANEL_TOTALS * j)) for j in range(WIDTH)]
        results = [b.fadd(load(b, place, FLOATS), bias) for place, bias in zip(places, self._biases, strict=True)]
        target = b.add(self._out, b.mul(row, self._out_row))
        if numbers is not None:
            gate, up = results
            product = gated(b, gate, up, Gate(*(splat(FLOATS, number) for number in numbers)))
            store(b, to_bfloat16(b, product) if is_short else product, target)
        elif is_short and "avx512bf16" in cpu_features():
            store(b, to_bfloat16_by_instruction(b, *results), target)
        else:
            for j, result in enumerate(results):
                found, size = (to_bfloat16(b, result), 2) if is_short else (result, 4)
                store(b, found, b.add(target, INT64(size * LANES * j)))


@intrinsic(prefer_literal=True)
def finish(typing_context: Any, activation: Any, short: Any, bias_short: Any, rows: Any) -> Any:
    """Store rows of results. `rows`: the address of their memory; the others are constants, see `Form`."""
    form = Form(activation.literal_value, short.literal_value, bias_short.literal_value)

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        ResultRows(b, form, arguments[3]).all()
        return context.get_dummy_value()

    return types.void(activation, short, bias_short, types.int64), generate


def _bias(b: ir.IRBuilder, bias: Any, offset: Any, is_short: bool) -> Any:
    """Of a panel's 16 rows, as float32; what changes nothing where there is none."""
    before = b.block
    with b.if_then(b.icmp_signed("!=", bias, INT64(0))):
        place = b.add(bias, offset)
        given = from_bfloat16(b, load(b, place, _HALVES)) if is_short else load(b, place, FLOATS)
        inside = b.block
    return joined(b, (splat(FLOATS, -0.0), before), (given, inside))
