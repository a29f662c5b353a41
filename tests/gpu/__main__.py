"""`python -m tests.gpu`: the Triton kernels on the GPU of this machine, against the float32 reference, and CUDA graphs
of decode steps against the same steps launched kernel by kernel.

Needs torch with CUDA and triton, nothing else: no Ray, no model, no network. (Graphs need msgspec, pydantic, rich and
safetensors as well, and a line says when they were not checked.) Exits with 1 when a check fails and with 2 when there
is no GPU.

`python -m tests.gpu --bench` goes on to speed: every kernel, then steps of the engine with dummy weights in the shapes
of Qwen3-0.6B and Llama-3.1-8B, each beside the limits measured in the same run; `--json FILE` keeps the figures. Still
no Ray and no download; the engine needs Quire's own dependencies besides (pydantic, msgspec), and is left out without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# A bare machine runs the checkout without installing it.
sys.path[:0] = [str(ROOT / part) for part in ("src", "tests/kernels", "tests/models")]

ENGINE_NEEDS = ("pydantic", "msgspec", "tokenizers", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="The Triton kernels on this GPU.")
    parser.add_argument("--bench", action="store_true", help="speed as well: kernels, and steps of the engine")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures of --bench")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} sees no CUDA device. Nothing was checked.", file=sys.stderr)
        return 2
    import triton

    machine = (
        f"{torch.cuda.get_device_name()} · torch {torch.__version__} · triton {triton.__version__}"
        f" · Python {platform.python_version()}"
    )
    print(machine)
    failed = check()
    if options.bench:
        figures: dict[str, Any] = {"machine": machine, "limits": {}, "kernels": {}, "engine": {}}
        for _ in bench(figures):  # a part at a time: what was measured is kept, whatever becomes of the rest
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
        failed += len(figures.get("failed", ()))
    return 1 if failed else 0


def check() -> int:
    """How many checks fail."""
    from triton_checks import checks, run_check

    todo = checks()
    width = max(map(len, todo))
    results: dict[str, str | None] = {}
    for name, check_it in todo.items():  # each is told when it is known: the first run compiles for minutes
        results[name] = run_check(check_it, "cuda")
        print(f"{name:<{width}}  {results[name] or 'ok'}", flush=True)
    for name, problem in graph_results():
        results[name] = problem
        print(f"{name:<{width}}  {problem or 'ok'}", flush=True)
    failed = sum(problem is not None for problem in results.values())
    print(f"{len(results) - failed} of {len(results)} checks passed")
    return failed


def graph_results() -> Iterator[tuple[str, str | None]]:
    """As of the kernels: names, and None or what was wrong."""
    missing = [
        name for name in ("msgspec", "pydantic", "rich", "safetensors") if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(f"CUDA graphs were not checked: {', '.join(missing)} not installed.", file=sys.stderr)
        return
    from graph_checks import CASES, run_graph_checks

    from quire.workers.decode_graphs import CudaGraphBackend

    device = torch.device("cuda", torch.cuda.current_device())
    for case in CASES:
        try:
            yield from run_graph_checks(case, device, lambda: CudaGraphBackend(device)).items()
        except Exception as error:
            traceback.print_exc()
            yield case.name, f"{type(error).__name__}: {error}"


def bench(figures: dict[str, Any]) -> Iterator[None]:
    """Print the tables and add to the figures, part by part. A part that fails is named in `failed`."""
    from quire.workers.kernel_bench.cases import GPU_SIZES, GROUPS, cases
    from quire.workers.kernel_bench.measure import Timer, measure, measure_limits
    from quire.workers.kernel_bench.shapes import SHAPES

    device = torch.device("cuda")
    timer = Timer(device, min_s=0.1)
    limits = measure_limits(timer, device, torch.bfloat16, num_bytes=1 << 30, size=8192)
    print(f"limits: copy {limits.copy_gb_per_s:,.0f} GB/s · matrix product {limits.matmul_tflop_per_s:,.0f} TFLOP/s")
    figures["limits"] = asdict(limits)
    for name in ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b"):
        print(f"\n{name}, bfloat16")
        measured = figures["kernels"][name] = []
        for case in cases(SHAPES[name], GPU_SIZES, device, torch.bfloat16, 16, GROUPS):
            with failures_told(figures, f"{name}, {case.name}"):
                (r,) = measure([case], timer, limits)
                rates = f"{r.us:>10,.1f} us {r.gb_per_s:>8,.0f} GB/s {r.tflop_per_s:>8.2f} TFLOP/s"
                print(f"{r.group:<10} {r.name:<38} {rates}  {r.share:>4.0%} of {r.bound}", flush=True)
                measured.append(asdict(r))
        yield
    del timer
    torch.cuda.empty_cache()
    missing = [name for name in ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nThe engine was not measured: {', '.join(missing)} not installed.")
        return
    from tests.gpu import engine_speed

    for name, config in engine_speed.CONFIGS.items():
        print(f"\n{name}, dummy weights, bfloat16")
        with failures_told(figures, name):
            speeds = engine_speed.measure(
                config, limits, batches=(1, 16, 64, 256), context=1024, prefills=(2048, 8192, 32768)
            )
            for speed in speeds:
                rates = f"{speed.ms:>9.2f} ms {speed.tokens_per_s:>10,.0f} tok/s"
                print(f"{speed.work:<36} {rates}  {speed.share:>4.0%} of the limit", flush=True)
            figures["engine"][name] = [asdict(speed) | {"share": speed.share} for speed in speeds]
        yield


@contextmanager
def failures_told(figures: dict[str, Any], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        figures.setdefault("failed", {})[what] = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
