"""Faults made on purpose, to see what a service does about them: `quire chaos`. Only where the configuration allows it,
and by a tenant who is an admin where tenants are told apart.

An engine is told of a fault over its gateways' connections (`Inject`), and does it to itself or to its ranks: processes
are killed or stopped by signals, as an operating system would; a dropped step is one that a rank never gets.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from quire.engine.errors import InvalidRequestError, OverloadedError

from .api.errors import PermissionDeniedError
from .api.parsing import parse_request
from .api.protocol.fields import StrictModel
from .api.tenants import tenant_of
from .engine_links import EngineLink
from .faults import Fault
from .messages import Inject

logger = logging.getLogger(__name__)

WORKER_FAULTS = ("kill-worker", "stop-worker", "drop-step")


def check_fault(inject: Inject, world_size: int) -> None:
    """Raises `InvalidRequestError` for a fault that an engine of so many ranks cannot have."""
    if inject.fault not in WORKER_FAULTS:
        return
    if world_size == 1:
        raise InvalidRequestError(
            f"fault: {inject.fault!r} needs worker processes, and this engine has one rank, in its own process; "
            "kill-engine and stop-engine work.",
            "fault",
        )
    if not 0 <= inject.rank < world_size:
        raise InvalidRequestError(f"rank: must be from 0 to {world_size - 1}, got {inject.rank}.", "rank")


class Ranks(Protocol):
    """What faults of single ranks are done to: a `RayExecutor`."""

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank, wherever it runs."""
        ...

    def drop_step(self, rank: int) -> None:
        """The next step does not reach this rank."""
        ...


def do_fault(inject: Inject, ranks: Ranks | None) -> None:
    """Do it to this engine. `ranks` is None where its one rank is in its own process."""
    logger.warning("A fault on purpose: %s, rank %d.", inject.fault, inject.rank)
    if inject.fault == "kill-engine":
        os.kill(os.getpid(), signal.SIGKILL)
    elif inject.fault == "stop-engine":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif ranks is None:
        logger.error("This engine has no worker processes.")
    elif inject.fault == "drop-step":
        ranks.drop_step(inject.rank)
    else:
        ranks.signal_rank(inject.rank, signal.SIGKILL if inject.fault == "kill-worker" else signal.SIGSTOP)


class ChaosRequest(StrictModel):
    """POST /chaos. `engine` is an engine's id, as /health shows it; the first one by name when it is not given."""

    fault: Fault
    rank: int = 0
    engine: str | None = None


def add_chaos_route(app: FastAPI, links: Callable[[], Sequence[EngineLink]], world_sizes: Mapping[str, int]) -> None:
    """Serve POST /chaos. `links` are the connected engines, `world_sizes` the ranks of an engine by its model."""

    @app.post("/chaos", include_in_schema=False)
    async def chaos(http: Request) -> Response:
        if not tenant_of(http.scope).terms.is_admin:
            raise PermissionDeniedError(
                "Faults touch every tenant: they need a key with 'admin: true' in the keys file."
            )
        request = parse_request(ChaosRequest, await http.body())
        engines = {link.record.engine_id: link for link in links()}
        if not engines:
            raise OverloadedError("No engine is connected.")
        engine_id = request.engine or min(engines)
        if engine_id not in engines:
            raise InvalidRequestError(f"engine: there is no {engine_id!r}; there are {', '.join(engines)}.", "engine")
        link = engines[engine_id]
        inject = Inject(request.fault, request.rank)
        check_fault(inject, world_sizes.get(link.record.model, 1))
        link.send(inject)
        return JSONResponse({"engine": engine_id, "fault": inject.fault, "rank": inject.rank}, status_code=202)
