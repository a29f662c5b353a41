"""Which models are asleep: scaled to zero by Serve, and not for want of an engine that should be there.

To a gateway both look alike: no engine is connected. What tells them apart is Serve, which is asked while a model has
no engine, and not otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import DeploymentStatusOverview

logger = logging.getLogger(__name__)

POLL_S = 1.0


class SleepWatch:
    """Asks Serve about models without an engine. Methods are called on one event loop.

    `deployments` are the names of the engines' deployments by model; `lacking` says which models have no engine now;
    `look` asks Serve for the state of the application's deployments, in a thread.
    """

    def __init__(
        self,
        deployments: Mapping[str, str],
        lacking: Callable[[], list[str]],
        look: Callable[[], Mapping[str, DeploymentStatusOverview]],
    ) -> None:
        self._deployments = deployments
        self._lacking = lacking
        self._look = look
        self._asleep: set[str] = set()

    def is_asleep(self, model: str) -> bool:
        """Of a model that has no engine: whether Serve wants none for now, as of its last word."""
        return model in self._asleep

    async def run(self) -> None:
        """Follow what Serve says, until cancelled."""
        while True:
            lacking = self._lacking()
            self._asleep.intersection_update(lacking)
            if lacking:
                await self._ask(lacking)
            await asyncio.sleep(POLL_S)

    async def _ask(self, lacking: list[str]) -> None:
        try:
            states = await asyncio.to_thread(self._look)
        except (RayError, RayServeException) as error:
            logger.warning("Serve does not say whether engines are asleep: %s", error)
            states = {}
        self._asleep = {model for model in lacking if _wants_none(states.get(self._deployments[model]))}


def serve_states(application: str) -> Mapping[str, DeploymentStatusOverview]:
    """The deployments of an application as Serve sees them; none when it does not know it."""
    found = serve.status().applications.get(application)
    return {} if found is None else found.deployments


def _wants_none(state: DeploymentStatusOverview | None) -> bool:
    """Serve is content with a deployment of which no replica is there, starts or stops."""
    return state is not None and state.status == "HEALTHY" and not any(state.replica_states.values())
