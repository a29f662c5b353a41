"""Server-sent events: built once as bytes, sent in batches, watched for the client's leaving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.errors import QuireError

from .errors import body_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


# Characters that end a line in Unicode (and for `str.splitlines`, which common clients read streams with), but neither
# in an event stream nor in JSON, which may stand in it as they are. Control characters JSON has escaped already.
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def event(payload: msgspec.Struct) -> bytes:
    """One event: one line to every reader, whatever text the payload has."""
    data = _encode(payload)
    if not data.isascii():
        for end, escaped in _LINE_ENDS:
            data = data.replace(end, escaped)
    return b"data: %b\n\n" % data


def error_event(error: Exception) -> bytes:
    return event(body_of(error))


class ClientGoneError(Exception):
    """The client closed the connection before its answer was ready: there is nobody to answer."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it when the client closes the connection. The body must have been read before.

    Raises `ClientGoneError`. When the caller is cancelled, so is `work`; both have ended on return.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# What an item of a stream becomes on its way out (`EventIds.number`): nothing, if its client has seen it.
Number = Callable[[bytes], bytes]


async def first_event(events: AsyncGenerator[bytes, None], number: Number | None) -> bytes:
    """The first of `events` that is to be sent, or nothing."""
    async for data in events:
        if number is None or (data := number(data)):
            return data
    return b""


class EventStream(Response):
    """Sends `first` and then what `events` yields (bytes of one or more events each), until it ends.

    `first` was awaited before the response began (`first_event`), so that a request that is refused gets an HTTP
    status. An error afterwards is the last event, as `failed` says it. When the client leaves, `events` is closed at
    once.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        number: Number | None = None,
        failed: Callable[[Exception], bytes] = error_event,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._number = number
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except (ClientGoneError, OSError):  # some servers tell so only when one sends
            logger.debug("A client left its stream")
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        last = b""
        while not last:
            try:
                data = await anext(self._events)
                if self._number is not None:
                    data = self._number(data)
            except StopAsyncIteration:
                break
            except QuireError as error:
                data = last = self._failed(error)
            except Exception as error:  # status 200 is out: that it failed can only be said in the stream
                logger.exception("A stream failed")
                data = last = self._failed(error)
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
