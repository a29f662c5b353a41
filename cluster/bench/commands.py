"""The command line of `quire bench`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..cli_options import EngineOverrides, flatten, help_without_command, takes_engine_options
from . import Endpoint

if TYPE_CHECKING:
    from .serve import Load, Result

app = typer.Typer(rich_markup_mode=None)
app.callback(invoke_without_command=True)(help_without_command("Measure a server, or the engine alone."))

InputLen = Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens in each answer.")]
VocabSize = Annotated[int, typer.Option(min=2, help="Random prompts use token ids below this.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is stdout.")]


@app.command(
    epilog="Examples:  quire bench serve --concurrency 1,8   ·   "
    "quire bench serve --url http://10.0.0.5:8000 --output-len 256 --json result.json"
)
def serve(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask; the first one listed when not given.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="completions gives prompts of an exact length.")] = "completions",
    concurrency: Annotated[str, typer.Option(help="Streams at a time; several levels as 1,8,32.")] = "8",
    num_requests: Annotated[int | None, typer.Option(min=1, help="Per level; 8 per stream when not given.")] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    vocab_size: VocabSize = 10_000,
    seed: Seed = 0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Longest wait for a byte of an answer.")] = 300.0,
    json_path: Json = None,
) -> None:
    """Load a server with streamed requests: tokens per second, TTFT, ITL and E2E percentiles."""
    from rich.console import Console

    from . import serve as serve_bench
    from .machine import describe_machine, package_versions
    from .report import show_facts, show_levels, write_json

    load = serve_bench.Load(
        url, model, endpoint, _levels(concurrency), num_requests, input_len, output_len, temperature, vocab_size, seed,
        api_key, timeout_s,
    )  # fmt: skip
    console = Console(stderr=json_path == "-")
    machine, versions = describe_machine(), package_versions()
    show_facts(console, machine)
    result = _with_progress(load)
    facts = {
        "model": result.model,
        "server": result.server_version or "version not told",
        "client quire": versions["quire"],
    }
    show_facts(console, facts)
    console.print(f"{endpoint}, {input_len} tokens in, {output_len} out")
    show_levels(console, result.levels)
    if not result.exact_output_len:
        console.print("The server does not take ignore_eos: answers may be shorter than asked for.")
    for error in result.errors:
        console.print(f"failed: {error}", style="red", markup=False)
    if json_path is not None:
        settings = {key: value for key, value in asdict(load).items() if key != "api_key"}
        document = {"bench": "serve", "machine": machine, "versions": versions, "settings": settings}
        write_json(json_path, {**document, "result": asdict(result)})
    if any(level.num_failed for level in result.levels):
        raise typer.Exit(1)


@app.command(epilog="Examples:  quire bench scheduler   ·   quire bench scheduler --running 256 --json result.json")
def scheduler(
    running: Annotated[str, typer.Option(help="Requests in decode; several counts as 64,256.")] = "64,256,1024",
    queued: Annotated[
        str, typer.Option(help="Requests that wait; several counts as 1000,10000.")
    ] = "1000,10000,100000",
    num_steps: Annotated[int, typer.Option(min=1, help="Steps of each measurement; the median is shown.")] = 64,
    seed: Seed = 0,
    json_path: Json = None,
) -> None:
    """What scheduling costs per step, without a model: CPU microseconds of the scheduling thread."""
    from rich.console import Console

    from . import scheduler as scheduler_bench
    from .machine import describe_machine, package_versions
    from .report import show_facts, show_scheduler, write_json

    console = Console(stderr=json_path == "-")
    machine, versions = describe_machine(), package_versions()
    show_facts(console, machine)
    with console.status("Scheduling"):
        result = scheduler_bench.run(_levels(running, "--running"), _levels(queued, "--queued"), num_steps, seed)
    show_scheduler(console, result)
    if json_path is not None:
        settings = {"running": running, "queued": queued, "num_steps": num_steps, "seed": seed}
        document = {"bench": "scheduler", "machine": machine, "versions": versions, "settings": settings}
        write_json(json_path, {**document, "result": asdict(result)})


@app.command(epilog="Examples:  quire bench router   ·   quire bench router --replicas 16 --rate 15 --json result.json")
def router(
    replicas: Annotated[str, typer.Option(help="Sizes of the fleet, as 1,4,16,64.")] = "1,4,16,64",
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second and replica.")] = 40.0,
    duration_s: Annotated[float, typer.Option(min=1.0, help="Simulated seconds of arrivals.")] = 15.0,
    groups: Annotated[int, typer.Option(min=1, help="System prompts per replica, some far more often used.")] = 8,
    prefix_len: Annotated[int, typer.Option(min=1, max=8192, help="Tokens in a system prompt.")] = 1024,
    seed: Seed = 0,
    json_path: Json = None,
) -> None:
    """Prefix-aware routing against other policies, in simulated time, and what a decision costs.

    The fleet runs the real scheduler, cache and router; only the model is a formula.
    """
    from rich.console import Console

    from . import router as router_bench
    from .fleet import Trace
    from .machine import describe_machine, package_versions
    from .report import show_facts, show_router, write_json

    sizes = _levels(replicas, "--replicas")
    console = Console(stderr=json_path == "-")
    machine, versions = describe_machine(), package_versions()
    show_facts(console, machine)
    trace = Trace(duration_s=duration_s, requests_per_s=rate, groups_per_replica=groups, prefix_tokens=prefix_len)
    done, total = 0, len(sizes) * len(router_bench.COMPARED)
    with console.status("Simulating") as status:

        def on_done() -> None:
            nonlocal done
            done += 1
            status.update(f"Simulating, {done} of {total} done")

        fleets = router_bench.run(sizes, trace, seed, on_done)
        cost = router_bench.cost()
    show_router(console, fleets, cost)
    if json_path is not None:
        document = {"bench": "router", "machine": machine, "versions": versions, "settings": asdict(trace)}
        result = {"fleets": [asdict(fleet) for fleet in fleets], "cost": asdict(cost)}
        write_json(json_path, {**document, "result": result})


@app.command(epilog="Example:  quire bench offline --num-prompts 64 --load-format dummy --max-num-seqs 64")
@takes_engine_options
def offline(
    *,
    num_prompts: Annotated[int, typer.Option(min=1, help="Given all at once.")] = 16,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    vocab_size: VocabSize = 10_000,
    seed: Seed = 0,
    json_path: Json = None,
    engine: EngineOverrides,
) -> None:
    """Throughput of the engine in this process, without a server."""
    from rich.console import Console

    from . import offline as offline_bench
    from .machine import describe_machine, package_versions
    from .report import show_facts, write_json

    console = Console(stderr=json_path == "-")
    machine, versions = describe_machine(), package_versions()
    show_facts(console, machine)
    show_facts(console, versions)
    result = offline_bench.run(flatten(engine), num_prompts, input_len, output_len, vocab_size, seed)
    console.print(
        f"{num_prompts} prompts, {input_len} tokens in, {output_len} out; model loaded in {result.load_s:.1f} s"
    )
    console.print(
        f"[bold]{result.output_tokens_per_s:.1f}[/] output tok/s · {result.total_tokens_per_s:.1f} total tok/s · "
        f"{result.requests_per_s:.2f} requests/s · {result.duration_s:.1f} s"
    )
    if json_path is not None:
        settings = {"engine": engine, "input_len": input_len, "output_len": output_len, "seed": seed}
        document = {"bench": "offline", "machine": machine, "versions": versions, "settings": settings}
        write_json(json_path, {**document, "result": asdict(result)})


def _levels(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise typer.BadParameter(f"must be numbers >= 1 with commas between them, got {text!r}", param_hint=option)
    return levels


def _with_progress(load: Load) -> Result:
    """Run the load behind a progress bar on stderr (nothing is drawn where stderr is no terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .serve import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawing costs the server's CPU too: twice a second is enough.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("first request", total=None)

        def on_level(concurrency: int, num_requests: int) -> None:
            progress.reset(task, total=num_requests, description=f"{concurrency} streams")

        return asyncio.run(run(load, on_level, lambda: progress.advance(task)))
