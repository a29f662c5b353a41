"""`python -m tests.benchmarks.peers`: measure, print Markdown, write JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from quire.cluster.bench.machine import describe_machine, package_versions
from quire.engine.errors import QuireError

from .compare import Comparison, Plan, compare, has_precision
from .programs import PEERS, add_options, given
from .report import faults, markdown

CONTESTANTS = ("quire", "unpacked", *PEERS, "hf")
PRECISIONS = ("float32", "bfloat16", "int8")


def main() -> int:
    """0: all was measured, and the answers are as they should be."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end as with Ctrl-C
    console = Console(stderr=True)
    started = time.monotonic()
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        args.only, args.precision, args.concurrency, args.hf_batch, args.output_len, args.rounds, args.programs,
        args.folder, len(os.sched_getaffinity(0)),
    )  # fmt: skip
    machine, versions = describe_machine(), package_versions()
    found = Comparison()
    problems: list[str] = []
    try:
        with console.status("starts") as status:
            compare(plan, found, lambda text: status.update(f"{text} · {time.monotonic() - started:.0f} s"))
    except QuireError as error:
        problems.append(error.message)
    except KeyboardInterrupt:
        return 130
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "versions": versions, **asdict(found)}, indent=2) + "\n")
    facts = " · ".join(f"{name} {value}" for name, value in {**machine, **versions}.items())
    print(f"{facts}; {args.rounds} round(s), {time.monotonic() - started:.0f} s\n\n{markdown(found)}")
    problems += faults(found)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description="Quire and its peers on the default model, one after the other on this machine's CPU.",
        epilog="Example: python -m tests.benchmarks.peers --vllm-python ~/vllm/bin/python --rounds 3 --json peers.json",
    )
    add = parser.add_argument
    known = ",".join(CONTESTANTS)
    add("--only", type=_names(CONTESTANTS), metavar="NAMES", help=f"of {known}; default: all that can be started")
    add("--precision", type=_names(PRECISIONS), default=PRECISIONS, metavar="NAMES", help="default all three")
    add("--concurrency", type=_numbers, default=(1, 8, 32), metavar="NUMBERS", help="default 1,8,32")
    add("--hf-batch", type=_numbers, default=(8, 32), metavar="NUMBERS", help="default 8,32")
    add("--output-len", type=int, default=128, help="tokens of an answer; fewer for a quick look")
    add("--rounds", type=int, default=1, help="the machine drifts: medians over some are worth more")
    add_options(parser)
    add("--folder", type=Path, help="for checkpoints and logs; a new temporary one when not given")
    add("--json", type=Path, help="write all measurements there")
    args = parser.parse_args()
    args.programs = given(parser, args)
    if args.only is None:
        args.only = tuple(name for name in CONTESTANTS if name not in PEERS or name in args.programs)
    elif idle := [name for name in args.only if not any(has_precision(name, each) for each in args.precision)]:
        parser.error(f"--only: {', '.join(idle)}: not measured in {', '.join(args.precision)}")
    for name in args.only:
        if name in PEERS and name not in args.programs:
            parser.error(f"{PEERS[name].option}: needed for {name}, which --only names")
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="quire-peers-"))
    return args


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
