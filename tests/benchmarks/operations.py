"""What the operations of a step take, by the clock: `python -m tests.benchmarks.operations --precision bfloat16`.

Runs the default model in this process, and times every operation that a step asks the kernels for (`quire.kernels`),
one after the other, on the thread that runs the model. Shown is the fastest of the steps that compute whole prompts,
and, launched one by one as `enforce_eager` does, of those that decode. What a profiler of Python cannot see, for all of
it is one call into compiled code.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cluster.bench.machine import describe_machine
from quire.engine.outputs import SchedulerOutput
from quire.kernels import dispatch
from quire.workers.model_runner import ModelRunner

OPERATIONS = (
    "add_rms_norm", "rms_norm", "activate_and_mul", "rotate", "rotate_and_write_kv", "write_kv", "paged_attention",
    "linear", "linear_int8", "linear_packed", "linear_gated_packed", "likeliest_packed", "experts", "exclude_tokens",
    "draw_tokens", "likeliest_tokens", "angles",
)  # fmt: skip


@dataclass(slots=True)
class Step:
    """Seconds and calls by operation."""

    num_tokens: int
    num_requests: int
    seconds: float = 0.0
    by_operation: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@contextmanager
def watched(steps: list[Step]) -> Iterator[None]:
    """Steps inside, and what they ask the CPU kernels for, are timed."""
    backend, launch = cast(Any, dispatch.backend_for(Tensor().device)), ModelRunner.launch

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            taken = time.perf_counter() - started
            if steps:
                label = (
                    f"{name} {len(args[1])} x {args[0].shape[1]}"
                    if name.startswith("linear") or name.endswith("packed")
                    else name
                )
                steps[-1].by_operation[label] += taken
                steps[-1].calls[label] += 1
            return result

        return run

    def timed_launch(self: ModelRunner, step: SchedulerOutput, *told: Any) -> Any:
        steps.append(Step(step.total_num_scheduled_tokens, len(step.rows)))
        started = time.perf_counter()
        result = launch(self, step, *told)
        steps[-1].seconds = time.perf_counter() - started
        return result

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(backend, name, timed(name, getattr(backend, name)))
        patch.setattr(ModelRunner, "launch", timed_launch)
        patch.setattr(ModelRunner, "record_graphs", lambda *_: None)
        yield


def markdown(step: Step) -> str:
    """The longest first; what is left is Python, and torch's own operators."""
    lines = ["| operation | calls | ms | share |", "|---|---|---|---|"]
    rest = step.seconds - sum(step.by_operation.values())
    for name, seconds in sorted(step.by_operation.items(), key=lambda item: -item[1]):
        lines.append(f"| {name} | {step.calls[name]} | {seconds * 1e3:.1f} | {seconds / step.seconds:.0%} |")
    return "\n".join([*lines, f"| the rest | | {rest * 1e3:.1f} | {rest / step.seconds:.0%} |"])


def fastest(steps: list[Step], num_tokens: int) -> Step:
    return min((step for step in steps if step.num_tokens == num_tokens), key=lambda step: step.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.operations", description=__doc__)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=128)
    args = parser.parse_args()
    num_tokens = args.num_prompts * args.input_len
    steps: list[Step] = []
    with watched(steps):
        llm = LLM(
            dtype="float32" if args.precision == "int8" else args.precision,
            quantization="int8" if args.precision == "int8" else None,
            max_model_len=1024,
            max_num_batched_tokens=max(num_tokens, 2048),
            num_speculative_tokens=0,
            max_inflight_steps=1,  # what is launched is computed then
        )
        for seed in range(5):
            numbers = random.Random(seed)
            prompts = [[numbers.randrange(10, 10_000) for _ in range(args.input_len)] for _ in range(args.num_prompts)]
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    facts = " · ".join(f"{name} {value}" for name, value in describe_machine().items())
    print(f"{facts}; {args.precision}")
    for title, tokens in (("prompts", num_tokens), ("decodes", args.num_prompts)):
        step = fastest(steps, tokens)
        print(f"\n{step.num_requests} {title}, {tokens} tokens: {step.seconds * 1e3:.1f} ms\n\n{markdown(step)}")


if __name__ == "__main__":
    main()
