# mypy: disable-error-code="no-untyped-call"
"""The product of tiles in vectors whose lanes are rows of x, in the formats of `tiles` whose words have 32 bits.

A word of the weight is broadcast and multiplied with the vectors of x that wait for it. A sum is a lane: nothing is
added across lanes. It takes its words in the order of `tile_product`: class by class, while the rows of the weight are
in the first cache. Where `few_rows` adds in an order of its own, all words are one class.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .features import IS_WIDE
from .tile_product import STEP_BYTES, TILE, TILE_BYTES, Operands, span_bytes, words_by_class
from .tiles import Format
from .vectors import FLOATS, INT64, INTS, LANES, at_most, broadcast, load, loop_over, prefetch, splat, store


def multiply(b: ir.IRBuilder, form: Format, run: int, num_a: int, num_b: int, operands: Operands) -> None:
    """Generate it: in parts, of as many weight rows and B as there are registers for their sums.

    What is to be fetched is divided among the parts.
    """
    # Else 16 registers of 8 lanes, or 32 of 4: six rows share each load of x and leave room for it, and for a weight.
    rows, width = (16 // num_b, num_b) if IS_WIDE else (6, 1)
    whole, rest = divmod(TILE, rows)
    parts_of_b = whole + (rest > 0)
    parts_of_tile = parts_of_b * (num_b // width)
    num_parts = num_a * parts_of_tile
    lines = b.sdiv(b.add(operands.fetch_lines, INT64(num_parts - 1)), INT64(num_parts))

    def part(tile: Any, first_b: int, first_row: Any, num_rows: int, place_in_tile: Any) -> None:
        lines_before = b.mul(b.add(b.mul(tile, INT64(parts_of_tile)), place_in_tile), lines)
        left = b.sub(operands.fetch_lines, lines_before)
        row = b.add(b.mul(tile, INT64(TILE)), first_row)
        place = b.add(b.mul(tile, INT64(num_b * TILE_BYTES)), b.mul(first_row, INT64(STEP_BYTES)))
        of_part = operands._replace(
            a=b.add(operands.a, b.mul(operands.a_row, row)),
            b=b.add(operands.b, b.mul(operands.row_bytes, INT64(TILE * first_b))),
            fetch=b.add(operands.fetch, b.mul(operands.row_bytes, lines_before)),
            fetch_lines=b.select(b.icmp_signed("<", left, lines), left, lines),
            sums=b.add(operands.sums, b.add(place, INT64(TILE_BYTES * first_b))),
        )
        _multiply_part(b, form, run, num_rows, width, of_part)

    def of_tile(tile: Any, _state: list[Any]) -> list[Any]:
        for first_b in range(0, num_b, width):
            first = first_b // width * parts_of_b

            def of_rows(i: Any, _state: list[Any], first_b: int = first_b, first: int = first) -> list[Any]:
                part(tile, first_b, b.mul(i, INT64(rows)), rows, b.add(i, INT64(first)))
                return []

            loop_over(b, INT64(whole), 1, [], of_rows)
            if rest:
                part(tile, first_b, INT64(TILE - rest), rest, INT64(first + whole))
        return []

    loop_over(b, INT64(num_a), 1, [], of_tile)


def _multiply_part(b: ir.IRBuilder, form: Format, run: int, num_rows: int, num_b: int, operands: Operands) -> None:
    """Sums of a weight row lie STEP_BYTES behind those of the row before it, those of a B TILE_BYTES."""
    in_digits = form.digits > 0  # sums are whole numbers
    sum_type, add = (INTS, b.add) if in_digits else (FLOATS, b.fadd)
    zeros, word_type = splat(sum_type, 0), form.weight_vector.element
    places = [
        b.add(operands.sums, INT64(STEP_BYTES * i + TILE_BYTES * j)) for i in range(num_rows) for j in range(num_b)
    ]
    for place in places:
        store(b, zeros, place)
    classes = words_by_class(run)
    b_step = TILE * STEP_BYTES // len(classes)  # of a class

    def of_class(i: int, first_k: Any, size: Any, fetched: tuple[Any, Any]) -> None:
        """Its products, added to the sums."""
        start = b.add(operands.a, first_k)
        rows = [b.add(start, b.mul(operands.a_row, INT64(row))) for row in range(num_rows)]
        column = b.add(operands.b, b.mul(first_k, INT64(TILE)))
        column = b.add(column, b.mul(size, INT64(i * b_step // STEP_BYTES)))
        turned = [b.add(column, b.mul(operands.row_bytes, INT64(TILE * j))) for j in range(num_b)]
        fetch_bytes = b.mul(b.sub(fetched[1], fetched[0]), INT64(STEP_BYTES))
        first_line = b.add(operands.fetch, b.mul(first_k, operands.fetch_lines))
        first_line = b.add(first_line, b.mul(fetched[0], INT64(STEP_BYTES)))

        def step(k: Any, sums: list[Any]) -> list[Any]:
            lines = b.add(first_line, b.mul(k, operands.fetch_lines))

            def fetch_line(offset: Any, _state: list[Any]) -> list[Any]:
                prefetch(b, b.add(lines, offset), level=2)
                return []

            with b.if_then(b.icmp_signed(">", fetch_bytes, INT64(0))):
                loop_over(b, fetch_bytes, STEP_BYTES, [], fetch_line)
            starts = [b.add(row, k) for row in rows]
            for place_of_word, word in enumerate(classes[i]):
                place = b.add(b.mul(k, INT64(b_step // STEP_BYTES)), INT64(STEP_BYTES * place_of_word))
                vectors = [load(b, b.add(start, place), form.x_vector) for start in turned]
                totals, sums = iter(sums), []
                for row in starts:
                    weight = load(b, b.add(row, INT64(4 * word)), word_type)
                    weights = broadcast(b, weight, LANES)
                    # Bytes of x are unsigned, those of the weight signed: the other way round than in `tiles`.
                    factors = [(weights, x) if in_digits else (x, weights) for x in vectors]
                    sums += [form.multiply(b, *each, next(totals)) for each in factors]
            return sums

        for total, place in zip(loop_over(b, size, STEP_BYTES, [zeros] * len(places), step), places, strict=True):
            store(b, add(load(b, place, sum_type), total), place)

    def span(first_k: Any, _state: list[Any]) -> list[Any]:
        size, line = at_most(b, b.sub(operands.row_bytes, first_k), INT64(span_bytes(run))), INT64(0)
        for i in range(len(classes)):
            behind = b.sdiv(b.mul(operands.fetch_lines, INT64(i + 1)), INT64(len(classes)))
            of_class(i, first_k, size, (line, behind))
            line = behind
        return []

    loop_over(b, operands.row_bytes, span_bytes(run), [], span)
