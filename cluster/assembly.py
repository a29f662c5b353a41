"""From a configuration to an engine core: the executor that the number of ranks calls for, and a core on it."""

from __future__ import annotations

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import Executor
from quire.engine.model_source import ModelInfo, check_ranks


def start_core(config: EngineConfig, info: ModelInfo) -> EngineCore:
    """The core of one engine on its executor, ready for its first step. Raises `QuireError`, leaving nothing behind."""
    executor = start_executor(config, info)
    try:
        return EngineCore(config, executor, info.max_model_len)
    except BaseException:
        executor.shutdown()
        raise


def start_executor(config: EngineConfig, info: ModelInfo) -> Executor:
    """One rank runs in this process, several are actors. The imports bring torch, or Ray."""
    check_ranks(config, info)
    if config.parallel.tensor_parallel_size == 1:
        from quire.workers.local_executor import LocalExecutor

        return LocalExecutor(config, info)
    from .ray_executor import RayExecutor

    return RayExecutor(config, info)
