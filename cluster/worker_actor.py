"""One rank of an engine as a Ray actor: Ray starts it and tells of its death, a socket carries its steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from quire.engine.config import EngineConfig
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo

from .logs import configure_logging
from .messages import RankAnswer, encoder, step_decoder
from .placement import node_address
from .rank_links import RankLink, connect_rank

if TYPE_CHECKING:
    from quire.workers.launched_step import LaunchedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank knows of itself once its weights are loaded."""

    kv_cache_specs: list[KVCacheSpec]
    available_kv_cache_bytes: int
    preferred_inflight_steps: int
    preferred_speculative_tokens: int
    pid: int
    node_id: str


class WorkerActor:
    """One rank. The engine calls, in this order: `host_store` (rank 0 only), `load`,
    `initialize_kv_cache`, and `run`, which does not return while all is well.

    torch is imported when an actor is made, not by the import of this module, which the engine does as well: all ranks
    do it at the same time, where rank 0 would be alone with it while the others wait for its store.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, rank: int) -> None:
        self._config = config
        self._info = info
        self._rank = rank
        configure_logging(f"rank {rank}")
        import quire.workers.worker  # noqa: F401

    def host_store(self) -> tuple[str, int]:
        """Open the store in which the ranks meet; returns its address and port."""
        from quire.workers.parallel import host_store

        address = node_address()
        self._store = host_store(address, self._config.parallel.world_size)
        return address, self._store.port

    def load(self, address: str, port: int) -> RankFacts:
        """Meet the other ranks at the store and load this rank's part of the weights."""
        from quire.workers.parallel import Grid, Rendezvous, join
        from quire.workers.worker import Worker

        context = join(
            Rendezvous(address, port),
            self._rank,
            Grid.of(self._config.parallel),
            local_address=node_address(),
            backend="nccl" if self._config.model.device == "cuda" else "gloo",
            timeout_s=self._config.parallel.startup_timeout_s,
            store=getattr(self, "_store", None),
        )
        self._answers = context.is_last_stage and context.tensor_rank == 0
        self._worker = Worker(self._config, self._info, context)
        self._worker.load_model()
        return RankFacts(
            self._worker.kv_cache_specs(),
            self._worker.available_kv_cache_bytes(),
            self._worker.preferred_inflight_steps,
            self._worker.preferred_speculative_tokens,
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
        )

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._worker.initialize_kv_cache(config)

    def run(self, host: str, port: int, secret: bytes) -> None:
        """Execute steps in the order in which they come, until the engine leaves or a step fails.

        The engine keeps this call pending: that it ends is how it hears of a death that its socket cannot tell.
        """
        link = connect_rank(host, port, secret, self._rank)
        if self._worker.device.type == "cpu":
            while True:
                self._step(link, link.recv(), _now)
        # A GPU is at work on one step while the host launches the next: results are waited for elsewhere.
        with ThreadPoolExecutor(1, "answers") as answers:
            while True:
                self._step(link, link.recv(), answers.submit)

    def _step(self, link: RankLink, payload: bytes, answer: Callable[..., object]) -> None:
        """Launch a step, and have it answered by `answer(function, *arguments)`, which calls in order."""
        step = step_decoder.decode(payload)
        try:
            launched = self._worker.launch(step)
        except Exception as error:
            answer(self._send_failure, link, step.step_id, error)
            raise
        answer(self._send_result, link, step.step_id, launched)

    def _send_result(self, link: RankLink, step_id: int, launched: LaunchedStep) -> None:
        try:
            output = launched.result()
        except Exception as error:
            self._send_failure(link, step_id, error)
            raise
        # Every rank of the last stage has sampled the same tokens: one of them says so.
        link.send(encoder.encode(RankAnswer(step_id, output if self._answers else None)))

    def _send_failure(self, link: RankLink, step_id: int, error: Exception) -> None:
        """The engine gives up all ranks when it hears it."""
        logger.error("step %d failed", step_id, exc_info=error)
        link.send(encoder.encode(RankAnswer(step_id, error=f"rank {self._rank}: {type(error).__name__}: {error}")))


def _now(function: Callable[..., None], *arguments: object) -> None:
    function(*arguments)


def start_worker(
    config: EngineConfig, info: ModelInfo, rank: int, **options: object
) -> ray.actor.ActorHandle[WorkerActor]:
    """Start the actor of one rank. It is never restarted by Ray: ranks are only of use all together."""
    remote_class: Any = ray.remote(WorkerActor)
    actor: ray.actor.ActorHandle[WorkerActor] = remote_class.options(max_restarts=0, **options).remote(
        config, info, rank
    )
    return actor
