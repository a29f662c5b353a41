"""The sizes of the tiles that the kernels work in: a fixed table, `tiles.json`, so that nothing is tuned at start.

A section per device class (`sm90` is an H100 or H200) and `any` for what has none; in it, an entry per kernel and kind
of work. A name that ends with a detail goes before the one without it:

    attention.short.d128.bf16.block256        attention.short.d128.bf16        (the first that there is)

Sizes may depend on shapes that a deployment fixes (head size, block size, dtype) and on the padded number of rows,
never on what else is in a batch. `quire bench kernels --tune` measures the candidates on the GPU at hand and writes its
section; `measured` of a section says of which entries that was done, and where, `source` whence the others are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..dispatch import LARGEST_GPU_HEAD
from . import devices

PATH = Path(__file__).with_name("tiles.json")
ANY = "any"


@dataclass(frozen=True, slots=True)
class AttentionTile:
    block_m: int  # rows: query tokens times the query heads of a group; at least the group, rounded up
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int  # loads under way in the loop over keys


@dataclass(frozen=True, slots=True)
class GemmTile:
    block_m: int  # rows of x
    block_n: int  # rows of the weight
    block_k: int  # of `in_features`, per iteration
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowTile:
    """Of one row of x."""

    block_n: int  # rows of the weight; of a packed one, whole panels
    block_k: int  # of `in_features`, per iteration
    num_warps: int


Tile = TypeVar("Tile", AttentionTile, GemmTile, RowTile)
AnyTile = AttentionTile | GemmTile | RowTile


def attention(
    device: torch.device, *, short: bool, head_dim: int, dtype: torch.dtype, fp8: bool, block_size: int
) -> AttentionTile:
    """For heads of `head_dim` rounded up, queries of `dtype`, and a cache that may be in 8 bits."""
    if head_dim > LARGEST_GPU_HEAD:
        raise ValueError(f"attention on a GPU takes heads of up to {LARGEST_GPU_HEAD} numbers, got {head_dim}")
    kind = "float32" if dtype == torch.float32 else "fp8" if fp8 else "bf16"
    name = (
        f"attention.{'short' if short else 'long'}.d{64 if head_dim <= 64 else 128 if head_dim <= 128 else 256}.{kind}"
    )
    return _find(AttentionTile, device, f"{name}.block{block_size}", name)


def gemm(device: torch.device, kernel: str, *, num_rows: int, dtype: torch.dtype) -> GemmTile:
    """For a `kernel` that multiplies about `num_rows` rows of `dtype` with a weight."""
    kind = "float32" if dtype == torch.float32 else "bf16"
    size = next((rows for rows in (16, 32, 64) if num_rows <= rows), 128)
    return _find(GemmTile, device, f"{kernel}.m{size}.{kind}")


def row(device: torch.device, out_features: int) -> RowTile:
    """For one row that is multiplied with a weight of so many rows."""
    size = next((rows for rows in (2048, 4096, 8192) if out_features <= rows), "more")
    return _find(RowTile, device, f"row.n{size}.bf16")


def packed_row(device: torch.device) -> RowTile:
    """For one row that is multiplied with a packed weight."""
    return _find(RowTile, device, "packed.m1")


def device_class(device: torch.device) -> str:
    """The section of the table that is a device's own, if it has one."""
    capability = devices.capability(device)
    return ANY if capability is None else f"sm{capability[0]}{capability[1]}"


def read() -> dict[str, dict[str, Any]]:
    """The table as it lies in the tree."""
    table: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
    return table


def write_section(section: str, entries: dict[str, AnyTile], where: str) -> None:
    """Replace these entries of a section, which were measured somewhere; others stay."""
    table = read()
    old = table.get(section, table[ANY])
    tiles = {name: list(asdict(tile).values()) for name, tile in entries.items()}
    table[section] = {
        "source": old["source"],
        "measured": dict(sorted({**old.get("measured", {}), **dict.fromkeys(entries, where)}.items())),
        "tiles": dict(sorted({**old["tiles"], **tiles}.items())),
    }
    whole = PATH.with_suffix(".new")  # nobody ever finds half a table
    whole.write_text(format_table(table))
    os.replace(whole, PATH)
    _table.cache_clear()


def format_table(table: dict[str, dict[str, Any]]) -> str:
    """JSON with an entry a line."""
    sections = []
    for section, content in table.items():
        fields = [f'  "source": {json.dumps(content["source"])}']
        for field in ("measured", "tiles"):
            if field in content:
                lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(of)}" for name, of in content[field].items())
                fields.append(f'  "{field}": {{\n{lines}\n  }}')
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(fields) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


@contextmanager
def overridden(entry: str, tile: AnyTile) -> Iterator[None]:
    """For measurements only: an entry is another inside."""
    _overrides[entry] = tile
    try:
        yield
    finally:
        del _overrides[entry]


_overrides: dict[str, AnyTile] = {}


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    return {section: content["tiles"] for section, content in read().items()}


def _find(kind: type[Tile], device: torch.device, *names: str) -> Tile:
    table = _table()
    for name in names:
        override = _overrides.get(name)
        if isinstance(override, kind):
            return override
    for section in (device_class(device), ANY):
        for name in names:
            entry = table.get(section, {}).get(name)
            if entry is not None:
                return kind(**dict(zip((field.name for field in fields(kind)), entry, strict=True)))
    raise LookupError(f"{PATH.name} has none of {', '.join(names)}")
