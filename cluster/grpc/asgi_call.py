"""One request to an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)

MAX_UNREAD = 16  # pieces of a response that its reader has not asked for


class AsgiCall:
    """A request under way. Enter it to have `status` and `headers`; iterate `body()`; leaving it early disconnects."""

    def __init__(self, app: ASGIApp, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self._app = app
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
            "client": None,
            "server": None,
        }
        self._request: list[bytes] = [body]
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the application has ended
        self._room = asyncio.Semaphore(MAX_UNREAD)
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> AsgiCall:
        self._task = asyncio.create_task(self._run())
        try:
            started = await self._next()
        except BaseException:
            await self._leave()
            raise
        self.status = started["status"]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in started["headers"]}
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._leave()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The pieces of the response as they are sent."""
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]

    async def _next(self) -> Message:
        message = await self._sent.get()
        if message is None:
            await self._task
            raise RuntimeError("The application ended in the middle of a response.")
        self._room.release()
        return message

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._sent.put_nowait(None)

    async def _send(self, message: Message) -> None:
        await self._room.acquire()
        self._sent.put_nowait(message)

    async def _receive(self) -> Message:
        if self._request:
            return {"type": "http.request", "body": self._request.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _leave(self) -> None:
        """The client is gone: the application notices, and its work ends."""
        self._gone.set()
        self._task.cancel()
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(result, Exception):
            logger.error("A call failed", exc_info=result)
