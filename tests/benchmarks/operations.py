"""What the operations of a step take: `python -m tests.benchmarks.operations --precision bfloat16`.

    norm | linear | rotate | attend | linear | ...       the program of a step, which threads walk through together
         ^        ^        ^        ^                    clocks: who comes first writes down when

Runs a model in this process, whose steps are recorded (docs/kernels.md). Behind each call of a program stands
one more, which reads the clock of the CPU. Shown are medians over the steps that compute all prompts, up to where one
token of each goes on, and over those that decode; and how far the cores are from each other, on which much depends.
What a profiler of Python cannot see, for all of a program is one call.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc, types
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cluster.bench.machine import describe_machine
from quire.kernels import dispatch
from quire.kernels.cpu.claims import new_claims
from quire.kernels.cpu.graph import Recorder
from quire.kernels.cpu.intrinsics import compare_exchange, load_acquire, pause, store_release, ticks
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recording import CompiledCall

OPERATIONS = (
    "add_rms_norm", "rms_norm", "activate_and_mul", "rotate", "rotate_and_write_kv", "write_kv", "paged_attention",
    "linear", "linear_int8", "linear_packed", "linear_gated_packed", "likeliest_packed", "choose_experts", "experts",
    "exclude_tokens",
    "draw_tokens", "likeliest_tokens", "angles",
)  # fmt: skip
NOT_RECORDED = "Not recorded: of experts, what prompts need is looked at first."
OTHERS = "of torch"  # look-ups, copies and sums between them

_LINE = 64  # bytes that cores hand to each other as one
_EXCHANGES = 2_000
_BLOCK = 16  # tokens
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cfunc(types.void(types.int64), error_model="numpy")
def _read_clock(address: int) -> None:
    """Threads come to it one after the other: the first counts."""
    if load_acquire(address) == 0:
        compare_exchange(address, 0, ticks())


@cfunc(types.void(types.int64, types.int64, types.int64), error_model="numpy")
def _exchange(address: int, first: int, count: int) -> None:
    """Wait for every other number from `first` on, and write the next one."""
    for number in range(first, first + 2 * count, 2):
        while load_acquire(address) != number:
            pause()
        store_release(address, number + 1)


@dataclass(slots=True)
class Clocks:
    """Of one program: what its calls belong to, and when each was over in how many runs."""

    labels: list[str]
    times: np.ndarray = field(init=False)  # [calls, a line of the cache] ticks
    began: int = 0
    num_rows: int = 0  # of the run, if the program is for any number; else 0
    runs: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))  # by `num_rows`: [calls] ticks

    def __post_init__(self) -> None:
        self.times = np.zeros((len(self.labels), _LINE // 8), np.int64)

    def calls(self) -> list[CompiledCall]:
        """One for each call of the program."""
        function, num_threads = _Function(_read_clock.address), torch.get_num_threads()
        return [
            CompiledCall(
                function,
                (ctypes.c_int64 * 1).from_address(row.ctypes.data),
                new_claims(num_threads),
                rows=(),
                is_idempotent=True,
            )
            for row in self.times
        ]

    def begin(self) -> None:
        self.times[:] = 0
        self.began = now()

    def end(self) -> None:
        self.runs[self.num_rows].append(np.diff(self.times[:, 0], prepend=self.began))


def now() -> int:
    """In ticks of the CPU; 0 where it has no such clock."""
    place = np.zeros(1, np.int64)
    _Function(_read_clock.address)(place.ctypes.data)
    return int(place[0])


def ticks_per_ms() -> float:
    begin, before = time.perf_counter(), now()
    time.sleep(0.2)
    return (now() - before) / (time.perf_counter() - begin) / 1e3


def exchange_ns() -> float:
    """What a number takes from one core to another and back: the least of some."""
    place = np.zeros(_LINE // 4, np.int64)
    address = place.ctypes.data + -place.ctypes.data % _LINE
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_exchange.address)
    found = []
    for _ in range(5):
        place[:] = 0
        other = threading.Thread(target=run, args=(address, 1, _EXCHANGES))
        other.start()
        begin = time.perf_counter()
        run(address, 0, _EXCHANGES)
        found.append((time.perf_counter() - begin) / _EXCHANGES * 1e9)
        other.join()
    return min(found)


def label_of(name: str, args: Sequence[Any]) -> str:
    """An operation, and the shape of the weight that it is called with."""
    has_weight = name.startswith("linear") or name.endswith("packed")
    return f"{name} {len(args[1])} x {args[0].shape[1]}" if has_weight else name


@contextmanager
def watched(programs: list[Clocks]) -> Iterator[None]:
    """Programs that are recorded inside have clocks, and are listed."""
    backend: Any = dispatch.backend_for(Tensor().device)
    clocks: dict[Program, Clocks] = {}
    labels: dict[int, str] = {}  # by the address of a call's arguments
    asked_for: list[str] = []  # the operations that call each other, the outermost first
    add_call, make, start = Recorder.add_call, Program.__init__, Program.start
    join, run_for = Program.join, Program.run_for

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            asked_for.append(label_of(name, args))
            try:
                return function(*args, **kwargs)
            finally:
                asked_for.pop()

        return run

    def add_labelled(self: Recorder, call: CompiledCall) -> None:
        labels[ctypes.addressof(call.arguments)] = asked_for[0] if asked_for else OTHERS
        add_call(self, call)

    def make_with_clocks(self: Program, calls: Sequence[CompiledCall], lag: int = 0) -> None:
        clocks[self] = Clocks([labels[ctypes.addressof(call.arguments)] for call in calls])
        programs.append(clocks[self])
        pairs = zip(calls, clocks[self].calls(), strict=True)
        make(self, [call for pair in pairs for call in pair], 2 * lag)

    def start_clocks(self: Program) -> None:
        clocks[self].begin()
        start(self)

    def read_clocks(self: Program) -> None:
        join(self)
        clocks[self].end()

    def run_of_rows(self: Program, num_rows: int) -> None:
        clocks[self].num_rows = num_rows
        run_for(self, num_rows)

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(backend, name, named(name, getattr(backend, name)))
        patch.setattr(Recorder, "add_call", add_labelled)
        patch.setattr(Program, "__init__", make_with_clocks)
        patch.setattr(Program, "start", start_clocks)
        patch.setattr(Program, "join", read_clocks)
        patch.setattr(Program, "run_for", run_of_rows)
        yield


def most_run(programs: Sequence[Clocks], num_rows: int) -> Clocks:
    """The program that was run most often with so many rows."""
    return max(programs, key=lambda each: len(each.runs.get(num_rows, ())))


def markdown(clocks: Clocks, num_rows: int, scale: float) -> str:
    """The medians of all calls, by what they belong to, the longest first. scale: ticks in a millisecond."""
    medians = np.median(clocks.runs[num_rows], axis=0) / scale
    counts, taken, whole = Counter(clocks.labels), Counter[str](), float(medians.sum())
    for label, ms in zip(clocks.labels, medians.tolist(), strict=True):
        taken[label] += ms
    lines = ["| operation | calls | ms | us a call | share |", "|---|---|---|---|---|"]
    for label, ms in taken.most_common():
        lines.append(f"| {label} | {counts[label]} | {ms:.2f} | {ms / counts[label] * 1e3:.1f} | {ms / whole:.0%} |")
    return "\n".join([*lines, f"| all | {len(clocks.labels)} | {whole:.2f} | | |"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.operations", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--precision", default="float32", choices=("float32", "bfloat16", "int8"), help="int8: with bfloat16 beside it"
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="its name or folder, for instance of one that is not packed"
    )
    parser.add_argument("--num-prompts", type=int, default=8, help="at a time")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=8, help="of all prompts")
    args = parser.parse_args()
    scale = ticks_per_ms()
    if scale == 0:
        parser.error("this CPU has no clock that compiled calls can read")
    programs: list[Clocks] = []
    num_tokens, blocks = args.num_prompts * args.input_len, -(-(args.input_len + args.output_len) // _BLOCK)
    exchanges = []
    with watched(programs):
        llm = LLM(
            args.model,
            dtype="float32" if args.precision == "float32" else "bfloat16",
            quantization="int8" if args.precision == "int8" else None,
            block_size=_BLOCK,
            num_kv_blocks=args.num_prompts * blocks + 2,  # no memory is new after the first round
            max_model_len=blocks * _BLOCK,
            max_num_batched_tokens=max(num_tokens, 2048),
            num_speculative_tokens=0,
            enable_prefix_caching=False,
        )
        numbers = random.Random(0)
        for _ in range(args.rounds + 1):
            prompts = [[numbers.randrange(10, 10_000) for _ in range(args.input_len)] for _ in range(args.num_prompts)]
            params = SamplingParams(max_tokens=args.output_len, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            exchanges.append(exchange_ns())
    facts = " · ".join(f"{name} {value}" for name, value in describe_machine().items())
    print(f"{facts}; {args.model} in {args.precision}")
    print(f"A number to another core and back: {statistics.median(exchanges):.0f} ns")
    for title, rows in ((f"{args.num_prompts} prompts, {num_tokens} tokens", num_tokens), ("decodes", 0)):
        clocks = most_run(programs, rows)
        print(f"\n{title}\n\n{markdown(clocks, rows, scale) if rows in clocks.runs else NOT_RECORDED}")


if __name__ == "__main__":
    main()
