"""One rank in the engine's own process, in a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ExecutorError
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput

from .parallel import ParallelContext
from .worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LocalExecutor:
    """Implements `quire.engine.executor.Executor` for one rank.

    The constructor loads the model and raises `ConfigError` when that cannot work. The thread runs steps one after the
    other, so that the engine's thread can plan the next one meanwhile.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        size = config.parallel.world_size
        if size != 1:
            raise ConfigError(f"parallel: one process holds one rank, {size} need a Ray cluster.")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-rank")
        self._worker = Worker(config, info, ParallelContext())
        self._failed: ExecutorError | None = None
        try:
            self._call(self._worker.load_model)
        except BaseException:
            self.shutdown()
            raise

    def preferred_inflight_steps(self) -> int:
        return 2 if self._worker.device.type == "cuda" else 1

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._call(self._worker.kv_cache_specs)

    def available_kv_cache_bytes(self) -> list[int]:
        return [self._call(self._worker.available_kv_cache_bytes)]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._call(lambda: self._worker.initialize_kv_cache(config))

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self._step, step)

    def restart(self) -> None:
        """The weights are intact: `initialize_kv_cache`, which follows, empties the rest."""
        self._call(self._forget_failure)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def _step(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._failed is not None:
            raise self._failed
        try:
            return self._worker.execute_model(step)
        except Exception as error:
            logger.exception("step %d failed", step.step_id)
            self._failed = ExecutorError(f"step {step.step_id} failed: {type(error).__name__}: {error}")
            raise self._failed from error

    def _forget_failure(self) -> None:
        self._failed = None
