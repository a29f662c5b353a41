"""The whole comparison: rounds of contestants, one after the other, in an order that turns with each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean

import psutil
import torch

from quire.kernels.ops import fits_packed
from quire.kernels.packed import PACKINGS

from . import answers
from .checkpoint import export, num_parameters, packed_bytes
from .limits import GIB, Limits, measure, readable, reading_gb_per_s
from .measure import Served, Workload, hf_results, load_server, offline_tokens_per_s, waves, workloads
from .programs import PEERS, Setup
from .servers import Server, paused, quire_server, running, unpacked_server, wait_until_at_rest

STREAMS = 8  # over HTTP against as many prompts at a time offline,
TURNS = 3  # one after the other so often: the machine drifts by more than what is between them
BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compare. `folder` is for logs and checkpoints; checkpoints that are there are used again."""

    contestants: Sequence[str]  # of quire, unpacked (Quire on the checkpoint that peers read), `PEERS` and hf
    precisions: Sequence[str]
    concurrency: Sequence[int]
    hf_batches: Sequence[int]
    output_len: int
    rounds: int
    programs: Mapping[str, Path]  # by peer: what starts it
    folder: Path
    threads: int


@dataclass(slots=True)
class Comparison:
    """Everything that was measured, in order."""

    limits: list[Limits] = field(default_factory=list)  # one per round: the machine drifts
    weight_bytes: dict[str, int] = field(default_factory=dict)  # by precision
    packed_bytes: dict[str, int] = field(default_factory=dict)  # likewise, where quire's stay packed as in its file
    served: list[Served] = field(default_factory=list)
    waves: list[tuple[str, float, float]] = field(default_factory=list)  # precision, HTTP and offline tokens/s
    hf: list[tuple[str, int, float]] = field(default_factory=list)  # precision, batch, output tokens/s
    answers: dict[str, list[answers.Answers]] = field(default_factory=dict)  # by "contestant precision"
    preloaded: dict[str, list[str]] = field(default_factory=dict)  # by contestant for whom libraries are looked for


def compare(plan: Plan, found: Comparison, say: Callable[[str], None]) -> None:
    """Measure all of `plan` into `found`. `say` is told what is being done. Raises `QuireError` where somebody fails;
    what was measured before is kept."""
    size = num_parameters()
    found.weight_bytes = {precision: size * BYTES_PER_WEIGHT[precision] for precision in plan.precisions}
    found.packed_bytes = {precision: packed_bytes() for precision in plan.precisions if _stays_packed(precision)}
    for index in range(plan.rounds):
        say(f"round {index + 1} of {plan.rounds}: the machine's limits")
        found.limits.append(measure(plan.threads))
        for precision in plan.precisions:
            contestants = [name for name in plan.contestants if has_precision(name, precision)]
            for name in contestants if index % 2 == 0 else reversed(contestants):
                where = f"round {index + 1} of {plan.rounds} · {precision} · {name}: "
                _measure_one(plan, found, name, precision, index, partial(_say_with, say, where))


def has_precision(name: str, precision: str) -> bool:
    """Whether a contestant is measured in it."""
    return precision != "int8" or name == "quire" or (name in PEERS and PEERS[name].has_int8)


def _stays_packed(precision: str) -> bool:
    """On this CPU, in Quire."""
    dtype, in_int8 = (torch.bfloat16, True) if precision == "int8" else (getattr(torch, precision), False)
    return fits_packed((576, 576), PACKINGS["q4_1"], dtype, torch.device("cpu"), in_int8=in_int8)


def _say_with(say: Callable[[str], None], prefix: str, text: str) -> None:
    say(prefix + text)


def _measure_one(
    plan: Plan, found: Comparison, name: str, precision: str, index: int, say: Callable[[str], None]
) -> None:
    if name == "hf":
        say("generate")
        checkpoint = export(plan.folder / precision, precision)
        answered, rates = hf_results(checkpoint, precision, plan.hf_batches, plan.output_len, plan.threads)
        found.answers.setdefault(f"hf {precision}", []).append(answered)
        found.hf += [(precision, batch, rate) for batch, rate in rates.items()]
        return
    _load(plan, found, server_of(plan, name, precision), precision, index, say)


def server_of(plan: Plan, name: str, precision: str) -> Server:
    """How to start a contestant; writes the weights that it reads, where they are not there."""
    if name == "quire":
        return quire_server(precision)
    if name == "unpacked":
        return unpacked_server(export(plan.folder / precision, precision), precision)
    return PEERS[name].server(Setup(plan.programs[name], plan.folder, precision, max(plan.concurrency)))


def _load(
    plan: Plan, found: Comparison, server: Server, precision: str, index: int, say: Callable[[str], None]
) -> None:
    """Put every load on one server."""
    say("starts")
    log = plan.folder / f"{server.name}-{precision}-{index}.log"
    if server.preloaded is not None:
        found.preloaded[server.name] = server.preloaded
    with running(server, log) as (url, process):
        answered = answers.of_server(url, server.ask)
        found.answers.setdefault(f"{server.name} {precision}", []).append(answered)
        wait_until_at_rest(process)
        for number, workload in enumerate(workloads(plan.concurrency, plan.output_len)):
            load = partial(_level, url, server.name, precision, index, workload, number, say)
            found.served.append(beside_memory(load, process, plan.threads) if workload.concurrency == 1 else load())
        if server.name != "quire":
            return
        several, number = waves(STREAMS, plan.output_len), len(plan.concurrency) + 2
        for turn in range(TURNS):
            http = _level(url, server.name, precision, index, several, number + turn, say).output_tokens_per_s
            say(f"offline, {turn + 1} of {TURNS}")
            with paused(process):
                offline = offline_tokens_per_s(precision, STREAMS, plan.output_len, plan.folder)
            wait_until_at_rest(process)
            found.waves.append((precision, http, offline))


def beside_memory(load: Callable[[], Served], process: psutil.Process, threads: int) -> Served:
    """With what the memory gave right before and right after, while the server stood still."""
    memory = readable(GIB)

    def look() -> float:
        with paused(process):
            return reading_gb_per_s(memory, threads)

    before = look()
    wait_until_at_rest(process)
    served = load()
    return replace(served, memory_gb_per_s=mean((before, look())))


def _level(
    url: str, name: str, precision: str, index: int, workload: Workload, number: int, say: Callable[[str], None]
) -> Served:
    done = 0

    def on_request() -> None:
        nonlocal done
        done += 1
        say(f"{workload.concurrency} streams, {workload.title}: {done} of {workload.num_requests}")

    # A seed of its own for every level, so that no prompt is cached; the same for all contestants.
    summary = load_server(url, workload, seed=1000 * index + 10 * number, on_request=on_request)
    return Served.of(summary, index, name, precision, workload)
