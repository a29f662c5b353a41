"""How results are shown: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .latency import Distribution, Summary


def show_facts(console: Console, facts: dict[str, str]) -> None:
    """`name: value`, several on a line."""
    console.print(" · ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)


def show_levels(console: Console, levels: Sequence[Summary]) -> None:
    """One row per load level."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("streams", "requests", "time", "output tok/s", "total tok/s"):
        table.add_column(title, justify="right")
    for title in ("TTFT ms", "ITL ms", "E2E ms"):
        table.add_column(f"{title}\np50 / p90 / p99", justify="right")
    table.add_column("client CPU", justify="right")
    for level in levels:
        failed = f" ({level.num_failed} failed)" if level.num_failed else ""
        table.add_row(
            str(level.concurrency),
            f"{level.num_requests}{failed}",
            f"{level.duration_s:.1f} s",
            f"{level.output_tokens_per_s:.1f}",
            f"{level.total_tokens_per_s:.1f}",
            _percentiles(level.ttft_ms),
            _percentiles(level.itl_ms),
            _percentiles(level.e2e_ms),
            f"{level.client_cpu_share:.0%}",
        )
    console.print(table)


def write_json(path: str, document: dict[str, Any]) -> None:
    """To a file, or to standard output for `-`."""
    text = json.dumps(document, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def _percentiles(d: Distribution) -> str:
    digits = 1 if d.p50 < 100 else 0
    return f"{d.p50:.{digits}f} / {d.p90:.{digits}f} / {d.p99:.{digits}f}"
