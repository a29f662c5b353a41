"""On CPU a decode step is computed while the next one is planned, and a prompt when its result is asked for."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from core_driver import Driver
from graph_checks import VOCAB_SIZE, make_model, make_runner, steps_of
from inflight_executor import CountedBackend
from test_steps_in_flight import MAX_LEN, all_kinds, compare
from tiny_llama import make_tiny_llama

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.errors import ExecutorError
from quire.engine.kv_cache_spec import group_layers
from quire.engine.model_source import load_model_info
from quire.engine.outputs import EngineRequest, GrammarMasks, SchedulerOutput
from quire.engine.sampling_params import SamplingParams
from quire.kernels.cpu.team import team_of
from quire.workers.kv_cache import allocate_kv_cache
from quire.workers.launched_step import LaunchedStep
from quire.workers.layers.attention import LayerCache
from quire.workers.local_executor import LocalExecutor
from quire.workers.model_runner import ModelRunner

NUM_REQS = 3


_ENDS_AMID_A_STEP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_planned_ahead import MAX_LEN, Driver, greedy, make_executor
driver = Driver(make_executor(Path(sys.argv[1]), model={"dtype": "bfloat16"}), MAX_LEN)
driver.core.add_request(greedy("interrupted", 1))
for _ in range(6):
    driver.core.step()
print(len(driver.core._inflight))
"""


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(directory, initializer_range=0.12)
    return directory


def make_executor(directory: Path, **sections: dict[str, Any]) -> LocalExecutor:
    model = {"num_threads": 2, "device": "cpu", **sections.pop("model", {})}
    config = EngineConfig.model_validate({"model": model, **sections})
    return LocalExecutor(config, load_model_info(ModelConfig(model=str(directory))))


def greedy(request_id: str, first: int, num_tokens: int = 40) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompt = list(range(first, first + 20))
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params, seed=0)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"dtype": "bfloat16"}}, 2),
        ({"model": {"quantization": "int8"}}, 2),
        ({}, 2),
        ({"scheduler": {"num_speculative_tokens": 2}}, 2),
        ({"model": {"dtype": "bfloat16", "enforce_eager": True}}, 1),
        ({"model": {"dtype": "bfloat16", "num_threads": 1}}, 1),
    ],
    ids=str,
)
def test_how_far_ahead_is_planned(directory: Path, sections: dict, expected: int) -> None:
    assert make_executor(directory, **sections).preferred_inflight_steps() == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 4),
        ({"model": {"dtype": "float32", "enforce_eager": True}}, 4),
        ({"scheduler": {"max_inflight_steps": 1}}, 4),
        ({"model": {"dtype": "bfloat16"}}, 0),
        ({"model": {"quantization": "int8"}}, 0),
        ({"model": {"quantization": "int8", "dtype": "bfloat16"}}, 0),
    ],
    ids=str,
)
def test_who_is_given_drafts(directory: Path, sections: dict, expected: int) -> None:
    assert make_executor(directory, **sections).preferred_speculative_tokens() == expected


def recorded(backend: CountedBackend | None = None) -> tuple[ModelRunner, list[SchedulerOutput]]:
    """A runner that records its graphs, and steps for it: a prompt of each request, then decodes."""
    model = make_model(torch.device("cpu"), torch.float32, quantization="int8")
    runner = make_runner(model, NUM_REQS, torch.device("cpu"))
    runner.record_graphs(backend or CountedBackend(), most=NUM_REQS)
    return runner, steps_of(NUM_REQS, len(group_layers(model.kv_cache_specs(16, torch.float32), 1)))


def run_steps(runner: ModelRunner, steps: list) -> tuple[list[LaunchedStep], list[bool]]:
    """Each is launched before the result of the one before is asked for. And whether it was under way then."""
    launched: list[LaunchedStep] = []
    under_way = []
    for step in steps:
        launched.append(runner.launch(step))
        under_way.append(launched[-1].is_under_way)
        if len(launched) > 1:
            launched[-2].result()
    return launched, under_way


@pytest.mark.usefixtures("_threads")
def test_decodes_are_under_way_and_prompts_are_not() -> None:
    backend = CountedBackend()
    runner, steps = recorded(backend)
    for num_recorded in (0, 1):
        launched, under_way = run_steps(runner, steps)
        # A prompt, and the first decode, which is recorded while it is computed.
        assert under_way == [False, num_recorded > 0] + [True] * (len(steps) - 2)
        assert not launched[-1].is_known
        launched[-1].result()
    assert backend.num_replays > len(steps)


