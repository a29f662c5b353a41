"""The command line of `quire bench`."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from ..cli_options import EngineOverrides, flatten, header_value, help_without_command, takes_engine_options
from . import Endpoint

if TYPE_CHECKING:
    from .serve import Level, Load, Result

T = TypeVar("T")

app = typer.Typer(rich_markup_mode=None)
app.callback(invoke_without_command=True)(help_without_command("Measure a server, or the engine alone."))

InputLen = Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens in each answer.")]
VocabSize = Annotated[int, typer.Option(min=2, help="Random prompts use token ids below this.")]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]


def _writable(path: str | None) -> str | None:
    """Refuse at once what could not be written when all is measured."""
    if path is not None and path != "-":
        target = Path(path).resolve()
        why = errno.EISDIR if target.is_dir() else 0 if target.parent.is_dir() else errno.ENOENT
        if why == 0 and not os.access(target if target.exists() else target.parent, os.W_OK):
            why = errno.EACCES
        if why:
            raise typer.BadParameter(f"{path} cannot be written ({os.strerror(why)})")
    return path


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_writable, help="Write the results as JSON; - is stdout."),
]


@app.command(
    epilog="Examples:  quire bench serve --concurrency 1,8,32   ·   quire bench serve --rate 2,4,8 --slo ttft:500 "
    "--slo tpot:50 --plot   ·   quire bench serve --prefix-len 512 --input-len 16:64 --output-len 32:256   ·   "
    "quire bench serve --url http://10.0.0.5:8000 --json result.json"
)
def serve(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to ask; the first one listed when not given.")] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="completions gives prompts of an exact length.")] = "completions",
    concurrency: Annotated[
        str | None, typer.Option(help="Streams at a time; several levels as 1,8,32. (default: 8)", show_default=False)
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Instead of a number of streams: requests per second, arriving at random; several as 2,4,8."),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=1, help="Per level; when not given 8 per stream, or 30 s of arrivals.")
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts of a level begin with.")] = 0,
    input_len: Annotated[str, typer.Option(help="Tokens of its own in each prompt; from 16 to 64 is 16:64.")] = "128",
    output_len: Annotated[str, typer.Option(help="Tokens in each answer; a range as for --input-len.")] = "128",
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="What a good request keeps, in ms: ttft:500, tpot:50 (per token after the first) or e2e:5000; can be "
            "repeated. Shows how many good ones are answered per second."
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of sampled tokens; 1 keeps all.")] = 1.0,
    vocab_size: VocabSize = 10_000,
    seed: Seed = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", callback=header_value, help="Sent as a bearer token.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Longest wait for a byte of an answer.")] = 300.0,
    plot: Annotated[bool, typer.Option("--plot", help="Draw a chart in the terminal.")] = False,
    json_path: Json = None,
) -> None:
    """Load a server with streamed requests.

    Prints tokens per second, percentiles of TTFT, ITL, TPOT and E2E, and goodput.
    """
    from .serve import Load
    from .slo import Objective
    from .workload import Lengths

    if concurrency is not None and rate is not None:
        raise typer.BadParameter("give either a number of streams or a rate", param_hint="--rate")
    if top_p == 0:
        raise typer.BadParameter("must be above 0", param_hint="--top-p")
    load = Load(
        url=url,
        model=model,
        endpoint=endpoint,
        concurrency=_levels(concurrency or "8"),
        rates=() if rate is None else _rates(rate),
        num_requests=num_requests,
        prefix_len=prefix_len,
        input_len=_parsed(Lengths.parse, input_len, "--input-len", "a length >= 1, or a range as 16:64"),
        output_len=_parsed(Lengths.parse, output_len, "--output-len", "a length >= 1, or a range as 16:64"),
        temperature=temperature,
        vocab_size=vocab_size,
        seed=seed,
        api_key=api_key,
        timeout_s=timeout_s,
        top_p=top_p,
        objectives=tuple(
            _parsed(Objective.parse, each, "--slo", "ttft, tpot or e2e with milliseconds, as ttft:500")
            for each in slo or ()
        ),
    )
    _measure_server(load, plot, json_path)


def _measure_server(load: Load, plot: bool, json_path: str | None) -> None:
    from rich.console import Console

    from .chart import show_chart
    from .machine import describe_machine, package_versions
    from .report import show_facts, show_levels, write_json

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
    shared = f"{load.prefix_len} shared + " if load.prefix_len else ""
    title = f"{load.endpoint}, {shared}{load.input_len} tokens in, {load.output_len} out"
    console.print(title)
    show_levels(console, result.levels)
    if not result.exact_output_len:
        console.print("The server does not take ignore_eos: answers may be shorter than asked for.")
    for error in result.errors:
        console.print(f"failed: {error}", style="red", markup=False)
    if json_path is not None:
        settings = {key: value for key, value in asdict(load).items() if key != "api_key"}
        document = {"bench": "serve", "machine": machine, "versions": versions, "settings": settings}
        write_json(json_path, {**document, "result": asdict(result)})
    if plot:
        show_chart(console, result.levels)
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
    """What scheduling costs, without a model.

    CPU microseconds of the scheduling thread, per step and per running request.
    """
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
    """Compare routing policies, in simulated time.

    Hit rates, queues and times to first tokens of each, and what a decision costs.

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


@app.command(
    epilog="Examples:  quire bench kernels   ·   quire bench kernels --shape llama-3.1-8b --only attention,linear "
    "--json kernels.json   ·   quire bench kernels --only experts --tune"
)
def kernels(
    shape: Annotated[
        str | None,
        typer.Option(
            help="Whose layers: llama-3.1-8b, qwen3-0.6b, qwen3-30b-a3b, smollm2-135m or tiny. When not given, "
            "llama-3.1-8b on a GPU, else smollm2-135m."
        ),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="auto: bfloat16 on a GPU, else float32.")
    ] = "auto",
    only: Annotated[str | None, typer.Option(help="Some of attention, write_kv, linear, experts, draw.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of the KV cache.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.0, help="For each figure, the median of its calls.")] = 0.2,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure tile sizes on this GPU, and write them into kernels/triton/tiles.json."),
    ] = False,
    json_path: Json = None,
) -> None:
    """Kernels alone: GB/s and TFLOP/s.

    The operations of a layer, as a share of a copy and of a matrix product on the same device.
    """
    from . import kernels as kernel_bench

    kernel_bench.command(shape, device, dtype, only, block_size, seconds, tune, json_path)


@app.command(epilog="Example:  quire bench offline --num-prompts 64 --load-format dummy --max-num-seqs 64")
@takes_engine_options()
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
    """Throughput of the engine alone."""
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


def _rates(text: str) -> tuple[float, ...]:
    wanted = "numbers > 0 with commas between"
    rates = _parsed(lambda given: tuple(map(float, given.split(","))), text, "--rate", wanted)
    if not all(0 < rate < math.inf for rate in rates):
        raise typer.BadParameter(f"must be {wanted}, got {text!r}", param_hint="--rate")
    return rates


def _parsed(parse: Callable[[str], T], text: str, option: str, wanted: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"must be {wanted}, got {text!r}", param_hint=option) from error


def _with_progress(load: Load) -> Result:
    """Run the load behind a progress bar on stderr (nothing is drawn where stderr is no terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .serve import measure

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawing costs the server's CPU too: twice a second is enough.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("first request", total=None)

        def on_level(level: Level) -> None:
            progress.reset(task, total=level.num_requests, description=level.title)

        return measure(load, on_level, lambda: progress.advance(task))
