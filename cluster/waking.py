"""Wakes a model that has been scaled to zero: how Serve hears that a request waits in a gateway.

Serve's autoscaling looks at calls through its own handles, and requests do not pass through them. So a gateway that
finds no engine makes one call on the handle of the engines. While there is none, the call waits in the handle, Serve
counts it, and starts an engine at once, whatever the policy and its delays say; the engine's answer ends the call.
Where an engine is on its way anyway, the call changes nothing. A call that fails leaves nothing for Serve to count, so
it is made again while somebody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from .engine_replica import Engine

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # before a call that failed is made again; twice as long after each
MAX_RETRY_S = 5.0


class EngineWaker:
    """At most one call per model is under way. Methods are called on one event loop.

    `is_waited_for` says of a model whether requests wait for an engine of it still.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Engine]], is_waited_for: Callable[[str], bool]) -> None:
        self._handles = handles  # by model
        self._is_waited_for = is_waited_for
        self._calls: dict[str, asyncio.Task[None]] = {}

    def wake(self, model: str) -> None:
        """See to it that there is an engine of this model soon."""
        if model in self._handles and model not in self._calls:
            self._calls[model] = asyncio.create_task(self._call(model))

    def close(self) -> None:
        for call in self._calls.values():
            call.cancel()

    async def _call(self, model: str) -> None:
        logger.info("A request for %s waits for an engine: Serve is asked for one.", model)
        retry_s = RETRY_S
        try:
            while not await self._ask(model):
                await asyncio.sleep(retry_s)
                if not self._is_waited_for(model):
                    return
                retry_s = min(2 * retry_s, MAX_RETRY_S)
        finally:
            del self._calls[model]

    async def _ask(self, model: str) -> bool:
        """Whether an engine has answered."""
        try:
            await self._handles[model].wake.remote()
        except (RayError, RayServeException) as error:  # an engine that died while it answered, say
            logger.warning("Serve cannot be asked for an engine of %s: %s", model, error)
            return False
        return True
