"""The rank's side of its engine, on a socket and without Ray: when steps are launched, and when they are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from quire.cluster.messages import RankAnswer, encoder, rank_answer_decoder
from quire.cluster.rank_links import RankLink, RankServer
from quire.cluster.transport import TransportError, new_secret
from quire.cluster.worker_actor import WorkerActor
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput
from quire.workers.launched_step import HostCopies, LaunchedStep, Read, StepWork

WAIT_S = 10


class Device:
    """Stands for a worker whose device is done with a step when the test says so."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)
        self.launched: SimpleQueue[int] = SimpleQueue()
        self.done = [threading.Event() for _ in range(3)]
        self.fail_to_launch: list[int] = []
        self.fail_later: list[int] = []
        self.threads: list[int] = []  # that have launched or read

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        self.launched.put(step.step_id)
        self.threads.append(threading.get_ident())
        if step.step_id in self.fail_to_launch:
            raise RuntimeError("no memory")

        def read() -> ModelRunnerOutput:
            self.threads.append(threading.get_ident())
            assert self.done[step.step_id].wait(WAIT_S)
            if step.step_id in self.fail_later:
                raise RuntimeError("an illegal address")
            return ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=np.array([[7]], np.int32))

        def work() -> Generator[bool, None, Read]:
            yield True
            return read

        return LaunchedStep(HostCopies(torch.device("cpu")), StepWork(work()), nullcontext())


class Rank:
    """A rank that runs on a thread, and the engine's end of its link."""

    def __init__(self, kind: str, threads: ThreadPoolExecutor) -> None:
        self.device = Device(kind)
        actor = WorkerActor.__new__(WorkerActor)  # Ray would make it in a process of its own
        actor._rank, actor._answers = 0, True
        actor._worker = self.device  # type: ignore[assignment]
        secret = new_secret()
        server = RankServer("127.0.0.1", secret)
        self.run: Future[None] = threads.submit(actor.run, "127.0.0.1", server.port, secret)
        (self.link,) = server.accept(1, WAIT_S)
        server.close()

    def send(self, number: int) -> None:
        row = np.array([number], np.int32)
        ones = np.ones(1, np.int32)
        step = SchedulerOutput(step_id=number, rows=row, num_scheduled_tokens=ones, num_computed_tokens=row)
        self.link.send(encoder.encode(step))

    def answer(self) -> RankAnswer:
        return rank_answer_decoder.decode(self.link.recv())


@pytest.fixture
def start() -> Iterator[Callable[[str], Rank]]:
    ranks: list[Rank] = []
    with ThreadPoolExecutor() as threads:

        def start(kind: str) -> Rank:
            ranks.append(Rank(kind, threads))
            return ranks[-1]

        yield start
        for rank in ranks:
            for done in rank.device.done:
                done.set()
            rank.link.close()


def _left(link: RankLink) -> Any:
    link.close()
    return pytest.raises(TransportError)


def test_a_gpu_gets_the_next_step_while_it_is_at_work(start: Callable[[str], Rank]) -> None:
    rank = start("cuda")
    rank.send(0)
    rank.send(1)
    assert [rank.device.launched.get(timeout=WAIT_S) for _ in range(2)] == [0, 1]  # and nothing is done
    rank.device.done[1].set()
    rank.device.done[0].set()
    assert [rank.answer().step_id for _ in range(2)] == [0, 1]
    with _left(rank.link):
        rank.run.result(WAIT_S)


def test_a_cpu_is_done_when_it_has_launched(start: Callable[[str], Rank]) -> None:
    """One thread does it all: to hand a result to another takes longer than to read it."""
    rank = start("cpu")
    for number in (0, 1):
        rank.device.done[number].set()
        rank.send(number)
    assert [rank.answer().step_id for _ in range(2)] == [0, 1]
    assert len(rank.device.threads) == 4
    assert len(set(rank.device.threads)) == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_that_cannot_be_launched_is_told_after_those_before_it(start: Callable[[str], Rank], kind: str) -> None:
    rank = start(kind)
    rank.device.fail_to_launch = [1]
    rank.device.done[0].set()
    for number in (0, 1, 2):
        rank.send(number)
    first, second = rank.answer(), rank.answer()
    assert first.step_id == 0
    assert first.output is not None
    assert second == RankAnswer(1, error="rank 0: RuntimeError: no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        rank.run.result(WAIT_S)
    assert [rank.device.launched.get_nowait() for _ in range(2)] == [0, 1]
    assert rank.device.launched.empty()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_that_fails_on_the_device_is_told(start: Callable[[str], Rank], kind: str) -> None:
    rank = start(kind)
    rank.device.fail_later = [0]
    rank.device.done[0].set()
    rank.send(0)
    assert rank.answer() == RankAnswer(0, error="rank 0: RuntimeError: an illegal address")
    with _left(rank.link) if kind == "cuda" else pytest.raises(RuntimeError, match="an illegal address"):
        rank.run.result(WAIT_S)
