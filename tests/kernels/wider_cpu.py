"""A pytest plugin: this x86 CPU plays one whose registers are twice as wide, and which multiplies bfloat16 and bytes.

LLVM makes two vectors of each that is too wide, and the instructions that are missing are written out. So the tiles are
those of the other CPU, where each number comes from and goes to, and only their speed is not. Compiled code must not
get into the caches of others: `NUMBA_CACHE_DIR` has to name another folder.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import quire.kernels


def _without_its_package(name: str) -> Any:
    """A module of `quire.kernels.cpu`, before anybody has taken anything from it."""
    full_name = f"quire.kernels.cpu.{name}"
    spec = importlib.util.spec_from_file_location(full_name, Path(quire.kernels.__file__).parent / "cpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    assert full_name not in sys.modules
    module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_without_its_package("features").IS_WIDE = True

from quire.kernels.cpu import byte_products, digits, heads, linear, prompt_tiles, tiles  # noqa: E402
from quire.kernels.cpu.vectors import INTS, splat  # noqa: E402


def _dot_bfloat16(b: Any, x: Any, weights: Any, sums: Any) -> Any:
    x, weights = (tiles._widen_bfloat16(b, b.bitcast(pairs, INTS)) for pairs in (x, weights))
    return tiles._fma_bfloat16(b, x, weights, sums)


def _dot_int8(b: Any, x: Any, weights: Any, sums: Any) -> Any:
    """Of four bytes of x and four unsigned ones of the weights, in each word."""
    for shift in (0, 8, 16, 24):
        signed = b.ashr(b.shl(x, splat(INTS, 24 - shift)), splat(INTS, 24))
        sums = b.add(sums, b.mul(signed, b.and_(b.lshr(weights, splat(INTS, shift)), splat(INTS, 255))))
    return sums


for _name, _multiply in (("bfloat16 dot", _dot_bfloat16), ("int8 dot", _dot_int8), ("int8 digit", _dot_int8)):
    tiles.FORMATS[_name] = replace(tiles.FORMATS[_name], multiply=_multiply, needs=None)
digits.dot_int8, heads.dot_bfloat16, prompt_tiles.PRODUCT = _dot_int8, _dot_bfloat16, "bfloat16 dot"
byte_products.PRODUCTS.update(dict.fromkeys(byte_products.PRODUCTS, byte_products.DOT._replace(dot=_dot_int8)))
byte_products.has_products = linear.has_products = lambda: True
