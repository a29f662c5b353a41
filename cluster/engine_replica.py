"""The Serve deployment `Engine`: a Ray actor that hosts the scheduler, the KV cache manager and the step loop.

Serve starts it, watches its health and scales it. Requests do not pass through Serve: gateways find the engine in the
directory and talk to its `EngineServer`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from functools import partial

from prometheus_client.core import Metric
from ray import serve

from quire.engine.config import EngineConfig
from quire.engine.errors import EngineError
from quire.engine.model_source import load_model_info

from .assembly import start_core
from .chaos import do_fault
from .directory import Directory, EngineRecord, GcsStore, Registration
from .engine_server import EngineServer
from .grpc_listeners import keep_off_the_network
from .logs import configure_logging
from .metrics import EngineStats, engine_families
from .placement import node_address
from .ray_executor import RayExecutor
from .ray_metrics import RayExporter

logger = logging.getLogger(__name__)

# Nobody starts a replacement before the process has ended: where there is no other engine, waiting is in vain.
SIGTERM_GRACE_S = 5.0


class Engine:
    """One engine, from its weights to its address in the directory. The constructor raises what keeps it from working.

    Where the core itself fails, the process ends: its state cannot be trusted, and its streams go on elsewhere.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: EngineConfig, *, allow_faults: bool = False
    ) -> None:
        keep_off_the_network()
        context = serve.get_replica_context()
        self._engine_id = f"{context.replica_id.unique_id}-{uuid.uuid4().hex[:6]}"
        configure_logging(f"engine {self._engine_id}")
        # Serve kills what has not ended by then; the last second is for ending in order.
        self._grace_s = max(0.0, context._deployment_config.graceful_shutdown_timeout_s - 1.0)
        directory = Directory(GcsStore(), context.app_name)
        info = load_model_info(config.model)
        self._model = info.name
        core = await asyncio.to_thread(start_core, config, info)
        ranks = core.executor if isinstance(core.executor, RayExecutor) else None
        on_fault = partial(do_fault, ranks=ranks) if allow_faults else None
        self._server = EngineServer(core, self._engine_id, directory.secret(), config.parallel, on_fault)
        host = node_address()
        port = await self._server.start(host)
        self._server.failed.add_done_callback(self._on_core_failure)
        record = EngineRecord(
            engine_id=self._engine_id, model=info.name, host=host, port=port, max_model_len=core.max_model_len
        )
        self._registration = Registration(directory, record)
        await self._registration.start()
        self._is_leaving = False
        self._event_loop = asyncio.get_running_loop()
        # Not `atexit`, which comes after Python has closed all thread pools, and the end needs one.
        threading._register_atexit(self._on_exit)  # type: ignore[attr-defined]
        self._exporter = asyncio.create_task(RayExporter(self._families).run())
        logger.info("Engine %s serves %s at %s:%d.", self._engine_id, info.name, host, port)

    def check_health(self) -> None:
        """Called by Serve. Raises `EngineError` when the step loop makes no progress."""
        problem = self._server.problem()
        if problem is not None:
            raise EngineError(f"Engine {self._engine_id} makes no progress: {problem}.")

    def wake(self) -> None:
        """Called by gateways that have found no engine (`waking.py`): there is one now."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for the policy in `autoscaling.py`."""
        stats = self._server.load().stats
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_queued_tokens": stats.num_waiting_tokens + stats.num_uncomputed_tokens,
            "kv_cache_usage": stats.kv_cache_usage,
        }

    def _families(self) -> list[Metric]:
        return engine_families([EngineStats(self._engine_id, self._model, self._server.load().stats)])

    async def __del__(self) -> None:
        """Called by Serve when it stops the replica, for whatever reason: hand over what runs here, and end."""
        if hasattr(self, "_exporter"):
            self._exporter.cancel()
        if hasattr(self, "_registration"):
            await self._leave(self._grace_s)

    async def _leave(self, grace_s: float) -> None:
        """The entry in the directory goes last: a gateway that starts meanwhile may need this engine still."""
        self._is_leaving = True
        await self._server.leave(grace_s)
        await self._registration.end()
        await self._server.close()

    def _on_exit(self) -> None:
        """SIGTERM ends the process by way of its main thread (Ray sees to that). The others still run meanwhile."""
        if self._is_leaving:
            return
        logger.info("Engine %s is told to end.", self._engine_id)
        asyncio.run_coroutine_threadsafe(self._leave(SIGTERM_GRACE_S), self._event_loop).result()

    def _on_core_failure(self, failed: asyncio.Future[BaseException]) -> None:
        logger.critical("Engine %s ends, because its core failed: %r", self._engine_id, failed.result())
        logging.shutdown()
        os._exit(1)
