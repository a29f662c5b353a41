"""GET /ready: whether a request that came now would be answered.

/health says that engines move; a fresh one may move and still not be able to answer. So a gateway asks each model for
one token before it calls itself ready, once: a canary that queued with everybody else each time would call a busy
service dead. Afterwards the health of the engines decides.

A model that is asleep (scaled to zero) is not asked for a canary, which would wake it: probes would keep it awake for
ever. Requests for it are answered all the same, once an engine has started; so a service of which every model is asleep
takes requests, and says so with status 200.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import msgspec

from quire.engine.errors import EngineError, OverloadedError, QuireError
from quire.engine.input_processor import RequestOptions
from quire.engine.sampling_params import SamplingParams

from .backend import Backend
from .context import new_id
from .protocol.scheduling import MAX_PRIORITY
from .tokenization import model_or_default

logger = logging.getLogger(__name__)

CANARY_TIMEOUT_S = 30.0
ANSWER_WITHIN_S = 2.0  # probes are impatient: until the canary is there, the answer is no


class Ready(msgspec.Struct):
    """`models` are those that can be used now, `asleep` those that a request would wake. `status` is `asleep` when
    there are only such."""

    models: list[str]
    asleep: list[str] = []
    status: str = "ready"


class Readiness:
    """Knows which models have answered a canary. Belongs to one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._proven: set[str] = set()
        self._canaries: dict[str, asyncio.Task[None]] = {}
        self._problems: dict[str, str] = {}

    async def check(self) -> Ready:
        """Raises `OverloadedError`, with the reason, when no model can be used."""
        health = self._backend.health()
        if health.status == "unhealthy":
            raise OverloadedError(health.problem or "No engine makes progress.")
        asleep = [model.id for model in health.models if model.status == "asleep"]
        alive = [model.id for model in health.models if model.status in ("ok", "degraded")]
        if asleep and not alive:
            return Ready([], asleep, "asleep")
        waiting = [self._canary(name) for name in alive if name not in self._proven]
        if len(waiting) == len(alive):  # none is proven: it is worth a moment
            await asyncio.wait(waiting, timeout=ANSWER_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        usable = [name for name in alive if name in self._proven]
        if not usable:
            problems = [self._problems.get(name, "The first token has not come yet.") for name in alive]
            raise OverloadedError(" ".join(dict.fromkeys(problems)))
        return Ready(usable, asleep)

    def _canary(self, model: str) -> asyncio.Task[None]:
        """The one that is under way for a model, or a new one."""
        task = self._canaries.get(model)
        if task is None or task.done():
            task = self._canaries[model] = asyncio.create_task(self._prove(model))
        return task

    async def _prove(self, model: str) -> None:
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                await self._one_token(model)
            self._proven.add(model)
        except QuireError as error:
            self._problems[model] = error.message
        except TimeoutError:
            self._problems[model] = f"The first token did not come within {CANARY_TIMEOUT_S:g} s."
        except Exception as error:  # a task of its own: who asks /ready hears of it, or nobody would
            logger.exception("The canary of %s failed", model)
            self._problems[model] = f"The first token failed: {error!r}"

    async def _one_token(self, model: str) -> None:
        served = await model_or_default(self._backend, model)
        requests = served.input_processor.process(
            new_id("canary"),
            [0],
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            options=RequestOptions(priority=-MAX_PRIORITY),
        )
        num_tokens = 0
        async with aclosing(self._backend.generate(model, requests)) as batches:
            async for outputs in batches:
                for output in outputs:
                    num_tokens += len(output.new_token_ids)
                    if output.finish_reason == "error":
                        raise EngineError(output.error or "The engine failed while it worked on the first token.")
        if num_tokens != 1:
            raise EngineError("The engine ended its work on the first token without one.")
        logger.info("Model %s has answered: it is ready.", model)
