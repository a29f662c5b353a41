# mypy: disable-error-code="untyped-decorator"
"""What compiled functions need of memory and Numba does not offer."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 (numba matches the names)
    """The void pointer of an integer address."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, amount: Any) -> Any:  # noqa: ARG001
    """Add to the int64 at an address and return what it was, in one indivisible and ordered operation."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate
