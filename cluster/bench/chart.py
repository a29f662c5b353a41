"""Levels of load as a picture: bars in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .latency import Summary

BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"

MEASURES: dict[str, Callable[[Summary], float]] = {
    "output tokens/s": lambda s: s.output_tokens_per_s,
    "TTFT p50, ms": lambda s: s.ttft_ms.p50,
    "TTFT p99, ms": lambda s: s.ttft_ms.p99,
    "ITL p50, ms": lambda s: s.itl_ms.p50,
    "ITL p99, ms": lambda s: s.itl_ms.p99,
}


def bar(value: float, largest: float, width: int = BAR_WIDTH) -> str:
    """A bar of `width` characters for `largest`, and in proportion for `value`, to an eighth of a character."""
    eighths = round(8 * width * value / largest) if largest > 0 else 0
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def show_chart(console: Console, levels: Sequence[Summary]) -> None:
    """One group of bars per measure, one bar per level; the scale is that of the group's largest."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for title, measure in MEASURES.items():
        values = [measure(level) for level in levels]
        for index, (level, value) in enumerate(zip(levels, values, strict=True)):
            name = title if index == 0 else ""
            drawn = Text(bar(value, max(values)), style="cyan")
            table.add_row(name, Text(level.level, justify="right"), Text(f"{value:,.1f}", justify="right"), drawn)
    console.print(table)
