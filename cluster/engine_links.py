"""The gateway's connections to its engines: one to every engine in the directory, as long as that engine lives."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.engine.outputs import SchedulerStats

from . import transport
from .directory import POLL_S, Directory, DirectoryError, EngineRecord, Lease
from .messages import EngineMessage, GatewayMessage, LoadReport, encoder, engine_message_decoder
from .router import EngineSnapshot

if TYPE_CHECKING:
    from .streams import Stream

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5  # before the second attempt to connect; doubled after each failure
MAX_RECONNECT_S = 8.0


class EngineLink:
    """One engine that this gateway is connected to."""

    def __init__(self, record: EngineRecord) -> None:
        self.record = record
        self.connection: transport.Connection | None = None
        self.streams: dict[str, Stream] = {}  # by wire id
        self.stats = SchedulerStats()
        self.problem: str | None = None
        self.is_leaving = False  # it has said so; what happens to it then is no fault of its requests
        self.num_recent = 0  # requests sent since the last report, and their prompt tokens
        self.num_recent_tokens = 0
        self.cache_number: int | None = None  # of the last word about its prefix cache; None: a snapshot is to come
        self.num_gateways = 1  # connected to it
        self.closed = asyncio.Event()

    def send(self, message: GatewayMessage) -> None:
        assert self.connection is not None
        self.connection.send(encoder.encode(message))

    async def drain(self) -> None:
        """Wait until the engine has read most of what was sent: before more of a size that others could feel."""
        assert self.connection is not None
        await self.connection.drain()

    def report(self, report: LoadReport) -> None:
        """How busy the engine is now."""
        self.stats, self.problem, self.num_gateways = report.stats, report.problem, report.num_gateways
        self.num_recent = self.num_recent_tokens = 0

    def snapshot(self, num_hit_tokens: int = 0) -> EngineSnapshot:
        return EngineSnapshot(
            self.record.engine_id,
            self.stats,
            self.num_recent,
            len(self.streams),
            self.num_recent_tokens,
            num_hit_tokens,
        )


class LinkUser(Protocol):
    """Who is told what happens on the links. All methods are called on the event loop."""

    def on_connected(self, link: EngineLink) -> None: ...

    def on_message(self, link: EngineLink, message: EngineMessage) -> None: ...

    def on_lost(self, link: EngineLink, reason: str) -> None:
        """The link is not among the connected ones any more."""
        ...


class EngineLinks:
    """Follows the directory and keeps a link to every engine in it. All methods run on one event loop.

    An engine that cannot be reached stays in the directory: it may be this side that is slow. Only where nobody listens
    any more, or another engine does, or its lease has run out, the entry is removed; an engine that lives writes it
    again (`Registration`).
    """

    def __init__(self, directory: Directory, identity: str, user: LinkUser) -> None:
        self._directory = directory
        self._identity = identity
        self._user = user
        self._secret = b""
        self._tasks: dict[str, asyncio.Task[None]] = {}  # one per engine in the directory
        self._connected: dict[str, EngineLink] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._problem: str | None = None  # with the latest look into the directory

    async def start(self) -> None:
        """Begin to follow the directory."""
        self._secret = await asyncio.to_thread(self._directory.secret)
        await self._refresh()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Leave all engines."""
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def connected(self) -> list[EngineLink]:
        """The connected engines, ordered by id."""
        return [self._connected[engine_id] for engine_id in sorted(self._connected)]

    def problem(self) -> str | None:
        """Why engines that come are not noticed; None when they are."""
        if self._watcher is None or self._watcher.done():
            return "the directory of engines is not followed"
        return self._problem

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._refresh()
                self._problem = None
            except (
                Exception
            ) as error:  # told by `problem()`; the next round may go well, and without it nobody is found
                self._problem = f"the directory of engines cannot be followed ({error!r})"
                logger.exception("A look into the directory of engines failed")

    async def _refresh(self) -> None:
        """Begin to connect to engines that are new in the directory."""
        for engine_id in [known for known, task in self._tasks.items() if task.done()]:
            self._tasks.pop(engine_id).result()
        try:
            for engine_id in await asyncio.to_thread(self._directory.engine_ids):
                if engine_id not in self._tasks:
                    record = await asyncio.to_thread(self._directory.get, engine_id)
                    if record is not None:
                        self._tasks[engine_id] = asyncio.create_task(self._follow(record))
        except DirectoryError as error:
            logger.warning("%s Engines that are connected stay so.", error.message)

    async def _follow(self, record: EngineRecord) -> None:
        """Stay connected to one engine until it has left the directory. Raises nothing but what nobody expects."""
        delay_s = RECONNECT_S
        lease = Lease()
        try:
            while (entry := await asyncio.to_thread(self._directory.get, record.engine_id)) is not None:
                if lease.has_run_out(entry.renewal):
                    logger.warning("Engine %s is gone: it does not renew its entry.", record.engine_id)
                    await asyncio.to_thread(self._directory.remove, record.engine_id)
                    return
                try:
                    link = await self._connect(record)
                except (ConnectionRefusedError, _AnotherEngineError) as error:
                    logger.info("Engine %s is gone (%s).", record.engine_id, error)
                    await asyncio.to_thread(self._directory.remove, record.engine_id)
                    return
                except (transport.TransportError, OSError) as error:
                    reason = error or type(error).__name__
                    logger.warning("Engine %s cannot be reached (%s).", record.engine_id, reason)
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, MAX_RECONNECT_S)
                else:
                    await self._use(link)
                    delay_s, lease = RECONNECT_S, Lease()
                    await asyncio.sleep(delay_s)
        except DirectoryError as error:
            logger.warning("%s Engine %s is looked up again.", error.message, record.engine_id)

    async def _connect(self, record: EngineRecord) -> EngineLink:
        """Raises `OSError` or `TransportError`, or `_AnotherEngineError` when the address has changed hands."""
        link = EngineLink(record)
        link.connection = await transport.connect(
            record.host,
            record.port,
            self._secret,
            self._identity,
            lambda _, payload: self._on_frame(link, payload),
            lambda _, reason: self._on_close(link, reason),
        )
        if link.connection.peer != record.engine_id:
            link.connection.close()
            raise _AnotherEngineError(f"{link.connection.peer} has its address")
        return link

    async def _use(self, link: EngineLink) -> None:
        """Let an engine be used until its connection ends."""
        assert link.connection is not None
        if not link.connection.is_open:
            return
        record = link.record
        logger.info("Connected to engine %s at %s:%d.", record.engine_id, record.host, record.port)
        self._connected[record.engine_id] = link
        try:
            self._user.on_connected(link)
            await link.closed.wait()
        finally:
            link.connection.close()

    def _on_frame(self, link: EngineLink, payload: bytes) -> None:
        try:
            message = engine_message_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise transport.TransportError(f"not a message of an engine: {error}") from error
        self._user.on_message(link, message)

    def _on_close(self, link: EngineLink, reason: str) -> None:
        if self._connected.get(link.record.engine_id) is link:
            del self._connected[link.record.engine_id]
        link.closed.set()
        self._user.on_lost(link, reason)


class _AnotherEngineError(Exception):
    """Who answers at an engine's address has proven to be another one."""
