"""`python -m tests.gpu`: the Triton kernels on the GPU of this machine, against the float32 reference, and CUDA graphs
of decode steps against the same steps launched kernel by kernel.

Needs torch with CUDA and triton, nothing else: no Ray, no model, no network. (Graphs need msgspec, pydantic, rich and
safetensors as well, and a line says when they were not checked.) Exits with 1 when a check fails and with 2 when there
is no GPU.

`python -m tests.gpu --bench` goes on to speed: every kernel, then steps of the engine with dummy weights in the shapes
of Qwen3-0.6B and Llama-3.1-8B, many requests of mixed lengths, and profiles of steps (which kernels take their time),
each beside the limits measured in the same run; `--json FILE` keeps the figures. Still no Ray and no download; the
engine needs Quire's own dependencies besides (pydantic, msgspec), and is left out without.

    python -m tests.gpu                                            # all checks, a process for each of 8 cores
    python -m tests.gpu --bench --json gpu.json                    # and all figures
    python -m tests.gpu --bench --only steps mixed --models Llama-3.1-8B
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .checks import run_checks  # isort: split

from . import engine_speed

ENGINE_NEEDS = ("pydantic", "msgspec", "tokenizers", "transformers")
CHECKS, KERNELS, STEPS, MIXED, PROFILE = PARTS = ("checks", "kernels", "steps", "mixed", "profile")
OF_ENGINE = {STEPS, MIXED, PROFILE}
# By the shapes of its layers, and by its configuration.
MODELS = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-0.6B": "qwen3-0.6b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", action="store_true", help="speed as well: kernels, and steps of the engine")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures of --bench")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"some of {', '.join(MODELS)}")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that check (default: %(default)s)"
    )
    options = parser.parse_args()
    parts = options.only or (PARTS if options.bench else (CHECKS,))
    models = options.models or list(MODELS)
    if set(parts) - {CHECKS} and not options.bench:
        parser.error(f"--only {' '.join(parts)}: only checks run without --bench")
    if options.json is not None and not set(parts) - {CHECKS}:
        parser.error("--json: nothing is measured without --bench")
    if KERNELS not in parts and OF_ENGINE & set(parts) and not set(models) & set(engine_speed.CONFIGS):
        parser.error(f"--models: steps are measured of {', '.join(engine_speed.CONFIGS)}")
    if not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} sees no CUDA device. Nothing was checked.", file=sys.stderr)
        return 2
    import triton

    machine = (
        f"{torch.cuda.get_device_name()} · torch {torch.__version__} · triton {triton.__version__}"
        f" · Python {platform.python_version()}"
    )
    print(machine)
    failed = check(options.jobs) if CHECKS in parts else 0
    if set(parts) - {CHECKS}:
        figures: dict[str, Any] = {"machine": machine, "limits": {}, "kernels": {}, "engine": {}}
        # A part at a time: what was measured is kept, whatever becomes of the rest.
        for _ in bench(figures, parts, models):
            if options.json is not None:
                options.json.write_text(json.dumps(figures, indent=2) + "\n")
        failed += len(figures.get("failed", ()))
    return 1 if failed else 0


def check(num_processes: int) -> int:
    """How many checks fail."""
    num_checks = num_failed = 0
    for results in run_checks(num_processes):
        for name, problem in results.items():
            print(f"{problem or 'ok':<8} {name}", flush=True)
            num_checks += 1
            num_failed += problem is not None
    print(f"{num_checks - num_failed} of {num_checks} checks passed")
    return num_failed


def bench(figures: dict[str, Any], parts: list[str], models: list[str]) -> Iterator[None]:
    """Print the tables and add to the figures, part by part. A part that fails is named in `failed`."""
    from quire.workers.kernel_bench.cases import GPU_SIZES, GROUPS, cases
    from quire.workers.kernel_bench.measure import Timer, measure, measure_limits
    from quire.workers.kernel_bench.shapes import SHAPES

    device = torch.device("cuda")
    timer = Timer(device, min_s=0.1)
    limits = measure_limits(timer, device, torch.bfloat16, num_bytes=1 << 30, size=8192)
    print(f"limits: copy {limits.copy_gb_per_s:,.0f} GB/s · matrix product {limits.matmul_tflop_per_s:,.0f} TFLOP/s")
    figures["limits"] = asdict(limits)
    yield
    for name in (MODELS[model] for model in models if KERNELS in parts):
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
    if not OF_ENGINE & set(parts):
        return
    missing = [name for name in ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"\nThe engine was not measured: {', '.join(missing)} not installed.")
        return
    sizes: dict[str, Any] = {"context": 1024}
    sizes |= {"batches": (1, 16, 64, 256), "prefills": (2048, 8192, 32768)} if STEPS in parts else {}
    sizes |= {"profiled": (1, 64), "profiled_prefills": (2048,)} if PROFILE in parts else {}
    mixed = engine_speed.MIXED if MIXED in parts else None
    for name, config in engine_speed.CONFIGS.items():
        if name not in models:
            continue
        print(f"\n{name}, dummy weights, bfloat16")
        speeds = figures["engine"][name] = []
        with failures_told(figures, name):
            for measured in engine_speed.measure(config, limits, mixed=mixed, **sizes):
                print(measured, flush=True)
                speeds.append(measured.figures())
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
