"""The outermost net: whatever escapes from an endpoint leaves as an OpenAI error body with status 500, and in the log.

Without it the server around the application would answer, in plain text. An exception is the common case; the other is
a `CancelledError` that nobody asked for: what an endpoint waited for was cancelled by someone else. Ray Serve raises
one where a call on a handle is cancelled, and Starlette lets it pass, since it is no `Exception`.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import error_response

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 200


class LastResortMiddleware:
    """Nothing is raised through it but the cancellation of the request itself. A response that has begun is cut off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if has_begun or (task is not None and task.cancelling()):
                raise
            await self._answer(error, scope, receive, send)
        except Exception as error:  # the net below all others: it answers for whatever nobody foresaw
            if has_begun:
                raise  # the server closes the connection: a client must not take the part for the whole
            await self._answer(error, scope, receive, send)

    async def _answer(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        where, name = f"{scope['method']} {scope['path'][:_SHOWN_CHARS]}", _request_id(scope)
        logger.error("%s (x-request-id %s) failed unexpectedly", where, name, exc_info=error)
        await error_response(error)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """As this application (`RequestIdMiddleware`) or the server around it has named the request."""
    name: str = scope.get("state", {}).get("request_id") or Headers(scope=scope).get("x-request-id", "-")
    return name[:_SHOWN_CHARS]
