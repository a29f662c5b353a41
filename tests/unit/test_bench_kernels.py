"""What kernels are compared with is counted right, and the command runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quire.cluster.bench.commands import app
from quire.kernels import ops
from quire.kernels.packed import PACKINGS
from quire.workers.kernel_bench.cases import Case
from quire.workers.kernel_bench.measure import Limits, rated
from quire.workers.kernel_bench.work import Work, attention_work, choice_work, experts_work, linear_work, write_kv_work


def test_bytes_and_flops_of_attention() -> None:
    """A decode over 5 keys, and a chunk of 2 over 3: pairs of query and key are 5, and 2 + 3."""
    work = attention_work([(1, 5), (2, 3)], num_heads=4, num_kv_heads=2, head_dim=8, size=4, cache_size=1)
    assert work.num_bytes == (5 + 3) * 2 * 8 * 2 * 1 + (1 + 2) * 4 * 8 * 2 * 4
    assert work.flops == (5 + 2 + 3) * 4 * 8 * 4


def test_bytes_and_flops_of_the_others() -> None:
    assert write_kv_work(3, num_kv_heads=2, head_dim=8, size=2, cache_size=1) == Work(3 * 2 * 8 * 2 * 3, 0)
    assert linear_work(2, 6, 5, size=4, weight_bits=8) == Work(2 * (5 + 6) * 4 + 30, 2 * 2 * 30)
    assert choice_work(3, 8, 2, size=2) == Work(3 * (16 + 24), 0)
    work = experts_work(3, 2, 4, hidden_size=5, intermediate_size=7, size=2, weight_bits=16)
    assert work == Work(4 * 3 * 35 * 2 + 2 * 3 * 5 * 2, 3 * 2 * 2 * 3 * 35)


def test_the_limit_is_the_one_that_binds() -> None:
    """At 100 GB/s and 1 TFLOP/s: 1 GB is 10 ms, 1 GFLOP is 1 ms."""
    limits = Limits(copy_gb_per_s=100, matmul_tflop_per_s=1)
    moved, computed = (
        rated(Case("g", "n", work, torch.float32, lambda: lambda: None), 0.02, limits)
        for work in (Work(10**9, 10**9), Work(10**8, 15 * 10**9))
    )
    assert (moved.bound, moved.share, moved.gb_per_s) == ("copy", pytest.approx(0.5), pytest.approx(50))
    assert (computed.bound, computed.share, computed.tflop_per_s) == (
        "matmul",
        pytest.approx(0.75),
        pytest.approx(0.75),
    )


def test_it_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    command = ["kernels", "--shape", "tiny", "--device", "cpu", "--seconds", "0", "--json", str(path)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    document = json.loads(path.read_text())
    results = document["result"]["kernels"]
    assert {result["group"] for result in results} == {"attention", "write_kv", "linear", "experts", "draw"}
    assert all(result["us"] > 0 and result["share"] > 0 for result in results)
    assert document["result"]["limits"]["copy_gb_per_s"] > 0
    assert document["versions"]["torch"]
    rounds = ops.fits_packed((192, 64), PACKINGS["q4_1"], torch.float32, torch.device("cpu"), in_int8=True)
    for text in (
        "limits measured here",
        "decode 3 x 20, fp8 cache",
        "int8 192 x 64, 5 rows",
        "q4_1 192 x 64, 5 rows",
        *(["q4_1 in int8 192 x 64, 5 rows"] if rounds else []),
        "2 of 4, 5 tokens",
    ):
        assert text in printed.output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--shape", "gpt-9"], "'gpt-9' is none of llama-3.1-8b"),
        (["--only", "linear,gemm"], "'gemm' is none of attention"),
        (["--device", "cpu", "--tune"], "tile sizes are a GPU's"),
    ],
)
def test_what_there_is_not_is_refused(options: list[str], problem: str) -> None:
    printed = CliRunner().invoke(app, ["kernels", *options], env={"COLUMNS": "200"})
    assert printed.exit_code == 2
    assert problem in printed.output
