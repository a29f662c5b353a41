"""Executors of several ranks without Ray, for tests: ranks as threads with their own collectives, or as processes."""

from __future__ import annotations

import multiprocessing
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
from quire.workers.parallel import ParallelContext, Rendezvous, host_store, join
from quire.workers.worker import Worker


class ThreadContext(ParallelContext):
    """Collectives between threads of one process: everybody lays down a tensor, then takes up all of them."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, table: list[Tensor]) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self._barrier, self._table = barrier, table

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._table[self.rank] = tensor.clone()
        self._barrier.wait()
        taken = list(self._table)
        self._barrier.wait()
        return taken


class _Executor:
    """All ranks do the same, rank 0 answers. Subclasses say how a rank is called."""

    def call(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError

    def preferred_inflight_steps(self) -> int:
        return 1

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.call("kv_cache_specs")[0]

    def available_kv_cache_bytes(self) -> int:
        return min(self.call("available_kv_cache_bytes"))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.call("initialize_kv_cache", config)

    def execute(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        first, *others = self.call("execute_model", step)
        for other in others:
            np.testing.assert_array_equal(other.sampled_token_ids, first.sampled_token_ids)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(first)
        return future

    def restart(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        raise NotImplementedError


class ThreadExecutor(_Executor):
    """Ranks as threads."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        size = config.parallel.tensor_parallel_size
        barrier, table = threading.Barrier(size, timeout=30), [torch.empty(0)] * size
        self._workers = [Worker(config, info, ThreadContext(rank, size, barrier, table)) for rank in range(size)]
        self._threads = ThreadPoolExecutor(size)
        for worker in self._workers:  # one by one: building a model sets a default that threads share
            worker.load_model()

    def call(self, method: str, *args: Any) -> list[Any]:
        futures = [self._threads.submit(getattr(worker, method), *args) for worker in self._workers]
        return [future.result() for future in futures]

    def shutdown(self) -> None:
        self._threads.shutdown()


class ProcessExecutor(_Executor):
    """Ranks as processes that meet over gloo, as the worker actors of a cluster do."""

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        size = config.parallel.tensor_parallel_size
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_rank_main, args=(theirs, rank, size, config, info), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the death of the process ends a read
        port = self._connections[0].recv()
        for connection in self._connections:
            connection.send(port)
        self.call("load_model")

    def call(self, method: str, *args: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((method, args))
        return [connection.recv() for connection in self._connections]

    def shutdown(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(timeout=30)
            assert process.exitcode == 0


def _rank_main(pipe: Connection, rank: int, size: int, config: EngineConfig, info: ModelInfo) -> None:
    address = "127.0.0.1"
    store = host_store(address, size) if rank == 0 else None
    if store is not None:
        pipe.send(store.port)
    port = pipe.recv()
    parallel = join(Rendezvous(address, port), rank, size, local_address=address, store=store)
    worker = Worker(config, info, parallel)
    while (message := pipe.recv()) is not None:
        method, args = message
        pipe.send(getattr(worker, method)(*args))
    parallel.close()
