"""An engine core in a thread of its own, for callers that live in an event loop."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from .cache_history import KVEvent
from .core import EngineCore
from .errors import EngineEndedError, QuireError
from .outputs import EngineOutput, EngineRequest, SchedulerStats

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnOutputs = Callable[[list[EngineOutput]], None]
OnFailure = Callable[[BaseException], None]
OnKVEvents = Callable[[list[KVEvent]], None]


EXIT_S = 60.0  # how long the end of the process waits for the step under way


class _Job(NamedTuple):
    """Something to do between two steps; `future` belongs to whoever waits for it."""

    run: Callable[[], list[EngineOutput]]
    future: Future[Any] | None = None

    def refuse(self) -> None:
        """It will not be done: whoever waits for it, and has not given up, is told."""
        if self.future is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineEndedError("The engine has ended."))


class EngineLoop:
    """Steps a core whenever it has work. `add`, `abort` and `call` may be used from any thread.

    `on_outputs` is called from the loop's thread, once per step that produced something, with the outputs of all
    requests. A request that the core refuses ends with one output of finish reason "error", whose `error` says why, so
    every request that was added ends with exactly one finish reason. `on_failure` is called once if the core itself
    fails: the loop has ended then, and its requests are lost here. `on_kv_events` is called in the same way as
    `on_outputs`, with all that happened to cached blocks in a step, from the first one on. When both have returned, the
    core is stepped again.
    """

    def __init__(
        self,
        core: EngineCore,
        on_outputs: OnOutputs,
        on_failure: OnFailure,
        on_kv_events: OnKVEvents | None = None,
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._on_kv_events = on_kv_events
        if on_kv_events is not None:
            core.subscribe_kv_events()
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stats = core.stats()
        self._step_started: float | None = None
        self._ending = threading.Lock()
        self._has_ended = False
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self._end_with_process)

    def add(self, request: EngineRequest) -> None:
        self._put(_Job(lambda: self._add(request)))

    def abort(self, request_ids: list[str]) -> None:
        self._put(_Job(lambda: self._core.abort(request_ids)))

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run `function(core)` between two steps. The future raises what it raises, or that the loop has ended.

        Whoever cancels the future before its turn has come has asked for nothing; afterwards it cannot be cancelled.
        An error that is not a `QuireError` is also one of the core, and ends the loop.
        """
        future: Future[T] = Future()

        def run() -> list[EngineOutput]:
            if not future.set_running_or_notify_cancel():
                return []
            try:
                future.set_result(function(self._core))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, QuireError):
                    raise
            return []

        self._put(_Job(run, future))
        return future

    def stats(self) -> SchedulerStats:
        """As of the last step boundary."""
        return self._stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def seconds_in_step(self) -> float:
        """How long the current step has been under way; 0 when the loop waits for work."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the step under way and shut the core down. Unfinished requests get no more outputs.

        A step that takes longer than `timeout_s` loses what it computes with; that it fails then is told to nobody.
        """
        self._put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._is_given_up = True
        else:
            atexit.unregister(self._end_with_process)
        self._core.shutdown()

    def _end_with_process(self) -> None:
        """A thread that met the end of Python within compiled code would abort the process."""
        self._put(None)
        self._thread.join(EXIT_S)

    def _put(self, job: _Job | None) -> None:
        with self._ending:
            if not self._has_ended:
                self._inbox.put(job)
            elif job is not None:
                job.refuse()
        self._core.wake()  # it may be waiting for a gate

    def _end(self) -> None:
        """Nothing is taken in any more; whoever waits for something that will not be done is told."""
        with self._ending:
            self._has_ended = True
            while not self._inbox.empty():
                job = self._inbox.get()
                if job is not None:
                    job.refuse()

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step_started = time.monotonic()
                self._publish(self._core.step())
                self._step_started = None
        except BaseException as error:
            if self._is_given_up:
                logger.info("The step under way was given up (%r)", error)
            else:
                logger.exception("The engine core failed")
                self._on_failure(error)
        finally:
            self._end()

    def _take_in(self) -> bool:
        """Handle what has arrived; wait for it when there is nothing else to do. False when the loop should end."""
        while not (self._core.has_work and self._inbox.empty()):
            message = self._inbox.get()
            if message is None:
                return False
            self._publish(message.run())
        return True

    def _publish(self, outputs: list[EngineOutput]) -> None:
        self._stats = self._core.stats()
        if outputs:
            self._on_outputs(outputs)
        if self._on_kv_events is not None and (events := self._core.take_kv_events()):
            self._on_kv_events(events)

    def _add(self, request: EngineRequest) -> list[EngineOutput]:
        try:
            self._core.add_request(request)
        except QuireError as error:
            first_index = len(request.resume_token_ids)
            return [EngineOutput(request.request_id, first_index, [], "error", error=error.message)]
        return []
