"""From a configuration to an engine core: the executor that the number of ranks calls for, and a core on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import Executor
from quire.engine.gates import Gate
from quire.engine.grammar.gate import GrammarGate
from quire.engine.model_source import ModelInfo
from quire.engine.tokenizer import load_tokenizer
from quire.workers.models.sizes import check_ranks


def start_core(config: EngineConfig, info: ModelInfo) -> EngineCore:
    """The core of one engine on its executor, ready for its first step. Raises `QuireError`, leaving nothing behind."""
    executor = start_executor(config, info)
    try:
        core: EngineCore = EngineCore(
            config, executor, info.max_model_len, (grammar_gate(config, info, lambda: core.wake()),)
        )
        return core
    except BaseException:
        executor.shutdown()
        raise


def grammar_gate(config: EngineConfig, info: ModelInfo, wake: Callable[[], None]) -> Gate:
    """Compiles grammars for a model. The first of them brings llguidance and the tokenizer."""

    @cache
    def compiler() -> Any:
        from quire.engine.grammar.compiler import LlguidanceCompiler

        return LlguidanceCompiler(lambda: load_tokenizer(info), info.vocab_size, info.eos_token_ids, config.grammar)

    return GrammarGate(lambda spec: compiler().compile(spec), wake)


def start_executor(config: EngineConfig, info: ModelInfo) -> Executor:
    """One rank runs in this process, several are actors. The imports bring torch, or Ray.

    Raises `ConfigError` before any rank is started when the ranks cannot share the model.
    """
    check_ranks(config, info)
    if config.parallel.world_size == 1:
        from quire.workers.local_executor import LocalExecutor

        return LocalExecutor(config, info)
    from .ray_executor import RayExecutor

    return RayExecutor(config, info)
