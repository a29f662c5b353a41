"""One rank in the engine's own process."""

from __future__ import annotations

import logging

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


class LocalExecutor:
    """Implements `quire.engine.executor.Executor` for one rank.

    The constructor loads the model and raises `ConfigError` when that cannot work. The engine's thread launches the
    steps itself. On a GPU that is what is left to do for the host; on CPU it begins a step, and takes part in it when
    it has nothing else to do.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        size = config.parallel.world_size
        if size != 1:
            raise ConfigError(f"parallel: one process holds one rank, {size} need a Ray cluster.")
        self._worker = Worker(config, info, ParallelContext())
        self._worker.load_model()
        self._failed: ExecutorError | None = None
        self._last: LaunchedStep | None = None

    def preferred_inflight_steps(self) -> int:
        return self._worker.preferred_inflight_steps

    def preferred_speculative_tokens(self) -> int:
        return self._worker.preferred_speculative_tokens

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._worker.kv_cache_specs()

    def available_kv_cache_bytes(self) -> list[int]:
        return [self._worker.available_kv_cache_bytes()]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._worker.initialize_kv_cache(config)

    def takes_next_step(self) -> bool:
        return self._last is None or self._last.is_under_way or self._last.is_known

    def execute(self, step: SchedulerOutput) -> PendingStep:
        if self._failed is not None:
            return _Failed(self._failed)
        try:
            self._last = self._worker.launch(step)
            return _Pending(self, step, self._last)
        except Exception as error:
            return _Failed(self.fail(step, error))
        except BaseException:  # an interrupt: what the engine has planned is not in the cache
            self._failed = ExecutorError(f"step {step.step_id} was interrupted")
            raise

    def restart(self) -> None:
        """The weights are intact: `initialize_kv_cache`, which follows, empties the rest."""
        self._failed = self._last = None

    def shutdown(self) -> None:
        """Free the model and the cache, whoever still holds this."""
        self._worker.close()

    def fail(self, step: SchedulerOutput, error: Exception) -> ExecutorError:
        """A step has failed: no later one is begun until `restart`."""
        logger.error("step %d failed", step.step_id, exc_info=error)
        self._failed = ExecutorError(f"step {step.step_id} failed: {type(error).__name__}: {error}")
        return self._failed


class _Pending:
    """A step that was launched: whoever wants its result waits for the device."""

    def __init__(self, executor: LocalExecutor, step: SchedulerOutput, launched: LaunchedStep) -> None:
        self._executor = executor
        self._step = step
        self._launched = launched

    def result(self) -> ModelRunnerOutput:
        try:
            return self._launched.result()
        except Exception as error:
            failed = self._executor.fail(self._step, error)
        raise failed  # without a cause, whose traceback would keep the cache while the next one is allocated


class _Failed:
    """A step that could not be launched."""

    def __init__(self, error: ExecutorError) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        raise self._error
