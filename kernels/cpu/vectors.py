"""Words to write LLVM vectors with, for kernels that the compiler does not find in loops over scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from .features import IS_WIDE, cpu_features

LANES = 16  # of float32 and int32 in a vector
FLOAT, INT8, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
INT8S, BYTES = ir.VectorType(INT8, LANES), ir.VectorType(INT8, LANES * 4)


class _BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has no such type; LLVM's name for it is enough to cast to it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), LANES * 2)


def call(b: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, function_type, name), arguments)


def splat(vector: ir.VectorType, value: float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def load(b: ir.IRBuilder, address: Any, element: ir.Type) -> Any:
    loaded = b.load(b.inttoptr(address, element.as_pointer()))
    loaded.align = 1
    return loaded


def store(b: ir.IRBuilder, value: Any, address: Any) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def prefetch(b: ir.IRBuilder, address: Any, level: int = 1, *, to_write: bool = False) -> None:
    """Into the caches from this level on, which LLVM counts from 3 downwards, to read or to write; the 1 says: data."""
    place = b.inttoptr(address, INT8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [place, INT32(int(to_write)), INT32(4 - level), INT32(1)])


def take(b: ir.IRBuilder, vector: Any, places: Sequence[int], other: Any = None) -> Any:
    """A vector of some lanes of a vector, or of two laid end to end."""
    mask = ir.Constant(ir.VectorType(INT32, len(places)), list(places))
    return b.shuffle_vector(vector, other or ir.Constant(vector.type, ir.Undefined), mask)


def broadcast(b: ir.IRBuilder, value: Any, count: int) -> Any:
    single = b.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, INT32(0))
    return take(b, single, [0] * count)


def load_repeated(b: ir.IRBuilder, address: Any, element: ir.Type, offset: int = 0) -> Any:
    """What is `offset` bytes behind an address, in all lanes."""
    place = b.add(address, INT64(offset)) if offset else address
    return broadcast(b, load(b, place, element), LANES)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32, rounded once."""
    return call(b, "llvm.fma.v16f32", FLOATS, [x, y, z])


def dot_bfloat16(b: ir.IRBuilder, x: Any, weights: Any, sums: Any) -> Any:
    """Add to each lane the products of two numbers."""
    operands = [b.bitcast(x, BFLOATS), b.bitcast(weights, BFLOATS)]
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [sums, *operands])


def in_order(b: ir.IRBuilder, vectors: Sequence[Any]) -> list[Any]:
    """The same vectors, of which none is used further before all are there: for LLVM, which else has what follows
    behind each of them, where it has to wait for that one alone. The CPU sees nothing of it. For AVX-512 alone."""
    kinds, count = [vector.type for vector in vectors], len(vectors)
    nothing = ir.InlineAsm(
        ir.FunctionType(ir.LiteralStructType(kinds), kinds),
        "",
        ",".join([*["=v"] * count, *map(str, range(count))]),
    )
    together = b.call(nothing, vectors)
    return [b.extract_value(together, i) for i in range(count)]


def sum_lanes(b: ir.IRBuilder, vectors: Sequence[Any]) -> Any:
    """The totals of four vectors, of float32 or int32, in one of four lanes.

    Each is (0 + 2) + (1 + 3) of its quarters, and a quarter the same of its lanes.
    """
    return join_lanes(b, vectors, b.fadd if vectors[0].type == FLOATS else b.add)


def largest_lanes(b: ir.IRBuilder, vectors: Sequence[Any]) -> Any:
    """The largest lanes of four vectors of int32, in one of four lanes."""
    return join_lanes(b, vectors, lambda first, second: b.select(b.icmp_signed(">", first, second), first, second))


