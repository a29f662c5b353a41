"""The engine's side of its ranks, on sockets and without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.cluster.messages import RankAnswer, encoder, step_decoder
from quire.cluster.rank_links import RankServer, connect_rank
from quire.cluster.ray_executor import Gang
from quire.cluster.transport import TransportError, new_secret
from quire.engine.config import EngineConfig
from quire.engine.errors import ExecutorError
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput


class LocalGang(Gang):
    """Its ranks are threads that answer every step with its number."""

    def __init__(self) -> None:
        config = EngineConfig.model_validate({"parallel": {"tensor_parallel_size": 2, "step_timeout_s": 3.0}})
        super().__init__(config, None, None, 5.0)  # type: ignore[arg-type]
        secret = new_secret()
        server = RankServer("127.0.0.1", secret)
        for rank in (0, 1):
            threading.Thread(target=_answer_steps, args=(server.port, secret, rank), daemon=True).start()
        self._links = server.accept(2, 5)
        server.close()
        threading.Thread(target=self._gather_answers, daemon=True).start()

    def _start_actors(self, *_: object) -> list[Any]:
        return []

    def _load(self) -> list[Any]:
        return []

    def _cause_of_death(self) -> str:
        return ""


def _answer_steps(port: int, secret: bytes, rank: int) -> None:
    link = connect_rank("127.0.0.1", port, secret, rank)
    try:
        while True:
            step = step_decoder.decode(link.recv())
            sampled = np.array([[100 + step.step_id]], np.int32)
            output = ModelRunnerOutput(step_id=step.step_id, sampled_token_ids=sampled) if rank == 1 else None
            link.send(encoder.encode(RankAnswer(step.step_id, output)))
    except TransportError:
        return


@pytest.fixture
def gang() -> Iterator[LocalGang]:
    made = LocalGang()
    yield made
    made._fail(ExecutorError("The test is over."))
    made._wake.put(False)


def step(number: int) -> SchedulerOutput:
    row = np.array([number], np.int32)
    return SchedulerOutput(step_id=number, rows=row, num_scheduled_tokens=np.ones(1, np.int32), num_computed_tokens=row)


def test_answers_are_those_of_their_steps(gang: LocalGang) -> None:
    first, second = gang.execute(step(0)), gang.execute(step(1))
    assert first.result(10).sampled_token_ids.tolist() == [[100]]
    assert second.result(10).sampled_token_ids.tolist() == [[101]]


def test_the_answer_to_another_step_is_not_taken(gang: LocalGang) -> None:
    """Two steps in flight, and a rank never gets the first: what it says is about the second."""
    gang.drop_step(1)
    first, second = gang.execute(step(0)), gang.execute(step(1))
    for future in (first, second):
        with pytest.raises(ExecutorError, match="answered step 1 instead of step 0") as failed:
            future.result(10)
        assert failed.value.cause == "hung"
