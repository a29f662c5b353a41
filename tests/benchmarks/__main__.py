"""All tables of a machine by one command: `python -m tests.benchmarks --vllm-python PYTHON`.

Runs what measures Quire, one part after the other, and puts what each prints behind its command into one report. A
part that fails is named, and the others go on. On a machine with a GPU that is `tests.gpu`; on others the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from quire.cluster.bench.machine import describe_machine, package_versions

from .peers.programs import PEERS, add_options, given
from .peers.servers import end

COLUMNS = "200"  # of tables that are made for a terminal
PYTHON = "python"  # stands for this one
FOLDER = "{folder}"  # where files go


@dataclass(frozen=True, slots=True)
class Part:
    """One table or some. `command` is as a reader would type it, with FOLDER in it."""

    name: str
    title: str
    command: str
    is_markdown: bool = True  # else it is made for a terminal


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    command: str
    seconds: float
    status: int
    printed: str


def cpu_parts(programs: Mapping[str, Path], rounds: int) -> list[Part]:
    """`programs`: by peer, what starts it; the others are left out."""
    peers = "".join(f"{PEERS[name].option} {shlex.quote(str(path))} " for name, path in programs.items())
    own = "python -m tests.benchmarks"
    decodes = "--concurrency 8 --num-requests 64 --output-len 128"
    k_quants = [
        Part("k-quants", "K-quants, beside llama.cpp", f"{own}.k_quants {PEERS[name].option} {shlex.quote(str(path))}")
        for name, path in programs.items()
        if name == "llamacpp"
    ]
    return [
        Part(
            "peers",
            "Beside peers, and the limits of the machine",
            f"{own}.peers {peers}--rounds {rounds} --folder {{folder}}/peers --json {{folder}}/peers.json",
        ),
        *k_quants,
        Part("kernels-float32", "Operations of a layer, float32", "quire bench kernels --dtype float32", False),
        Part("kernels-bfloat16", "Operations of a layer, bfloat16", "quire bench kernels --dtype bfloat16", False),
        Part("operations-float32", "Operations of a step, float32", f"{own}.operations --precision float32"),
        Part("operations-bfloat16", "Operations of a step, bfloat16", f"{own}.operations --precision bfloat16"),
        Part("operations-int8", "Operations of a step, int8", f"{own}.operations --precision int8"),
        Part("hot-loop", "The hot loop", f"{own}.hot_loop"),
        Part("serving-path", "What the serving path costs", f"{own}.serving_path --precision bfloat16 {decodes}"),
        Part("speculation", "Speculative decoding", f"{own}.speculation"),
        Part("start", "From `quire serve` to the first answer", f"{own}.start"),
        Part("scheduler", "Scheduler and KV cache manager, without a model", "quire bench scheduler", False),
        Part("router", "Routing", "quire bench router", False),
    ]


def gpu_parts() -> list[Part]:
    return [Part("gpu", "Kernels and steps on a GPU", "python -m tests.gpu --bench --json {folder}/gpu.json", False)]


def run(part: Part, folder: Path, tell: Callable[[str], None]) -> Outcome:
    """What a part printed, and how it ended. What it says beside that is in NAME.log."""
    words = [word.replace(FOLDER, str(folder)) for word in shlex.split(part.command)]
    command = shlex.join(words)
    words = [sys.executable, *(words[1:] if words[0] == PYTHON else ["-m", *words])]
    started = time.monotonic()
    with (folder / f"{part.name}.log").open("wb") as log, (folder / f"{part.name}.out").open("w+b") as out:
        # A session of its own: Ctrl-C here must not reach it before it is ended in order.
        process = psutil.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=os.environ | {"COLUMNS": COLUMNS},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                tell(f"{part.name} · {time.monotonic() - started:.0f} s")
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(1.0)
        finally:
            with _undisturbed():
                end(process)
        out.seek(0)
        printed = out.read().decode(errors="replace")
    return Outcome(part, command, time.monotonic() - started, process.returncode, printed.strip("\n"))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Who presses Ctrl-C twice has what was started ended all the same."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(facts: str, outcomes: Sequence[Outcome]) -> str:
    parts = [f"# What was measured on this machine\n\n{facts}"]
    for each in outcomes:
        text = each.printed if each.part.is_markdown else f"```\n{each.printed}\n```"
        end = "" if each.status == 0 else f", **ended with status {each.status}** (see {each.part.name}.log)"
        parts.append(f"## {each.part.title}\n\n`{each.command}`: {each.seconds:.0f} s{end}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def commit() -> str:
    """Of this tree, with a plus where it was changed; nothing where git does not tell."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def measure(parts: Sequence[Part], folder: Path) -> int:
    """0 if all parts did what they should. The report is there after each of them."""
    console = Console(stderr=True)
    facts = " · ".join(f"{name} {value}" for name, value in (describe_machine() | package_versions()).items())
    facts = f"{time.strftime('%Y-%m-%d')} · commit {commit() or 'unknown'} · {facts}"
    target, outcomes = folder / "report.md", list[Outcome]()
    with console.status("starts") as status:
        for number, part in enumerate(parts, 1):
            place = f"{number} of {len(parts)}"
            outcomes.append(run(part, folder, lambda text, place=place: status.update(f"{place}: {text}")))  # type: ignore[misc]
            target.write_text(report(facts, outcomes))
            word = "done" if outcomes[-1].status == 0 else f"ended with status {outcomes[-1].status}"
            console.print(f"{place}: {part.name} {word} after {outcomes[-1].seconds:.0f} s", highlight=False)
    console.print(f"The report is {target}", highlight=False, soft_wrap=True)
    return 1 if any(each.status for each in outcomes) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="All tables of this machine, which should be idle: half an hour, and 15 minutes for each peer.",
        epilog="Example: python -m tests.benchmarks --vllm-python ~/vllm/bin/python --folder results",
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=1, help="of the comparison with peers")
    parser.add_argument("--only", metavar="NAMES", help="some parts, as scheduler,router")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="for the report; default results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that parts end as with Ctrl-C
    of_cpu, of_gpu = (
        {part.name: part for part in each} for each in (cpu_parts(given(parser, args), args.rounds), gpu_parts())
    )
    parts = of_cpu | of_gpu
    names = args.only.split(",") if args.only else list(of_cpu if describe_machine()["gpu"] == "none" else of_gpu)
    if unknown := sorted(set(names) - set(parts)):
        parser.error(f"--only: unknown: {', '.join(unknown)}; known: {', '.join(parts)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        return measure([parts[name] for name in names], args.folder.resolve())
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