@pytest.mark.usefixtures("_threads")
def test_nothing_is_planned_beside_a_step_whose_masks_follow_from_it() -> None:
    """Else requests with a grammar would be in every second step only."""
    runner, steps = recorded()
    assert run_steps(runner, steps[:-1])[1][-1]
    masks = GrammarMasks(indices=np.array([1], np.int32), allowed=np.full((1, -(-VOCAB_SIZE // 32)), -1, np.int32))
    assert not runner.launch(msgspec.structs.replace(steps[-1], grammar=masks)).is_under_way


@pytest.mark.usefixtures("_threads")
def test_a_step_that_is_given_up_leaves_nothing_behind() -> None:
    runner, steps = recorded()
    expected = [each.result().sampled_token_ids for each in run_steps(runner, steps)[0]]
    for until in (1, 5, len(steps)):
        launched, _ = run_steps(runner, steps[:until])
        runner.drop()
        with pytest.raises(RuntimeError, match="given up"):
            launched[-1].result()
        found = [each.result().sampled_token_ids for each in run_steps(runner, steps)[0]]
        np.testing.assert_array_equal(found, expected)


def test_a_process_ends_quietly_with_a_step_under_way(directory: Path) -> None:
    """As one does that was interrupted amid its answers."""
    command = [sys.executable, "-c", _ENDS_AMID_A_STEP, str(directory), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.usefixtures("_threads")
def test_a_step_under_way_is_garbage() -> None:
    """And so are its threads, as others are asked since."""
    for num_threads in (2, 3, 2):
        torch.set_num_threads(num_threads)
        runner, steps = recorded()
        (*_, last), under_way = run_steps(runner, steps)
        assert under_way[-1]
        step = weakref.ref(last)
        team_of(num_threads + 1)
        del runner, last, _
        gc.collect()
        assert step() is None


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("num_threads", "num_drafts"), [(1, 0), (2, 0), (2, 3)])
def test_answers_are_the_same(directory: Path, depth: int, num_threads: int, num_drafts: int) -> None:
    """Of requests with everything that can be asked for, and of greedy ones alone, whose steps are planned ahead."""
    plain = [greedy(f"plain{i}", 1 + i) for i in range(5)]
    by_eager = make_executor(directory, model={"enforce_eager": True}, scheduler={"num_speculative_tokens": 0})
    limits = {"max_inflight_steps": depth, "num_speculative_tokens": num_drafts}
    executor = make_executor(directory, model={"num_threads": num_threads}, scheduler=limits)
    for requests in (all_kinds(), plain, all_kinds()):
        expected = Driver(by_eager, MAX_LEN).run(requests)
        compare(Driver(executor, MAX_LEN, scheduler=limits).run(requests), expected)


def test_an_embedding_takes_over_the_row_of_a_step_under_way(directory: Path) -> None:
    """What that step computes for a request that has ended is no part of the vector."""
    (vector,) = (request for request in all_kinds() if request.pooling is not None)
    executor = make_executor(directory, model={"dtype": "bfloat16"}, scheduler={"max_num_seqs": 1})
    (expected,) = Driver(executor, MAX_LEN).run([vector])
    for num_steps in range(3, 12):  # in one of them it leaves where the prompt ends that comes
        driver = Driver(executor, MAX_LEN, scheduler={"max_num_seqs": 1})
        driver.core.add_request(greedy("leaving", 1))
        for _ in range(num_steps):
            driver.core.step()
        assert len(driver.core._inflight) == 1
        driver.core.abort(["leaving"])
        (found,) = driver.run([vector])
        assert torch.equal(torch.as_tensor(found.embedding), torch.as_tensor(expected.embedding))


def test_who_comes_during_a_prompt_is_in_the_next_step(directory: Path) -> None:
    executor = make_executor(directory, model={"dtype": "bfloat16"})
    driver = Driver(executor, MAX_LEN)
    driver.core.add_request(greedy("first", 1))
    driver.core.step()
    assert not driver.core._inflight, "nothing was planned beside the prompt"
    assert driver.core.stats().num_running == 1
    driver.core.add_request(greedy("second", 5))
    driver.core.step()
    assert driver.core.stats().num_running == 2


@pytest.mark.parametrize("failing", [1, 15], ids=["when-asked-for", "when-the-next-is-launched"])
def test_requests_go_on_after_a_step_that_failed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The old cache is gone before there is a new one."""
    requests = [greedy(f"r{i}", 1 + i) for i in range(3)]
    executor = make_executor(directory, model={"dtype": "bfloat16"})
    expected = [answer.token_ids for answer in Driver(executor, MAX_LEN).run(requests)]
    finish, num_steps = ModelRunner._finish, 0

    def fails_once(self: ModelRunner, *arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == failing:
            raise RuntimeError("out of luck")
        return finish(self, *arguments)

    def allocate(*arguments: Any) -> list[LayerCache]:
        assert all(old() is None for old in memory)
        caches = allocate_kv_cache(*arguments)
        memory[:] = [weakref.ref(cache.key) for cache in caches]
        return caches

    memory: list[weakref.ref] = []
    monkeypatch.setattr("quire.workers.worker.allocate_kv_cache", allocate)
    # What a test is told of by the log has tracebacks, and those what failed.
    monkeypatch.setattr("quire.workers.local_executor.logger.error", lambda *_, **__: None)
    gc.collect()
    driver = Driver(executor, MAX_LEN)
    monkeypatch.setattr(ModelRunner, "_finish", fails_once)
    gc.disable()
    try:
        assert [answer.token_ids for answer in driver.run(requests)] == expected
    finally:
        gc.enable()
    assert num_steps > 40
    assert sum(driver.core.stats().num_recoveries.values()) == 1


def test_an_interrupt_is_raised_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the result later hears of a failure, from which the engine recovers."""
    executor = make_executor(directory, model={"dtype": "bfloat16"})
    driver = Driver(executor, MAX_LEN)
    expected = driver.run([greedy("alone", 1)])[0].token_ids
    driver.core.add_request(greedy("interrupted", 1))
    for _ in range(5):
        driver.core.step()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            driver.core.step()
    with pytest.raises(ExecutorError, match="KeyboardInterrupt"):
        driver.core._inflight[0][1].result()
    driver.core.abort(["interrupted"])
    assert driver.run([greedy("next", 1)])[0].token_ids == expected


def _interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt
