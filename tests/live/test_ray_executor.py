"""Ranks as Ray actors: the same tokens as one rank, also when a rank dies or hangs, and nothing left over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cluster_processes import processes, wait_for
from ray.util.placement_group import placement_group_table

from quire import LLM, SamplingParams
from quire.cluster import placement
from quire.cluster.placement import PlacementPlan, explain_shortage, plan_ranks, reserve
from quire.cluster.ray_executor import RayExecutor
from quire.engine.config import EngineConfig, ParallelConfig
from quire.engine.errors import ExecutorError, QuireError
from quire.engine.model_source import load_model_info
from quire.engine.outputs import SchedulerOutput

WORKER = "ray::WorkerActor"
PROMPTS = ["The capital of France is", "One, two, three,", "def fibonacci(n):", "Water boils at"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)


def nothing_is_left() -> bool:
    groups = placement_group_table().values()
    return not processes(WORKER) and all(group["state"] == "REMOVED" for group in groups)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_a_rank_that_cannot_load_says_why(cluster: str) -> None:
    config = EngineConfig.model_validate({"model": "smollm2-135m-instruct", "parallel": {"tensor_parallel_size": 2}})
    info = load_model_info(config.model)
    broken = info.__class__(**{name: getattr(info, name) for name in info.__slots__} | {"path": info.path.parent})
    with pytest.raises(QuireError) as caught:
        RayExecutor(config, broken)
    assert "\n" not in caught.value.message
    wait_for(nothing_is_left, 20, lambda: (processes(WORKER), placement_group_table()))


class Deadly:
    """Whoever receives it says a word and dies."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import os; os.write(2, b'the disk is\\nfull\\n'); os._exit(3)",)


def test_a_rank_that_dies_while_it_starts_is_told_with_its_last_words(cluster: str) -> None:
    config = EngineConfig.model_validate({"model": "smollm2-135m-instruct", "parallel": {"tensor_parallel_size": 2}})
    told = r"Rank 0 could not open the store of the ranks: .* It wrote last: .*the disk is \| full$"
    with pytest.raises(ExecutorError, match=told) as caught:
        RayExecutor(config, Deadly())  # type: ignore[arg-type]
    assert "\n" not in caught.value.message
    wait_for(nothing_is_left, 20, lambda: (processes(WORKER), placement_group_table()))


def test_a_rank_that_hangs_while_it_starts_is_given_up_in_time(cluster: str) -> None:
    parallel = {"tensor_parallel_size": 2, "startup_timeout_s": 5.0}
    config = EngineConfig.model_validate({"model": "smollm2-135m-instruct", "parallel": parallel})

    class Sleepy:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("import time; time.sleep(600)",)

    with pytest.raises(ExecutorError, match=r"^Ranks \[0\] did not open the store of the ranks within \d s\.$"):
        RayExecutor(config, Sleepy())  # type: ignore[arg-type]
    wait_for(nothing_is_left, 20, lambda: (processes(WORKER), placement_group_table()))


