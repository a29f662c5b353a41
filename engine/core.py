"""The step loop: plan a step, hand it to the executor, take in the result of the oldest one.

Up to `max_inflight_steps` steps are outstanding, so that planning hides behind computing. Depth 1 is the synchronous
engine; there is no other code path for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from .cache_history import KVEvent
from .config import EngineConfig
from .draft_gain import DraftGain, EveryDraft
from .errors import ConfigError, EngineError, ExecutorError
from .executor import Executor, PendingStep
from .gates import Gate
from .kv_cache_manager import KVCacheManager
from .kv_cache_spec import KVCacheConfig, KVCacheSpec, block_bytes, group_layers
from .outputs import EngineOutput, EngineRequest, RequestReport, SchedulerStats
from .scheduler import Scheduler
from .speculation import Speculation, num_speculative_tokens
from .step_plan import ScheduledStep
from .step_share import PipelineShare

logger = logging.getLogger(__name__)

MAX_IDLE_S = 0.05  # how late a deadline may be noticed, or a new request, while all others stand aside for a gate


class EngineCore:
    """Scheduler, KV cache and executor of one engine. Not thread-safe: one thread calls it.

    `config` is resolved against the model (`resolve`). `max_model_len` is what the engine really serves: less than
    the model's own limit where the cache cannot hold that much and the user did not insist. `gates` are asked in their
    order; a gate that changes its mind calls `wake`. `clock` is any steady clock, in seconds. Raises `ConfigError`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        max_model_len: int,
        gates: tuple[Gate, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._gates = gates
        self._clock = clock
        self._woken = threading.Event()
        self._num_recoveries: Counter[str] = Counter()  # by cause
        self._recovery_s = 0.0
        self.is_recovering = False  # the ranks are being rebuilt; read from any thread
        self._kv_cache_config = plan_kv_cache(config, executor.kv_cache_specs(), executor.available_kv_cache_bytes())
        kv_cache = KVCacheManager(
            self._kv_cache_config, config.scheduler.max_num_seqs, config.cache.enable_prefix_caching
        )
        self.max_model_len = fit_model_len(config, kv_cache, max_model_len)
        self._max_inflight_steps = config.scheduler.max_inflight_steps or executor.preferred_inflight_steps()
        share = PipelineShare(self._max_inflight_steps) if config.parallel.pipeline_parallel_size > 1 else None
        num_drafts = num_speculative_tokens(config, executor.preferred_speculative_tokens())
        # Who asks for drafts gets them; nobody else does where they do not pay.
        policy = DraftGain() if num_drafts and config.scheduler.num_speculative_tokens is None else EveryDraft()
        speculation = Speculation(num_drafts, policy)
        self.scheduler = Scheduler(config.scheduler, kv_cache, self.max_model_len, gates, share, speculation)
        self._inflight: deque[tuple[ScheduledStep, PendingStep]] = deque()
        executor.initialize_kv_cache(self._kv_cache_config)
        logger.info(
            "KV cache: %d blocks of %d tokens in %d group(s); context up to %d tokens",
            kv_cache.pool.num_usable,
            kv_cache.block_size,
            len(self._kv_cache_config.groups),
            self.max_model_len,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidRequestError` or `OverloadedError`; then nothing is queued."""
        self.scheduler.add(request, self._clock())

    def abort(self, request_ids: list[str]) -> list[EngineOutput]:
        """End requests in any state and free what they hold. Unknown ids (already finished) are no error."""
        now = self._clock()
        outputs = (self.scheduler.abort(request_id, now) for request_id in request_ids)
        return [output for output in outputs if output is not None]

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._inflight)

    def step(self) -> list[EngineOutput]:
        """Advance by one step: keep the executor busy, then wait for the oldest step in flight.

        Returns the new tokens of that step, in batch order. After an executor failure the ranks are rebuilt and every
        running request starts again from its known tokens, so a failure costs time and no token. Raises
        `ExecutorError` if the ranks cannot be rebuilt.
        """
        if self._woken.is_set():
            self._woken.clear()
        while not self._inflight or self._takes_next_step():
            step = self.scheduler.schedule(self._clock())
            if step is None:
                break
            self._inflight.append((step, self._executor.execute(step.output)))
        outputs = self.scheduler.take_ended()
        if not self._inflight:
            if not outputs:
                self._wait()
            return outputs
        step, pending = self._inflight.popleft()
        try:
            result = pending.result()
        except ExecutorError as error:
            logger.warning("A step failed; its requests start again: %s", error.message)
            return outputs + self._recover(step, error)
        return outputs + self.scheduler.update(step, result, self._clock())

    def _takes_next_step(self) -> bool:
        """Whether to plan a step while others are in flight."""
        return (
            len(self._inflight) < self._max_inflight_steps
            and self._executor.takes_next_step()
            and not self.scheduler.awaits(self._inflight[-1][0])
        )

    def wake(self) -> None:
        """A gate may let in what it refused. From any thread."""
        self._woken.set()

    def explain(self, request_id: str) -> RequestReport | None:
        """How an unfinished request spent its time so far; None if it is not here."""
        return self.scheduler.explain(request_id, self._clock())

    def subscribe_kv_events(self) -> None:
        """Keep what happens to cached blocks from now on for `take_kv_events`."""
        self.scheduler.kv_cache.history.subscribe()

    def take_kv_events(self) -> list[KVEvent]:
        """What happened to cached blocks since the last call, in order."""
        return self.scheduler.kv_cache.history.take_events()

    def reset_prefix_cache(self) -> None:
        self.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        if not self._num_recoveries:
            return stats
        return msgspec.structs.replace(stats, num_recoveries=dict(self._num_recoveries), recovery_s=self._recovery_s)

    def shutdown(self) -> None:
        for gate in self._gates:
            gate.close()
        self._executor.shutdown()

    def _wait(self) -> None:
        """Nothing can be computed. That is right only if every request stands aside for a gate: wait for one."""
        scheduler = self.scheduler
        if len(scheduler.requests) > scheduler.waiting.num_aside:
            raise EngineError(f"nothing can be scheduled although requests are ready: {scheduler.stats()}")
        if scheduler.requests:
            self._woken.wait(MAX_IDLE_S)

    def _recover(self, failed: ScheduledStep, error: ExecutorError) -> list[EngineOutput]:
        """Rebuild the ranks and rewind. Returns the ends of requests that are given up."""
        self._inflight.clear()  # these failed only because the ranks were gone
        started = self._clock()
        outputs = self.scheduler.rewind(failed, error.message, started)
        self.is_recovering = True
        self._executor.restart()
        self._executor.initialize_kv_cache(self._kv_cache_config)
        self.is_recovering = False
        self._num_recoveries[error.cause] += 1
        self._recovery_s += self._clock() - started
        return outputs


def plan_kv_cache(config: EngineConfig, specs: list[KVCacheSpec], available_bytes: list[int]) -> KVCacheConfig:
    """How many blocks there are, and which layers share a table. One block is one block of *every* layer of a group.

    All groups draw from one pool, so a block must be large enough for the largest group. The stages of a pipeline,
    whose `available_bytes` these are, have the same tables: the stage that can hold the fewest blocks decides.
    """
    num_stages = len(available_bytes)
    bytes_per_block = [block_bytes(specs, num_stages, stage) for stage in range(num_stages)]
    held = [available // needed for available, needed in zip(available_bytes, bytes_per_block, strict=True)]
    num_blocks = config.cache.num_kv_blocks or min(held)
    if num_blocks < 2:
        tightest = held.index(min(held))
        raise ConfigError(
            f"cache: {available_bytes[tightest]:,} bytes of KV cache hold {num_blocks} blocks; at least 2 blocks of "
            f"{bytes_per_block[tightest]:,} bytes are needed. Raise cache.memory_bytes or lower cache.block_size."
        )
    return KVCacheConfig(num_blocks, config.cache.block_size, group_layers(specs, num_stages))


def fit_model_len(config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int) -> int:
    """The longest request that the cache can hold alone, at most `max_model_len`.

    Raises `ConfigError` if the user asked for more than that.
    """
    chunk = config.scheduler.max_num_batched_tokens
    usable = kv_cache.pool.num_usable
    if kv_cache.max_blocks(max_model_len, chunk) <= usable:
        return max_model_len
    fits, too_long = 0, max_model_len
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if kv_cache.max_blocks(middle, chunk) <= usable:
            fits = middle
        else:
            too_long = middle
    if config.model.max_model_len is not None or fits < 2:
        need = kv_cache.max_blocks(max_model_len, chunk) + 1
        raise ConfigError(
            f"model.max_model_len: {max_model_len} tokens need {need} KV blocks, but there are {usable + 1}, which "
            f"hold {fits} tokens. Set model.max_model_len to at most {fits}, or raise cache.num_kv_blocks or "
            "cache.memory_bytes."
        )
    logger.warning("The KV cache holds %d tokens: max_model_len is lowered to that from %d", fits, max_model_len)
    return fits
