"""All checks of kernels and graphs, several at a time: they compile for minutes, and a GPU has room for all of them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# A bare machine runs the checkout without installing it.
sys.path[:0] = [
    str(ROOT / part) for part in ("src", "tests/kernels", "tests/models") if str(ROOT / part) not in sys.path
]

Results = dict[str, str | None]  # by name: None, or what is wrong


def run_checks(num_processes: int) -> Iterator[Results]:
    """Each as soon as it is known. What dies takes down those that ran beside it; they are told as failed."""
    left = dict.fromkeys([*_kernel_checks(), *_graph_cases()])
    context = multiprocessing.get_context("spawn")  # a process that has forked cannot use the GPU
    while left:
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            names = {pool.submit(_run, name): name for name in left}
            for done in as_completed(names):
                try:
                    results = done.result()
                except BrokenProcessPool:
                    continue
                del left[names[done]]
                yield results
        if left:  # the first of them, or one that ran beside it, has ended its process
            first = next(iter(left))
            del left[first]
            yield {first: "its process died, or one beside it"}


def _run(name: str) -> Results:
    torch.set_num_threads(1)
    checks = _kernel_checks()
    if name in checks:
        from triton_checks import run_check

        return {name: run_check(checks[name], "cuda")}
    from graph_checks import CASES, run_graph_checks

    from quire.workers.decode_graphs import CudaGraphBackend

    (case,) = (case for case in CASES if case.name == name)
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        return run_graph_checks(case, device, lambda: CudaGraphBackend(device))
    except Exception as error:
        traceback.print_exc()
        return {name: f"{type(error).__name__}: {error}"}


def _kernel_checks() -> dict:
    from triton_checks import checks

    return checks()


def _graph_cases() -> list[str]:
    """Names; none, and a line that says so, where what models are made with is not installed."""
    needed = ("msgspec", "pydantic", "rich", "safetensors")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"CUDA graphs were not checked: {', '.join(missing)} not installed.", file=sys.stderr)
        return []
    from graph_checks import CASES

    return [case.name for case in CASES]
