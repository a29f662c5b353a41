"""One rank in the engine's own process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ExecutorError
from quire.engine.executor import PendingStep
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput

from .launched_step import LaunchedStep
from .parallel import ParallelContext
from .worker import Worker

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class LocalExecutor:
    """Implements `quire.engine.executor.Executor` for one rank.

    The constructor loads the model and raises `ConfigError` when that cannot work. On CPU a thread computes steps one
    after the other, so that the engine's thread can plan the next one meanwhile. On a GPU the engine's thread launches
    them itself: that takes less time than two threads lose by taking turns.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        size = config.parallel.world_size
        if size != 1:
            raise ConfigError(f"parallel: one process holds one rank, {size} need a Ray cluster.")
        self._worker = Worker(config, info, ParallelContext())
        is_cpu = self._worker.device.type == "cpu"
        self._thread: Pool = ThreadPoolExecutor(1, thread_name_prefix="quire-rank") if is_cpu else _CallersThread()
        self._failed: ExecutorError | None = None
        try:
            self._call(self._worker.load_model)
        except BaseException:
            self.shutdown()
            raise

    def preferred_inflight_steps(self) -> int:
        return self._worker.preferred_inflight_steps

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._call(self._worker.kv_cache_specs)

    def available_kv_cache_bytes(self) -> list[int]:
        return [self._call(self._worker.available_kv_cache_bytes)]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._call(lambda: self._worker.initialize_kv_cache(config))

    def execute(self, step: SchedulerOutput) -> PendingStep:
        return _Pending(self, step, self._thread.submit(self._launch, step))

    def restart(self) -> None:
        """The weights are intact: `initialize_kv_cache`, which follows, empties the rest."""
        self._call(self._forget_failure)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def _launch(self, step: SchedulerOutput) -> LaunchedStep:
        if self._failed is not None:
            raise self._failed
        try:
            return self._worker.launch(step)
        except Exception as error:
            raise self.fail(step, error) from error

    def fail(self, step: SchedulerOutput, error: Exception) -> ExecutorError:
        """A step has failed: no later one is begun until `restart`."""
        logger.error("step %d failed", step.step_id, exc_info=error)
        self._failed = ExecutorError(f"step {step.step_id} failed: {type(error).__name__}: {error}")
        return self._failed

    def _forget_failure(self) -> None:
        self._failed = None


class _Pending:
    """A step that was given to the rank: whoever wants its result waits for it himself."""

    def __init__(self, executor: LocalExecutor, step: SchedulerOutput, launch: Future[LaunchedStep]) -> None:
        self._executor = executor
        self._step = step
        self._launch = launch

    def result(self) -> ModelRunnerOutput:
        launched = self._launch.result()
        try:
            return launched.result()
        except Exception as error:
            raise self._executor.fail(self._step, error) from error


class _CallersThread(Pool):
    """Does at once what it is given, in the thread that gives it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