def join_lanes(b: ir.IRBuilder, vectors: Sequence[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Vectors are interleaved before they are joined, so that no lane is wasted."""

    def interleave(two: Sequence[Any], low: Sequence[int], high: Sequence[int]) -> Any:
        lanes = [[quarter + i for quarter in range(0, LANES, 4) for i in half] for half in (low, high)]
        return join(*(take(b, two[0], half, two[1]) for half in lanes))

    pairs = [interleave(vectors[i : i + 2], (0, 16, 1, 17), (2, 18, 3, 19)) for i in (0, 2)]
    quarters = interleave(pairs, (0, 1, 16, 17), (2, 3, 18, 19))
    halves = join(take(b, quarters, range(8)), take(b, quarters, range(8, 16)))
    return join(take(b, halves, range(4)), take(b, halves, range(4, 8)))


def at_most(b: ir.IRBuilder, value: Any, limit: Any) -> Any:
    return b.select(b.icmp_signed("<", value, limit), value, limit)


def join_quarters(b: ir.IRBuilder, quarters: Sequence[Any]) -> Any:
    """Four vectors laid end to end."""
    count = quarters[0].type.count
    halves = [take(b, quarters[i], range(2 * count), quarters[i + 1]) for i in (0, 2)]
    return take(b, halves[0], range(4 * count), halves[1])


def repeat_quarter(b: ir.IRBuilder, quarter: Any) -> Any:
    """A vector laid end to end with itself, four times."""
    return take(b, quarter, list(range(quarter.type.count)) * 4)


def turn_quarters(b: ir.IRBuilder, vectors: Sequence[Any]) -> list[Any]:
    """Four vectors are a 4 x 4 matrix of quarters; its columns."""

    def meet(low: Any, high: Any, which: int) -> Any:
        """Quarters 0 and 2 of both (`which` 0), or 1 and 3."""
        quarters = [LANES * end + LANES // 4 * (2 * half + which) for end in (0, 1) for half in (0, 1)]
        return take(b, low, [first + i for first in quarters for i in range(LANES // 4)], high)

    halves = [[meet(low, high, which) for low, high in (vectors[:2], vectors[2:])] for which in (0, 1)]
    return [meet(halves[column % 2][0], halves[column % 2][1], column // 2) for column in range(4)]


def add_quarters(b: ir.IRBuilder, totals: Any, sums: Any) -> Any:
    """To each of four lanes, those of a quarter of a vector of 16, one after the other."""
    quarter = LANES // 4
    if IS_WIDE:
        lanes = [take(b, sums, range(lane, LANES, quarter)) for lane in range(quarter)]
    else:  # a 4 x 4 transpose in registers of four lanes, which LLVM does not find
        first, second, third, fourth = (take(b, sums, range(i, i + quarter)) for i in range(0, LANES, quarter))
        lanes = []
        for places in ((0, 4, 1, 5), (2, 6, 3, 7)):
            left, right = take(b, first, places, second), take(b, third, places, fourth)
            lanes += [take(b, left, half, right) for half in ((0, 1, 4, 5), (2, 3, 6, 7))]
    for lane in lanes:
        totals = b.fadd(totals, lane)
    return totals


def joined(b: ir.IRBuilder, *branches: tuple[Any, Any]) -> Any:
    joined = b.phi(branches[0][0].type)
    for value, block in branches:
        joined.add_incoming(value, block)
    return joined


def from_bfloat16(b: ir.IRBuilder, halves: Any) -> Any:
    count = halves.type.count
    wide = b.zext(halves, ir.VectorType(INT32, count))
    return b.bitcast(b.shl(wide, splat(wide.type, 16)), ir.VectorType(FLOAT, count))


def load_numbers(b: ir.IRBuilder, address: Any, size: int) -> Any:
    """LANES numbers of so many bytes, float32 (4) or bfloat16 (2), as float32."""
    return load(b, address, FLOATS) if size == 4 else from_bfloat16(b, load(b, address, ir.VectorType(INT16, LANES)))


def from_float8(b: ir.IRBuilder, codes: Any) -> Any:
    """e4m3fn (`kernels.fp8`), as int8, become float32. An exponent is 120 less there; for subnormal numbers, see
    `widen_halves`."""
    ints, floats = ir.VectorType(INT32, codes.type.count), ir.VectorType(FLOAT, codes.type.count)
    bits = b.zext(codes, ints)
    magnitude = b.shl(b.and_(bits, splat(ints, 0x7F)), splat(ints, 20))
    least = splat(ints, 121 << 23)
    subnormal = b.bitcast(b.fsub(b.bitcast(b.add(magnitude, least), floats), b.bitcast(least, floats)), ints)
    is_normal = b.icmp_signed(">=", magnitude, splat(ints, 1 << 23))
    number = b.select(is_normal, b.add(magnitude, splat(ints, 120 << 23)), subnormal)
    number = b.select(b.icmp_signed("==", magnitude, splat(ints, 0x7F << 20)), splat(ints, 0x7FC00000), number)
    return b.bitcast(b.or_(number, b.shl(b.and_(bits, splat(ints, 0x80)), splat(ints, 24))), floats)


def float8_to_bfloat16(b: ir.IRBuilder, codes: Any) -> Any:
    """LANES of e4m3fn, as int8, become bfloat16, as int16, on CPUs with avx512bw: see `from_float8`. Here subnormal
    numbers, of which there are eight, are looked up."""
    words = ir.VectorType(INT16, LANES)
    bits = b.zext(codes, words)
    magnitude = b.and_(bits, splat(words, 0x7F))
    table = [int(np.float32(code * 2.0**-9).view(np.uint32)) >> 16 for code in range(8)]
    subnormal = call(b, "llvm.x86.avx512.permvar.hi.256", words, [ir.Constant(words, 2 * table), magnitude])
    normal = b.add(b.shl(magnitude, splat(words, 4)), splat(words, 120 << 7))
    number = b.select(b.icmp_unsigned("<", magnitude, splat(words, 8)), subnormal, normal)
    number = b.select(b.icmp_unsigned("==", magnitude, splat(words, 0x7F)), splat(words, 0x7FC0), number)
    return b.or_(number, b.shl(b.and_(bits, splat(words, 0x80)), splat(words, 8)))


def widen_halves(b: ir.IRBuilder, halves: Any) -> Any:
    """float16, as int16, become float32: by an instruction where the CPU has it.

    By whole numbers, an exponent of float16 is 112 less. Subnormal numbers are given the first one above theirs, and
    lose it again by a subtraction: to multiply them would take a hundred cycles.
    """
    ints = ir.VectorType(INT32, halves.type.count)
    if "f16c" in cpu_features():
        return b.fpext(
            b.bitcast(halves, ir.VectorType(ir.HalfType(), halves.type.count)), ir.VectorType(FLOAT, halves.type.count)
        )
    floats, bits = ir.VectorType(FLOAT, halves.type.count), b.zext(halves, ints)
    magnitude = b.shl(b.and_(bits, splat(ints, 0x7FFF)), splat(ints, 13))
    normal = b.add(magnitude, splat(ints, 112 << 23))
    least = splat(ints, 113 << 23)
    subnormal = b.bitcast(b.fsub(b.bitcast(b.add(magnitude, least), floats), b.bitcast(least, floats)), ints)
    number = b.select(b.icmp_signed("<", magnitude, splat(ints, 0x400 << 13)), subnormal, normal)
    is_finite = b.icmp_signed("<", magnitude, splat(ints, 0x7C00 << 13))
    number = b.select(is_finite, number, b.or_(magnitude, splat(ints, 0x7F800000)))
    return b.bitcast(b.or_(number, b.shl(b.and_(bits, splat(ints, 0x8000)), splat(ints, 16))), floats)


def to_bfloat16(b: ir.IRBuilder, values: Any) -> Any:
    """To the nearest, ties to even, like torch; NaN stays NaN."""
    ints = ir.VectorType(INT32, values.type.count)
    bits, sixteen = b.bitcast(values, ints), splat(ints, 16)
    odd = b.and_(b.lshr(bits, sixteen), splat(ints, 1))
    rounded = b.lshr(b.add(b.add(bits, splat(ints, 0x7FFF)), odd), sixteen)
    rounded = b.select(b.fcmp_unordered("uno", values, values), splat(ints, 0x7FC0), rounded)
    return b.trunc(rounded, ir.VectorType(INT16, values.type.count))


def to_bfloat16_pairs(b: ir.IRBuilder, low: Any, high: Any) -> Any:
    """The vector of words that have a lane of `low` in their lower half and one of `high` in their upper half.

    By an instruction of avx512bf16 where the CPU has it, which takes numbers below the smallest normal one for zero.
    """
    if "avx512bf16" not in cpu_features():
        lower, upper = (b.zext(to_bfloat16(b, vector), INTS) for vector in (low, high))
        return b.or_(lower, b.shl(upper, splat(INTS, 16)))
    both = to_bfloat16_by_instruction(b, low, high)
    return b.bitcast(take(b, both, [i // 2 + LANES * (i % 2) for i in range(LANES * 2)]), INTS)


def to_bfloat16_by_instruction(b: ir.IRBuilder, low: Any, high: Any) -> Any:
    """Two vectors of float32, one behind the other, on CPUs with avx512bf16: see `to_bfloat16_pairs`."""
    together = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BFLOATS, [high, low])
    return b.bitcast(together, ir.VectorType(INT16, LANES * 2))


def turn_words(b: ir.IRBuilder, columns: list[Any]) -> list[Any]:
    """8 or 16 vectors of 16 words, turned and laid end to end: riffling the upper half of them into the lower one turns
    the bits of a word's place by one, and must turn as many as their number has."""
    lower, upper = ([i // 2 + LANES * (i % 2) + start for i in range(LANES)] for start in (0, LANES // 2))
    half = len(columns) // 2
    for _ in range(half.bit_length()):
        pairs = zip(columns[:half], columns[half:], strict=True)
        columns = [take(b, low, places, high) for low, high in pairs for places in (lower, upper)]
    return columns


def by_value(b: ir.IRBuilder, value: Any, options: Sequence[int], generate: Callable[[int], None]) -> None:
    """What is generated for that of some numbers which a value has when it runs."""
    for option in options:
        with b.if_then(b.icmp_signed("==", value, INT64(option))):
            generate(option)


def by_least(b: ir.IRBuilder, value: Any, options: Sequence[int], generate: Callable[[int], None]) -> None:
    """What is generated for the least of some rising numbers that is no less than a value, which is above 0."""
    for fewer, option in zip((0, *options), options, strict=False):
        is_it = b.and_(b.icmp_signed(">", value, INT64(fewer)), b.icmp_signed("<=", value, INT64(option)))
        with b.if_then(is_it):
            generate(option)


def rows_at(b: ir.IRBuilder, start: Any, step: Any, num_rows: Any, count: int) -> list[Any]:
    """The addresses of `count` rows, `step` bytes from one to the next; behind the last of `num_rows`, its own."""
    last = b.sub(num_rows, INT64(1))
    numbers = [at_most(b, INT64(i), last) for i in range(count)]
    return [b.add(start, b.mul(step, number)) for number in numbers]


def loop_over(
    b: ir.IRBuilder,
    end: Any,
    step: int,
    start: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    *,
    may_unroll: bool = True,
) -> list[Any]:
    """`state = body(k, state)` for k = 0, step, ... below `end`, at least once. Returns the last state.

    Where LLVM unrolls a loop, it brings what waits for one another together: if that is much, it must not.
    """
    before, loop, after = b.block, b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(loop)
    b.position_at_end(loop)
    k, state = b.phi(INT64), [b.phi(value.type) for value in start]
    k.add_incoming(INT64(0), before)
    for phi, value in zip(state, start, strict=True):
        phi.add_incoming(value, before)
    new = body(k, list(state))
    next_k = b.add(k, INT64(step))
    k.add_incoming(next_k, b.block)
    for phi, value in zip(state, new, strict=True):
        phi.add_incoming(value, b.block)
    branch = b.cbranch(b.icmp_signed("<", next_k, end), loop, after)
    if not may_unroll:
        never = b.module.add_metadata([ir.MetaDataString(b.module, "llvm.loop.unroll.disable")])
        branch.set_metadata("llvm.loop", _of_itself(b.module, never))
    b.position_at_end(after)
    return new


def _of_itself(module: ir.Module, hint: Any) -> Any:
    """What tells LLVM a hint about a loop: metadata whose first operand is itself."""
    made = ir.values.MDValue(module, [hint], name=str(len(module.metadata)))
    made.operands = (made, hint)
    return made
