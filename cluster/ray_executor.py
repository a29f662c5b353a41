"""Several ranks as Ray actors in one placement group, driven over sockets. Implements `engine.executor.Executor`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from quire.engine.config import EngineConfig
from quire.engine.errors import ExecutorError, QuireError
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput

from . import placement, transport
from .messages import RankAnswer, encoder
from .rank_links import RankLink, RankServer, broadcast, gather
from .rank_logs import last_words
from .ray_local import LocalRay
from .step_deadline import StepDeadline
from .transport import TransportError, new_secret
from .worker_actor import RankFacts, WorkerActor, start_worker

logger = logging.getLogger(__name__)

CAUSE_OF_DEATH_S = 1.0  # how long Ray may take to say why a rank died, once its socket has told that it did


class RayExecutor:
    """The ranks of one engine. The model is loaded when this returns; raises `QuireError` when it cannot be.

    Where this process is not connected to a Ray cluster (offline use), a private one is started on this machine and
    ended by `shutdown()`.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self._info = info
        self._local_ray = None if ray.is_initialized() else LocalRay.start()
        self._config = _with_device(config)
        self.world_size = config.parallel.world_size
        self._group: PlacementGroup | None = None
        self._gang: Gang | None = None
        try:
            parallel = self._config.parallel
            deadline = time.monotonic() + parallel.startup_timeout_s
            on_gpu = self._config.model.device == "cuda"
            plan = placement.plan_ranks(parallel, on_gpu=on_gpu)
            can_grow = self._local_ray is None
            self._group = placement.reserve(plan, parallel.startup_timeout_s, can_grow=can_grow)
            self._gang = Gang(self._config, info, self._group, deadline - time.monotonic())
        except BaseException:
            self.shutdown()
            raise

    def preferred_inflight_steps(self) -> int:
        return self._ranks.facts[0].preferred_inflight_steps

    def preferred_speculative_tokens(self) -> int:
        return self._ranks.facts[0].preferred_speculative_tokens

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._ranks.facts[0].kv_cache_specs

    def available_kv_cache_bytes(self) -> list[int]:
        by_rank = [facts.available_kv_cache_bytes for facts in self._ranks.facts]
        per_stage = self._config.parallel.tensor_parallel_size
        return [min(by_rank[first : first + per_stage]) for first in range(0, len(by_rank), per_stage)]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._ranks.initialize_kv_cache(config)

    def takes_next_step(self) -> bool:
        return True

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self._ranks.execute(step)

    def restart(self) -> None:
        """End what is left of the ranks and start all of them again, in the same placement group."""
        assert self._group is not None
        started = time.monotonic()
        self._ranks.stop("it is restarted")
        self._gang = Gang(self._config, self._info, self._group, self._config.parallel.startup_timeout_s)
        logger.info("The ranks were rebuilt in %.1f s.", time.monotonic() - started)

    def signal_rank(self, rank: int, number: int) -> None:
        """Faults on purpose (`chaos.py`): send a signal to a rank's process, wherever it runs."""
        facts = self._ranks.facts[rank]
        if facts.node_id == ray.get_runtime_context().get_node_id():
            os.kill(facts.pid, number)
            return
        on_its_node = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
        send: Any = ray.remote(os.kill)
        ray.get(send.options(num_cpus=0, scheduling_strategy=on_its_node).remote(facts.pid, number))

    def drop_step(self, rank: int) -> None:
        """Faults on purpose: the next step does not reach this rank."""
        self._ranks.drop_step(rank)

    def shutdown(self) -> None:
        if self._gang is not None:
            self._gang.stop("the engine shuts down")
            self._gang = None
        if self._group is not None:
            placement.release(self._group)
            self._group = None
        if self._local_ray is not None:
            self._local_ray.stop()
            self._local_ray = None

    @property
    def _ranks(self) -> Gang:
        if self._gang is None:
            raise ExecutorError("The executor has been shut down.")
        return self._gang


def _with_device(config: EngineConfig) -> EngineConfig:
    """`device: auto` settled for all ranks alike."""
    if config.model.device != "auto":
        return config
    device = placement.auto_device(config.parallel.world_size)
    return config.model_copy(update={"model": config.model.model_copy(update={"device": device})})


