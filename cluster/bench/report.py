"""How results are shown: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .latency import Distribution, Summary

if TYPE_CHECKING:
    from .router import Cost, FleetResult
    from .scheduler import SchedulerResult


def show_facts(console: Console, facts: dict[str, str]) -> None:
    """`name: value`, several on a line."""
    console.print(" · ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)


def show_levels(console: Console, levels: Sequence[Summary]) -> None:
    """One column per load level."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("arrivals" if levels[0].rate is not None else "concurrency")
    for level in levels:
        table.add_column(level.level, justify="right", no_wrap=True)
    rows: dict[str, Callable[[Summary], str]] = {
        "requests": _requests,
        "seconds": lambda s: f"{s.duration_s:.1f}",
        "output tokens/s": lambda s: f"{s.output_tokens_per_s:.1f}",
        "total tokens/s": lambda s: f"{s.total_tokens_per_s:.1f}",
        "prompt tokens, cached": lambda s: f"{s.num_cached_tokens / max(1, s.num_prompt_tokens):.0%}",
        "TTFT ms p50 / p90 / p99": lambda s: _percentiles(s.ttft_ms),
        "ITL ms p50 / p90 / p99": lambda s: _percentiles(s.itl_ms),
        "TPOT ms p50 / p90 / p99": lambda s: _percentiles(s.tpot_ms),
        "E2E ms p50 / p90 / p99": lambda s: _percentiles(s.e2e_ms),
        "client CPU, of one core": lambda s: f"{s.client_cpu_share:.0%}",
    }
    if levels[0].good_requests_per_s is not None:
        rows["good requests/s, of all"] = lambda s: f"{s.good_requests_per_s:.2f} of {s.requests_per_s:.2f}"
    for title, cell in rows.items():
        table.add_row(title, *(cell(level) for level in levels))
    console.print(table)


def _requests(summary: Summary) -> str:
    failed, again = summary.num_failed, summary.num_sent_again
    notes = [f"{count} {what}" for count, what in ((failed, "failed"), (again, "sent again")) if count]
    return f"{summary.num_requests} ({', '.join(notes)})" if notes else str(summary.num_requests)


def show_scheduler(console: Console, result: SchedulerResult) -> None:
    """Three small tables, in microseconds."""
    rows = [
        (s.num_running, s.schedule_us, s.update_us, s.schedule_us + s.update_us, f"{s.per_request_us:.2f}")
        for s in result.steady
    ]
    _show_rows(console, ("running requests", "schedule us", "update us", "step us", "us per request"), rows)
    admission = result.admission
    _show_rows(
        console,
        ("prompt tokens", "admission, cold us", "admission, fully cached us"),
        [(admission.num_prompt_tokens, admission.cold_us, admission.cached_us)],
    )
    _show_rows(
        console,
        ("queued requests", "step of 64 us", "arrival us"),
        [(q.num_queued, q.step_us, q.add_us) for q in result.queued],
    )


def show_router(console: Console, fleets: Sequence[FleetResult], cost: Cost) -> None:
    """One row per fleet and policy; what a decision costs in a line."""
    rows = [
        (
            f.num_replicas,
            f.policy,
            f"{f.hit_rate:.1%}",
            f"{f.queue_ms.p50:,.0f} / {f.queue_ms.p99:,.0f}",
            f"{f.ttft_ms.p50:,.0f} / {f.ttft_ms.p99:,.0f}",
            f"{f.busiest:.2f}",
        )
        for f in fleets
    ]
    columns = ("replicas", "policy", "hit rate", "queue ms p50 / p99", "TTFT ms p50 / p99", "busiest / average")
    _show_rows(console, columns, rows)
    console.print(
        f"A decision among {cost.num_engines} engines for {cost.num_prompt_tokens} prompt tokens: "
        f"{cost.choose_unknown_us:.0f} us when nobody has the prompt, {cost.choose_known_us:.0f} us when all have it; "
        f"hashing the prompt once {cost.hash_us:.0f} us; {cost.update_us:.2f} us per block that an engine tells of."
    )


def _show_rows(console: Console, columns: Sequence[str], rows: Sequence[Sequence[int | float | str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:,.0f}" if isinstance(cell, float) else f"{cell}" for cell in row))
    console.print(table)


def write_json(path: str, document: dict[str, Any]) -> None:
    """To a file, or to standard output for `-`."""
    text = json.dumps(document, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def _percentiles(d: Distribution) -> str:
    if d.count == 0:
        return "-"
    digits = 1 if d.p50 < 100 else 0
    return f"{d.p50:.{digits}f} / {d.p90:.{digits}f} / {d.p99:.{digits}f}"
