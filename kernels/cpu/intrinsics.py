# mypy: disable-error-code="untyped-decorator, call-arg"
# ruff: noqa: ARG001 (numba looks at the names of what is generated from)
"""What compiled functions need of memory and threads, and Numba does not offer."""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """The void pointer of an integer address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address and return what it was, in one indivisible and ordered operation."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _int64_at(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fetch_max(typing_context: Any, address: Any, value: Any) -> Any:
    """Raise the int64 at an address to a value, if it is less, and return what it was; likewise."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("max", _int64_at(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Store an int64 at an address and return what it was; likewise."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _int64_at(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store an int64 at an address if what is there is as expected, and say whether it was; likewise."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(_int64_at(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def load_acquire(typing_context: Any, address: Any) -> Any:
    """The int64 at an address. What a thread wrote before it stored that is seen behind this."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_int64_at(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def load_in_order(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, behind every `exchange` that this thread has made before."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_int64_at(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing_context: Any, address: Any, value: Any) -> Any:
    """Store an int64 at an address, behind everything that was written before."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _int64_at(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def call_address(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call `void function(void *)` at an address."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    """A moment's rest in a loop that waits for another core."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ticks(typing_context: Any) -> Any:
    """A clock that is read in some nanoseconds: a TSC's cycles on x86, always 0 elsewhere."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if IS_X86:
            kind = ir.FunctionType(_INT64, [])
            return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", [], kind), [])
        return _INT64(0)

    return types.int64(), generate


@intrinsic
def give_way(typing_context: Any) -> Any:
    """Let another thread have this core, if one waits for it: `sched_yield`."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        name = "sched_yield"
        function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_INT32, []), name)
        return builder.call(function, [])

    return types.int32(), generate


@intrinsic
def current_core(typing_context: Any) -> Any:
    """The number of the core that the calling thread runs on just now: `sched_getcpu`. Always 0 outside of Linux."""

    def generate(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if sys.platform != "linux":
            return _INT64(0)
        name = "sched_getcpu"
        function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(_INT32, []), name)
        return builder.zext(builder.call(function, []), _INT64)

    return types.int64(), generate


@intrinsic
def widened(typing_context: Any, number: Any) -> Any:
    """A float32 from one, or from the bits of a bfloat16 (uint16), which are its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if number == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _INT32), _INT32(16)), _FLOAT)

    return (types.float32(number), generate) if number in (types.float32, types.uint16) else None


@intrinsic
def narrowed(typing_context: Any, number: Any, like: Any) -> Any:
    """The way back, to the type of `like`: to the nearest, ties to even. NaN stays NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _INT32)
        odd = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _INT32(0x7FFF)), odd), _INT32(16))
        not_a_number = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.trunc(builder.select(not_a_number, _INT32(0x7FC0), rounded), ir.IntType(16))

    return (like(types.float32, like), generate) if like in (types.float32, types.uint16) else None


def _int64_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT64.as_pointer())
