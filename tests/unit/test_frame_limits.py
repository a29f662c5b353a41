"""What is larger than a frame: it is cut, or it is an error that says so; it is never only left out."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from quire.cluster import transport
from quire.cluster.messages import StepOutputs, engine_message_decoder
from quire.cluster.output_frames import pack_outputs
from quire.cluster.ray_executor import Gang
from quire.engine.errors import ExecutorError
from quire.engine.outputs import EngineOutput, SchedulerOutput


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)


def test_outputs_are_cut_between_requests_and_the_one_that_fits_nowhere_is_an_error() -> None:
    sizes = [300, 10, 400, 5000, 900, 1, 1, 350]
    outputs = [EngineOutput(f"r{i}", i, [1] * size) for i, size in enumerate(sizes)]
    payloads, too_large = pack_outputs(outputs)
    assert too_large == ["r3"]
    assert max(map(len, payloads)) <= 1000
    received = []
    for payload in payloads:
        message = engine_message_decoder.decode(payload)
        assert isinstance(message, StepOutputs)
        received += message.outputs
    assert received[:3] + received[4:] == outputs[:3] + outputs[4:]
    failed = received[3]
    assert (failed.request_id, failed.first_index, failed.finish_reason) == ("r3", 3, "error")
    assert "more than the 1000 that can be sent" in (failed.error or "")


def test_what_fits_is_one_payload() -> None:
    payloads, too_large = pack_outputs([EngineOutput(f"r{i}", 0, [i]) for i in range(20)])
    assert (len(payloads), too_large) == (1, [])


def test_a_step_that_no_frame_holds_fails_at_once() -> None:
    """And the steps before it with it: all ranks or none."""

    class Unlinked(Gang):
        def __init__(self) -> None:
            self._lock, self._failed = threading.Lock(), threading.Event()
            self._pending, self._wake = deque(), SimpleQueue()
            self._links, self._error, self._dropped_rank = [], None, None

    gang: Any = Unlinked()
    futures = [gang.execute(step(number, num_reqs)) for number, num_reqs in enumerate([2, 500, 2])]
    for future in futures:
        with pytest.raises(ExecutorError, match="bytes cannot be sent to ranks: the limit is 1000"):
            future.result(timeout=0)


def step(step_id: int, num_reqs: int) -> SchedulerOutput:
    ones = np.ones(num_reqs, np.int32)
    return SchedulerOutput(step_id=step_id, rows=ones, num_scheduled_tokens=ones, num_computed_tokens=ones)
