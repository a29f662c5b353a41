"""`quire top`: engines and their load, drawn again and again from what the service tells over HTTP.

Only numbers that engines count for themselves are used: any gateway tells them alike, so it does not matter which one a
scrape reaches. Rates are differences between two scrapes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.engine.errors import QuireError

from .cli_http import wide_console
from .service_http import Labels, Samples, Service

RUNNING = "quire:num_requests_running"
WAITING = "quire:num_requests_waiting"
WAITING_BY_REASON = "quire:num_requests_waiting_by_reason"
KV_USAGE = "quire:kv_cache_usage_perc"
PROMPT_TOKENS = "quire:prompt_tokens_total"
GENERATION_TOKENS = "quire:generation_tokens_total"
PREEMPTIONS = "quire:num_preemptions_total"
PREFIX_QUERIES = "quire:prefix_cache_queries_total"
PREFIX_HITS = "quire:prefix_cache_hits_total"
WAIT_SECONDS = "quire:request_wait_seconds_total"
METRICS = (
    RUNNING, WAITING, WAITING_BY_REASON, KV_USAGE, PROMPT_TOKENS, GENERATION_TOKENS, PREEMPTIONS, PREFIX_QUERIES,
    PREFIX_HITS, WAIT_SECONDS,
)  # fmt: skip

_BAR_WIDTH = 10


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine at one moment; rates are per second, shares from 0 to 1."""

    model: str
    engine: str
    running: int
    waiting: int
    kv_usage: float
    hit_rate: float | None  # of the prompt tokens looked up since the frame before, else ever; None when none were
    generation_rate: float
    prompt_rate: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown at once. `causes`: requests that wait now, by what they lack; `waited`: the seconds that requests
    which have ended had waited, by the same."""

    rows: tuple[EngineRow, ...]
    causes: dict[str, float]
    waited: dict[str, float]


def frame_of(now: Samples, before: Samples, seconds: float) -> Frame:
    """Two scrapes that are `seconds` apart. An engine that is new has no rates yet."""
    engines = sorted({_engine(labels) for (name, labels) in now if name == RUNNING})
    rows = tuple(_row(model, engine, now, before, seconds) for model, engine in engines)
    return Frame(rows, _by_label(now, WAITING_BY_REASON, "reason"), _by_label(now, WAIT_SECONDS, "cause"))


def _row(model: str, engine: str, now: Samples, before: Samples, seconds: float) -> EngineRow:
    def value(name: str, samples: Samples = now) -> float:
        return sum(v for (n, labels), v in samples.items() if n == name and _engine(labels) == (model, engine))

    def gained(name: str) -> float:
        known = any(n == name and _engine(labels) == (model, engine) for n, labels in before)
        return max(0.0, value(name) - value(name, before)) if known else 0.0

    queries, hits = gained(PREFIX_QUERIES), gained(PREFIX_HITS)
    if not queries:
        queries, hits = value(PREFIX_QUERIES), value(PREFIX_HITS)
    return EngineRow(
        model,
        engine,
        round(value(RUNNING)),
        round(value(WAITING)),
        value(KV_USAGE),
        hits / queries if queries else None,
        gained(GENERATION_TOKENS) / seconds,
        gained(PROMPT_TOKENS) / seconds,
        round(value(PREEMPTIONS)),
    )


def _engine(labels: Labels) -> tuple[str, str]:
    found = dict(labels)
    return found.get("model_name", ""), found.get("engine", "")


def _by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums of one metric by one label, the largest first; without those that are zero."""
    sums: dict[str, float] = {}
    for (found, labels), value in samples.items():
        if found == name and value:
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# Drawing


def draw(frame: Frame, service: str, status: str) -> Group:
    """One frame, as wide as its terminal."""
    running, waiting = sum(row.running for row in frame.rows), sum(row.waiting for row in frame.rows)
    tokens = sum(row.generation_rate for row in frame.rows)
    load = f"engines {len(frame.rows)}   running {running}   waiting {waiting}   {tokens:.1f} tok/s"
    parts: list[Text | Table] = [Text(f"{service}   {status}"), Text(load), Text(), _table(frame.rows)]
    if frame.causes:
        shown = "   ".join(f"{cause} {number:g}" for cause, number in frame.causes.items())
        parts += [Text(), Text(f"waiting for   {shown}")]
    if frame.waited:
        shown = "   ".join(f"{cause} {seconds:.1f} s" for cause, seconds in frame.waited.items())
        parts += [Text(), Text(f"waited so far   {shown}")]
    return Group(*parts)


def said_of(health: dict[str, Any]) -> str:
    """The status of a service, and which of its models have been scaled to zero."""
    asleep = [model["id"] for model in health["models"] if model["status"] == "asleep"]
    return f"{health['status']}   asleep: {', '.join(asleep)}" if asleep else str(health["status"])


def _table(rows: tuple[EngineRow, ...]) -> Table:
    table = Table("model", "engine", box=None, padding=(0, 1))
    for name in ("run", "wait", "KV cache", "hits", "out/s", "in/s", "preempt"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        hits = "-" if row.hit_rate is None else f"{row.hit_rate:.0%}"
        table.add_row(
            row.model, row.engine, str(row.running), str(row.waiting), _bar(row.kv_usage), hits,
            f"{row.generation_rate:.1f}", f"{row.prompt_rate:.1f}", str(row.preemptions),
        )  # fmt: skip
    return table


def _bar(share: float) -> str:
    filled = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    return f"{'█' * filled}{'·' * (_BAR_WIDTH - filled)} {share:4.0%}"


def top(service: Service, *, interval_s: float, once: bool) -> None:
    """Draw until Ctrl-C, or once. Raises `QuireError` when the service does not answer at first; later it is shown."""
    console = wide_console()
    scrapes = _Scrapes(service)
    if once:
        time.sleep(interval_s)
        console.print(scrapes.next())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(scrapes.next(), console=console, screen=True) as live:
        while True:
            time.sleep(interval_s)
            live.update(scrapes.next_or_problem(), refresh=True)


class _Scrapes:
    """What to draw next, from each scrape and the one before. Raises `QuireError` when there is no first one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before = service.samples()
        self._at = time.monotonic()
        self._frame = frame_of(self._before, self._before, 1.0)

    def next(self) -> Group:
        status = said_of(self._service.health())
        now, at = self._service.samples(), time.monotonic()
        self._frame = frame_of(now, self._before, at - self._at)
        self._before, self._at = now, at
        return draw(self._frame, self._service.root, status)

    def next_or_problem(self) -> Group:
        """The last numbers, and why there are no new ones."""
        try:
            return self.next()
        except QuireError as error:
            return draw(self._frame, self._service.root, error.message)