class _SentStep(NamedTuple):
    future: Future[ModelRunnerOutput]
    step_id: int
    num_tokens: int


class Gang:
    """One generation of ranks: alive together, and given up together when one of them fails.

    Steps are sent by the caller's thread, in order; a thread of the gang gathers the answers. `error` is set once, with
    the first reason; from then on every step fails with it.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, group: PlacementGroup, timeout_s: float) -> None:
        self._world_size = config.parallel.world_size
        self._step_timeout_s = config.parallel.step_timeout_s
        self._deadline = StepDeadline(self._step_timeout_s)
        self._dropped_rank: int | None = None
        self._startup_timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: deque[_SentStep] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # one True per step, False to end
        self._links: list[RankLink] = []
        self._runs: list[ray.ObjectRef[Any]] = []
        self._error: ExecutorError | None = None
        self._failed = threading.Event()
        self._actors = self._start_actors(config, info, group)
        try:
            self.facts = self._load()
        except BaseException as error:
            self.stop(str(error))
            raise

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache on every rank, then connect the ranks: steps can follow."""
        self._wait([actor.initialize_kv_cache.remote(config) for actor in self._actors], "allocate its KV cache")
        secret, host = new_secret(), placement.node_address()
        server = RankServer(host, secret)
        try:
            self._runs = [actor.run.remote(host, server.port, secret) for actor in self._actors]
            self._links = server.accept(self._world_size, self._startup_timeout_s)
            for link in self._links:
                link.limit_sends(self._step_timeout_s)
        except TransportError as error:
            raise ExecutorError(f"{error.message} {self._cause_of_death()}") from error
        finally:
            server.close()
        threading.Thread(target=self._gather_answers, name="rank-answers", daemon=True).start()
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Send a step to all ranks, encoded once.

        A rank that hangs does not read either. So the deadline runs before the step is sent, in the gathering thread,
        and that thread can give the ranks up while this one still waits for room in a socket.
        """
        future: Future[ModelRunnerOutput] = Future()
        payload = encoder.encode(step)
        if len(payload) > transport.MAX_FRAME_BYTES:
            limit = transport.MAX_FRAME_BYTES
            self._fail(ExecutorError(f"A step of {len(payload)} bytes cannot be sent to ranks: the limit is {limit}."))
        with self._lock:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._pending.append(_SentStep(future, step.step_id, step.total_num_scheduled_tokens))
        self._wake.put(True)
        dropped, self._dropped_rank = self._dropped_rank, None
        # A broken link is met by the gathering thread as well, which says why it broke.
        with contextlib.suppress(TransportError):
            broadcast([link for rank, link in enumerate(self._links) if rank != dropped], payload)
        return future

    def drop_step(self, rank: int) -> None:
        """The next step does not reach this rank."""
        self._dropped_rank = rank

    def stop(self, reason: str) -> None:
        """End all ranks at once; steps that are not done fail. Harmless when called twice."""
        self._fail(ExecutorError(f"The ranks were stopped: {reason}"))
        self._wake.put(False)
        self._kill_hung_ranks()
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)

    def _start_actors(
        self, config: EngineConfig, info: ModelInfo, group: PlacementGroup
    ) -> list[ray.actor.ActorHandle[WorkerActor]]:
        resources = placement.rank_resources(on_gpu=config.model.device == "cuda")
        return [
            start_worker(
                config,
                info,
                rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank // config.parallel.tensor_parallel_size
                ),
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
            )
            for rank in range(self._world_size)
        ]

    def _kill_hung_ranks(self) -> None:
        """Ray waits some seconds before it kills a process that hangs; those on this node can be killed at once."""
        assert self._error is not None
        if self._error.cause != "hung":
            return
        node_id = ray.get_runtime_context().get_node_id()
        for facts in self.facts:
            if facts.node_id == node_id:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(facts.pid, signal.SIGKILL)

    def _load(self) -> list[RankFacts]:
        (store,) = self._wait([self._actors[0].host_store.remote()], "open the store of the ranks")
        return self._wait([actor.load.remote(*store) for actor in self._actors], "load its weights")

    def _wait(self, refs: Sequence[ray.ObjectRef[Any]], doing: str) -> list[Any]:
        """The results of one call per rank, in rank order. Raises as soon as one rank fails, or when time is up."""
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self._startup_timeout_s
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [rank_of[ref] for ref in waiting]
                raise ExecutorError(f"Ranks {late} did not {doing} within {self._startup_timeout_s:.0f} s.")
            for ref in done:
                try:
                    results[rank_of[ref]] = ray.get(ref)
                except RayError as error:
                    failure = _as_quire_error(error, f"Rank {rank_of[ref]} could not {doing}")
                    if isinstance(error, RayActorError):
                        failure = ExecutorError(f"{failure.message} {last_words(error.actor_id)}".rstrip())
                    raise failure from error
        return [results[rank] for rank in range(len(refs))]

    def _gather_answers(self) -> None:
        """Resolve futures in the order of the steps. A step's deadline runs from the end of the step before.

        The step that fails is the oldest that is not resolved: in a pipeline those before it end first.
        """
        while self._wake.get():
            with self._lock:
                expected = self._pending[0] if self._pending else None
            if expected is None:
                return  # the ranks were given up meanwhile
            started = time.monotonic()
            try:
                answers = gather(self._links, self._deadline.allowed_s(expected.num_tokens))
            except TransportError as error:
                self._fail(ExecutorError(f"A rank was lost ({error.message}). {self._cause_of_death()}", "lost"))
                return
            except TimeoutError as error:
                self._fail(ExecutorError(f"A step hangs: {error}.", "hung"))
                return
            self._deadline.observe(expected.num_tokens, time.monotonic() - started)
            skipped = [answer.step_id for answer in answers if answer.step_id != expected.step_id]
            if skipped:
                message = f"A rank answered step {skipped[0]} instead of step {expected.step_id}."
                self._fail(ExecutorError(message, "hung"))
                return
            failures = [answer.error for answer in answers if answer.error]
            if failures:
                self._fail(ExecutorError(f"A step failed on {'; '.join(failures)}"))
                return
            self._resolve(next(answer for answer in answers if answer.output is not None))

    def _resolve(self, answer: RankAnswer) -> None:
        assert answer.output is not None
        with self._lock:
            sent = self._pending.popleft() if self._pending else None
        if sent is not None:
            sent.future.set_result(answer.output)

    def _watch(self) -> None:
        """Hear of a rank's end from Ray: also between steps, and when its node is gone without closing a socket.

        Where a socket tells as well, the gathering thread goes first: it knows which step is lost.
        """
        ray.wait(self._runs, num_returns=1)
        self._failed.wait(CAUSE_OF_DEATH_S)
        self._fail(ExecutorError(f"A rank was lost. {self._cause_of_death()}", "lost"))

    def _cause_of_death(self) -> str:
        """What Ray says about the ranks that have ended."""
        done, _ = ray.wait(self._runs, num_returns=1, timeout=CAUSE_OF_DEATH_S)
        causes = []
        for ref in done:
            try:
                ray.get(ref)
                cause = "it left"
            except RayError as error:
                cause = _as_quire_error(error, "").message
            causes.append(f"Rank {self._runs.index(ref)}: {cause}")
        return " ".join(causes)

    def _fail(self, error: ExecutorError) -> None:
        """Give up this generation for the first reason that is found."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._failed.set()
            pending, self._pending = list(self._pending), deque()
        for sent in pending:
            sent.future.set_exception(error)
        for link in self._links:
            link.close()


def _as_quire_error(error: RayError, doing: str) -> QuireError:
    """What happened on a rank, in one line. A `QuireError` that was raised there keeps its type."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, QuireError):
            return error.cause
        text = f"{type(error.cause).__name__}: {error.cause}"
    elif isinstance(error, RayActorError):
        text = " ".join(str(error).split())
    else:
        text = f"{type(error).__name__}: {error}"
    return ExecutorError(f"{doing}: {text}" if doing else text)
