"""What the benchmarks of the serving path and of the hot loop make of what they see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.cluster.bench.latency import RequestTiming, summarize
from tests.benchmarks import hot_loop, operations, serving_path


def test_samples_of_steps_are_shared_out() -> None:
    step = "thread (7): MainThread;generate (quire/engine/llm.py:1);step (quire/engine/core.py:5)"
    profile = hot_loop.read(
        [
            f"{step};linear (quire/kernels/ops.py:3);matmul (torch/x.py:1) 6",
            f"{step};linear (quire/kernels/ops.py:4) 1",
            f"{step};sample (quire/workers/sampler/sampler.py:9) 2",
            f"{step} 1",
            "thread (7): MainThread;load_model (quire/workers/worker.py:2) 50",
            "thread (8): page filler;_run (quire/workers/page_filler.py:5) 50",
        ]
    )
    assert profile.num_samples == 10
    text = hot_loop.markdown(profile, 2).splitlines()
    assert text[-2] == "| `linear (quire/kernels/ops.py)` | 70.0% | 70.0% |"
    assert text[-1] == "| `sample (quire/workers/sampler/sampler.py)` | 20.0% | 20.0% |"
    assert profile.anywhere["step (quire/engine/core.py"] == 10


def test_costs_are_shown_with_what_is_there_without_load() -> None:
    summary = summarize([RequestTiming(0.0, 1.0, (0.5,), 5, 1)], 1)
    cost = serving_path.Cost(100, {"gateway": 0.02}, {"gateway": 51.2, "client": 9.0}, {"engine-loop": 1234.0}, summary)
    text = serving_path.markdown(cost)
    assert "| gateway | 2.0% | 51 |" in text
    assert "| client | 0.0% | 9 |" in text
    assert "| engine-loop | 1,234 |" in text
    assert "gateway" not in serving_path.markdown(replace(cost, by_role={}))


def test_operations_are_shown_by_what_they_take() -> None:
    """Medians of each call over the runs of the number of rows that is asked for, of the program that has most."""
    clocks, other = operations.Clocks(["norm", "linear 960 x 576", "norm"]), operations.Clocks(["norm"])
    clocks.runs[8] = [np.array(run) for run in ([100, 900, 200], [300, 800, 200], [100, 1000, 9000])]
    clocks.runs[1] = other.runs[8] = [np.array([5, 5, 5])]
    assert operations.most_run([other, clocks], 8) is clocks
    assert operations.markdown(clocks, 8, 1000.0).splitlines()[2:] == [
        "| linear 960 x 576 | 1 | 0.90 | 900.0 | 75% |",
        "| norm | 2 | 0.30 | 150.0 | 25% |",
        "| all | 3 | 1.20 | | |",
    ]
