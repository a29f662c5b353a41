"""Executors of several ranks without Ray, for tests: ranks as threads with their own collectives, or as processes."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.kv_cache_spec import KVCacheConfig, KVCacheSpec
from quire.engine.model_source import ModelInfo
from quire.engine.outputs import ModelRunnerOutput, SchedulerOutput
from quire.workers.parallel import Grid, ParallelContext, Rendezvous, host_store, join
from quire.workers.worker import Worker


class ThreadContext(ParallelContext):
    """Collectives between threads of one process: everybody lays down a tensor, then takes up all of them."""

    def __init__(self, rank: int, grid: Grid, meetings: Meetings) -> None:
        super().__init__(rank, grid)
        self._barrier, self._table = meetings.barriers[self.stage], meetings.tables[self.stage]
        self._queues = meetings.queues

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)

    def send(self, tensor: Tensor) -> None:
        self._queues[self.rank + self.tensor_size].put(tensor.clone())

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = self._queues[self.rank].get(timeout=30)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        return tensor

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._table[self.tensor_rank] = tensor.clone()
        self._barrier.wait()
        taken = list(self._table)
        self._barrier.wait()
        return taken


class Meetings:
    """Where threads meet: a barrier and a table for each stage, and a way to each rank."""

    def __init__(self, grid: Grid) -> None:
        self.barriers = [threading.Barrier(grid.tensor_size, timeout=30) for _ in range(grid.num_stages)]
        self.tables = [[torch.empty(0)] * grid.tensor_size for _ in range(grid.num_stages)]
        self.queues: list[queue.SimpleQueue[Tensor]] = [queue.SimpleQueue() for _ in range(grid.world_size)]


class _Executor:
    """All ranks do the same, the last stage answers. Subclasses say how a rank is called."""

    grid: Grid

    def submit(self, method: str, *args: Any) -> list[Future[Any]]:
        """One call to every rank, which does its calls in order."""
        raise NotImplementedError

    def call(self, method: str, *args: Any) -> list[Any]:
        return [future.result() for future in self.submit(method, *args)]

    def preferred_inflight_steps(self) -> int:
        return self.grid.num_stages

    def preferred_speculative_tokens(self) -> int:
        return 0

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.call("kv_cache_specs")[0]

    def available_kv_cache_bytes(self) -> list[int]:
        by_rank = self.call("available_kv_cache_bytes")
        return [min(by_rank[rank] for rank in self.grid.stage_ranks(stage)) for stage in range(self.grid.num_stages)]

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.call("initialize_kv_cache", config)

    def takes_next_step(self) -> bool:
        return True

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        ranks = self.submit("execute_model", step)
        return _Answer([ranks[rank] for rank in self.grid.stage_ranks(self.grid.num_stages - 1)])

    def restart(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class _Answer(Future[ModelRunnerOutput]):
    """What the ranks of the last stage say, which must be the same."""

    def __init__(self, ranks: list[Future[ModelRunnerOutput]]) -> None:
        super().__init__()
        self._ranks = ranks

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        first, *others = [rank.result(timeout) for rank in self._ranks]
        for other in others:
            np.testing.assert_array_equal(other.sampled_token_ids, first.sampled_token_ids)
        return first


class ThreadExecutor(_Executor):
    """Ranks as threads."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self.grid = Grid.of(config.parallel)
        meetings = Meetings(self.grid)
        ranks = range(self.grid.world_size)
        self._workers = [Worker(config, info, ThreadContext(rank, self.grid, meetings)) for rank in ranks]
        self._threads = [ThreadPoolExecutor(1) for _ in ranks]
        for worker in self._workers:  # one by one: building a model sets a default that threads share
            worker.load_model()

    def submit(self, method: str, *args: Any) -> list[Future[Any]]:
        pairs = zip(self._threads, self._workers, strict=True)
        return [thread.submit(getattr(worker, method), *args) for thread, worker in pairs]

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class ProcessExecutor(_Executor):
    """Ranks as processes that meet over gloo, as the worker actors of a cluster do."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self.grid = Grid.of(config.parallel)
        size = self.grid.world_size
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_rank_main, args=(theirs, rank, config, info), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the death of the process ends a read
        port = self._connections[0].recv()
        for connection in self._connections:
            connection.send(port)
        self._readers = [ThreadPoolExecutor(1) for _ in range(size)]
        self.call("load_model")

    def submit(self, method: str, *args: Any) -> list[Future[Any]]:
        for connection in self._connections:
            connection.send((method, args))
        pairs = zip(self._readers, self._connections, strict=True)
        return [reader.submit(connection.recv) for reader, connection in pairs]

    def shutdown(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(timeout=30)
            assert process.exitcode == 0


def _rank_main(pipe: Connection, rank: int, config: EngineConfig, info: ModelInfo) -> None:
    address, grid = "127.0.0.1", Grid.of(config.parallel)
    store = host_store(address, grid.world_size) if rank == 0 else None
    if store is not None:
        pipe.send(store.port)
    port = pipe.recv()
    parallel = join(Rendezvous(address, port), rank, grid, local_address=address, store=store)
    worker = Worker(config, info, parallel)
    while (message := pipe.recv()) is not None:
        method, args = message
        pipe.send(getattr(worker, method)(*args))
    parallel.close()
