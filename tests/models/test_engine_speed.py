"""What `python -m tests.gpu --bench` measures of the engine, on CPU, with no more installed than a GPU machine has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of what the service needs, a machine for kernels has torch, transformers with what it brings, and perhaps msgspec.
SCRIPT = """
import sys

sys.modules.update(dict.fromkeys(%r))

from quire.workers.kernel_bench.measure import Limits
from tests.gpu.engine_speed import CONFIGS, Mixed, Speed, measure

small = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 500}
config = {**CONFIGS["Qwen3-0.6B"], **small}
limits = Limits(copy_gb_per_s=10.0, matmul_tflop_per_s=0.1)
sizes = {"batches": (1, 3), "context": 40, "prefills": (64,), "mixed": Mixed(5, range(10, 21)), "num_steps": 200}
profiled = {"profiled": (2,), "profiled_prefills": (48,)}
for measured in measure(config, limits, **sizes, **profiled, device="cpu"):
    print(measured.work)
    if isinstance(measured, Speed):
        assert measured.ms > 0 and measured.limit_ms > 0
        continue
    total, *rows = (line.split() for line in str(measured).split("\\n"))
    printed_us = sum(float(row[-2]) for row in rows)
    assert len(rows) > 5 and abs(printed_us - 1e3 * float(total[-4])) < 5 + 0.06 * len(rows), measured
    assert abs(printed_us - sum(us for *_, us in measured.kernels)) < 0.06 * len(rows), measured
"""
MISSING = ("ray", "llguidance", "fastapi", "starlette", "uvicorn", "grpc", "google.protobuf", "gguf", "aiohttp",
           "prometheus_client")  # fmt: skip


def test_the_engine_is_measured_where_the_service_could_not_run() -> None:
    command = [sys.executable, "-c", SCRIPT % (MISSING,)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    decodes = ["decode, batch 1, context 40", "decode, batch 3, context 40"]
    profiles = ["kernels of decode, batch 2, context 40", "kernels of prefill 48"]
    assert done.stdout.split("\n")[:-1] == [*decodes, "prefill 64", "5 requests, 10-20 in and out", *profiles]
