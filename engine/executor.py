"""What the engine asks of whatever runs the model. One rank in this process, several ranks, and a fake in tests."""

from __future__ import annotations

from typing import Protocol

from .kv_cache_spec import KVCacheConfig, KVCacheSpec
from .outputs import ModelRunnerOutput, SchedulerOutput


class PendingStep(Protocol):
    """A step under way. A `concurrent.futures.Future` is one."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. Raises `ExecutorError` where it cannot be executed."""
        ...


class Executor(Protocol):
    """Runs steps on a model that is already loaded when the executor exists.

    Steps are executed in the order in which they are given. A step that cannot be executed fails with
    `ExecutorError`; every later one fails as well until `restart()`.
    """

    def preferred_inflight_steps(self) -> int:
        """How many steps outstanding keep the ranks busy: 1 where nothing is computed while the engine plans, else 2,
        and as many as there are stages in a pipeline."""
        ...

    def preferred_speculative_tokens(self) -> int:
        """Drafts of a request in one step, where nobody says how many: 0 where what is computed beside a row changes
        its bits."""
        ...

    def takes_next_step(self) -> bool:
        """Whether it makes sense to give another step now: False while the last one is computed only when its result is
        asked for. Planned afterwards, the next one takes in who has come by then."""
        ...

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec per attention layer of the whole model, in layer order, for one rank of each stage."""
        ...

    def available_kv_cache_bytes(self) -> list[int]:
        """By pipeline stage, the bytes that one of its ranks can give to its KV cache (the smallest over them)."""
        ...

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache on every rank. Called once before the first step, and again after `restart()`."""
        ...

    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Start one step; do not wait for a device or another process."""
        ...

    def restart(self) -> None:
        """Build the ranks again after a failure: all rows and the cache are empty. Raises `ExecutorError`."""
        ...

    def shutdown(self) -> None:
        """Release everything. Harmless when called twice."""
        ...
