"""A request's own deadline, from its arrival to the end of its answer, whoever it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

from quire.engine.outputs import EngineOutput, EngineRequest

from .errors import DeadlineError
from .protocol.scheduling import MAX_DEADLINE_MS

T = TypeVar("T")


class Engines(Protocol):
    """What a generation needs of a `Backend`."""

    def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]: ...

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None: ...


class Deadline:
    """Begins now. A value that is not allowed is none: the request is refused for it elsewhere."""

    def __init__(self, deadline_ms: int | None) -> None:
        given = deadline_ms is not None and 1 <= deadline_ms <= MAX_DEADLINE_MS
        self._at = asyncio.get_running_loop().time() + deadline_ms / 1000 if given and deadline_ms else None

    async def hold(self, work: Awaitable[T]) -> T:
        """What `work` returns. Raises `DeadlineError`, and cancels it, when the time is over."""
        timeout = asyncio.timeout_at(self._at)
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if timeout.expired():
                raise DeadlineError from None
            raise

    def over(self, engines: Engines) -> Engines:
        """The same engines, whose outputs end with a `DeadlineError` when the time is over."""
        return engines if self._at is None else _Punctual(engines, self)


class _Punctual:
    """An engine counts its requests' time from their arrival there; this also counts the wait for an engine."""

    def __init__(self, engines: Engines, deadline: Deadline) -> None:
        self._engines = engines
        self._deadline = deadline

    async def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        async with aclosing(self._engines.generate(model, requests)) as batches:
            # Held item by item: a consumer may ask for each from another task.
            while (outputs := await self._deadline.hold(anext(batches, None))) is not None:
                yield outputs

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None:
        self._engines.abort(request_ids, report=report)
