"""`quire bench kernels`: what `workers.kernel_bench` measures, as a table or as JSON, and the table of tile sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from quire.workers.kernel_bench.measure import Limits, Measured


def command(
    shape: str | None,
    device: str,
    dtype: str,
    only: str | None,
    block_size: int,
    seconds: float,
    tune: bool,
    json_path: str | None,
) -> None:
    """See `commands.kernels`. Raises `typer.BadParameter` for what there is not."""
    import torch
    from rich.console import Console

    from quire.workers.kernel_bench.cases import GROUPS
    from quire.workers.kernel_bench.measure import Timer
    from quire.workers.kernel_bench.shapes import SHAPES

    from .machine import describe_machine, package_versions
    from .report import show_facts, write_json

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise typer.BadParameter("there is no GPU", param_hint="--device")
    where = torch.device("cuda" if device == "cuda" or (device == "auto" and has_gpu) else "cpu")
    kind = getattr(torch, dtype if dtype != "auto" else "bfloat16" if where.type == "cuda" else "float32")
    name = shape or ("llama-3.1-8b" if where.type == "cuda" else "smollm2-135m")
    _check("--shape", [name], SHAPES)
    groups = only.split(",") if only else list(GROUPS)
    _check("--only", groups, GROUPS)

    console = Console(stderr=json_path == "-")
    machine, versions = describe_machine(), package_versions()
    show_facts(console, machine)
    show_facts(console, versions)
    if tune:
        _tune(console, where, groups, seconds)
        return
    limits, results = _measure(name, where, kind, groups, block_size, Timer(where, seconds))
    show_kernels(console, f"{name}, {dtype_name(kind)}, block size {block_size}, {where.type}", limits, results)
    if json_path is not None:
        settings = {"shape": name, "device": where.type, "dtype": dtype_name(kind), "block_size": block_size}
        document = {"bench": "kernels", "machine": machine, "versions": versions, "settings": settings}
        result = {"limits": asdict(limits), "kernels": [asdict(measured) for measured in results]}
        write_json(json_path, {**document, "result": result})


def _measure(
    name: str, device: torch.device, dtype: torch.dtype, groups: list[str], block_size: int, timer: object
) -> tuple[Limits, list[Measured]]:
    from quire.workers.kernel_bench.cases import CPU_SIZES, GPU_SIZES, TINY_SIZES, cases
    from quire.workers.kernel_bench.measure import Timer, measure, measure_limits
    from quire.workers.kernel_bench.shapes import SHAPES

    assert isinstance(timer, Timer)
    sizes = TINY_SIZES if name == "tiny" else GPU_SIZES if device.type == "cuda" else CPU_SIZES
    todo = list(cases(SHAPES[name], sizes, device, dtype, block_size, groups))
    num_bytes, size = (1 << 30, 8192) if device.type == "cuda" else (1 << 28, 1536)
    if name == "tiny":
        num_bytes, size = 1 << 22, 128
    with _progress(len(todo) + 1, "limits") as on_case:
        limits = measure_limits(timer, device, dtype, num_bytes=num_bytes, size=size)
        return limits, measure(todo, timer, limits, on_case)


def _tune(console: Console, device: torch.device, groups: list[str], seconds: float) -> None:
    from quire.workers.kernel_bench import tune

    if device.type != "cuda":
        raise typer.BadParameter("tile sizes are a GPU's", param_hint="--tune")
    jobs = tune.jobs(device, groups)
    if not jobs:
        raise typer.BadParameter(f"there are no tiles of {', '.join(groups)}", param_hint="--only")
    with _progress(len(jobs), "tiles") as on_job:
        path, without = tune.run(jobs, device, seconds, on_job)
    console.print(f"Written: {path}")
    if without:
        console.print(f"No candidate works for {', '.join(without)}: left as they were.")


def show_kernels(console: Console, title: str, limits: Limits, results: list[Measured]) -> None:
    """A row per case, below the limits."""
    from rich.table import Table

    console.print(title)
    console.print(
        f"limits measured here: copy {limits.copy_gb_per_s:,.0f} GB/s, matrix product "
        f"{limits.matmul_tflop_per_s:,.2f} TFLOP/s",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("operation")
    for column in ("us", "GB/s", "TFLOP/s", "of the limit"):
        table.add_column(column, justify="right", no_wrap=True)
    group = ""
    for result in results:
        if result.group != group:
            group = result.group
            table.add_row(f"[bold]{group}[/]")
        share = f"{result.share:.0%} of {result.bound}"
        table.add_row(result.name, f"{result.us:,.1f}", f"{result.gb_per_s:,.1f}", f"{result.tflop_per_s:.3f}", share)
    console.print(table)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(option: str, given: list[str], known: Iterable[str]) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(names)}", param_hint=option)


@contextmanager
def _progress(total: int, first: str) -> Iterator[Callable[[str], None]]:
    """A bar on stderr (nothing is drawn where stderr is no terminal); call with the name of what begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(first, total=total)
        yield lambda name: progress.update(task, advance=1, description=name)