def test_a_plan_that_does_not_fit_says_what_is_missing(cluster: str) -> None:
    with pytest.raises(ExecutorError, match=r"1 CPU and 2 GPU on one node are needed, and no node has that: there is"):
        reserve(plan_ranks(ParallelConfig(tensor_parallel_size=2), on_gpu=True), timeout_s=0.5)
    wait_for(nothing_is_left, 20)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, list[list[int]]]:
    with LLM(num_kv_blocks=64, max_model_len=512) as llm:
        return {"greedy": tokens(llm, GREEDY), "seeded": tokens(llm, SEEDED)}


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def two_ranks(cluster: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(num_kv_blocks=64, max_model_len=512, num_threads=1, **{request.param: 2}) as llm:
        yield llm
    wait_for(nothing_is_left, 20, lambda: (processes(WORKER), placement_group_table()))


def test_two_ranks_give_the_tokens_of_one(two_ranks: LLM, one_rank: dict[str, list[list[int]]]) -> None:
    assert tokens(two_ranks, GREEDY) == one_rank["greedy"]
    assert tokens(two_ranks, SEEDED) == one_rank["seeded"]


@pytest.mark.parametrize(("victim", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_rank_costs_time_and_no_token(
    two_ranks: LLM,
    one_rank: dict[str, list[list[int]]],
    victim: int,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gang = two_ranks._engine.core._executor._gang  # type: ignore[attr-defined]
    pids = [process.pid for process in processes(WORKER)]
    if number == signal.SIGSTOP:
        monkeypatch.setattr(gang._deadline, "_most_s", 2.0)
    received: list[int] = []
    for output in two_ranks.stream(PROMPTS[0], GREEDY):
        if len(received) < 8 <= len(received) + len(output.outputs[0].token_ids):
            os.kill(pids[victim], number)
        received += output.outputs[0].token_ids
    assert received == one_rank["greedy"][0]
    assert two_ranks.stats().num_used_blocks == 0
    wait_for(lambda: len(processes(WORKER)) == 2, 20)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_under_many_streams(two_ranks: LLM, one_rank: dict[str, list[list[int]]], victim: int) -> None:
    """With a step on each stage of a pipeline."""
    pid = processes(WORKER)[victim].pid
    start = two_ranks.stats().num_generation_tokens

    def kill() -> None:
        wait_for(lambda: two_ranks.stats().num_generation_tokens > start + 20, 60)
        os.kill(pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        assert tokens(two_ranks, SEEDED) == one_rank["seeded"]
        killed.result()
    assert pid not in [process.pid for process in processes(WORKER)]
    assert two_ranks.stats().num_used_blocks == 0


def test_a_step_that_a_hung_rank_does_not_read_meets_its_deadline(
    two_ranks: LLM, one_rank: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step larger than the sockets' buffers: whoever sends it waits, and is freed when the ranks are given up."""
    gang = two_ranks._engine.core._executor._gang  # type: ignore[attr-defined]
    monkeypatch.setattr(gang._deadline, "_most_s", 1.0)
    os.kill(gang.facts[0].pid, signal.SIGSTOP)  # the first that the step is sent to
    nothing = np.zeros(0, np.int32)
    released = list(range(1 << 23))  # some 40 MB: more than any socket holds, less than the largest frame
    step = SchedulerOutput(
        step_id=0, rows=nothing, num_scheduled_tokens=nothing, num_computed_tokens=nothing, released_rows=released
    )
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(gang.execute, step).result(20)
    with pytest.raises(ExecutorError, match=r"A step hangs: ranks \[0, 1\] did not answer within 1 s"):
        future.result(20)
    assert tokens(two_ranks, GREEDY) == one_rank["greedy"]  # on ranks that were rebuilt


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"CPU": 8.0}], "there is 8 CPU and 0 GPU."),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}], "there is 8 CPU and 1 GPU; 4 CPU and 1 GPU."),
        ([{"CPU": 8.0, "GPU": 2.0}], "a node has that much, but it is in use."),
        ([], "there is no node."),
    ],
)
def test_a_shortage_is_explained(nodes: list[dict[str, float]], said: str) -> None:
    plan = PlacementPlan(({"CPU": 1.0, "GPU": 2.0},))
    assert explain_shortage(plan, nodes).startswith("1 CPU and 2 GPU on one node are needed")
    assert explain_shortage(plan, nodes).endswith(said)


@pytest.mark.parametrize(
    ("strategy", "nodes", "said"),
    [
        ("SPREAD", [{"CPU": 8.0, "GPU": 4.0}], "2 times; there is that much, but it is in use."),
        ("SPREAD", [{"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0, "GPU": 1.0}], "2 times, and the nodes do not have that: "),
        ("STRICT_SPREAD", [{"CPU": 8.0, "GPU": 4.0}], "2 times, each on a node of its own, and the nodes do not have"),
        (
            "STRICT_SPREAD",
            [{"CPU": 1.0, "GPU": 2.0}] * 2,
            "each on a node of its own; there is that much, but it is in",
        ),
    ],
)
def test_a_shortage_for_stages_is_explained(strategy: str, nodes: list[dict[str, float]], said: str) -> None:
    plan = PlacementPlan(({"CPU": 1.0, "GPU": 2.0},) * 2, strategy)
    assert said in explain_shortage(plan, nodes)


def test_the_plan_has_one_bundle_per_stage() -> None:
    assert plan_ranks(ParallelConfig(tensor_parallel_size=3), on_gpu=False) == PlacementPlan(({"CPU": 1.5},), "PACK")
    both = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert plan_ranks(both, on_gpu=True) == PlacementPlan(({"CPU": 1.0, "GPU": 2.0},) * 3, "SPREAD")
    alone = ParallelConfig(pipeline_parallel_size=2, stage_placement="strict_spread")
    assert plan_ranks(alone, on_gpu=False) == PlacementPlan(({"CPU": placement.CPU_PER_RANK},) * 2, "STRICT_SPREAD")
