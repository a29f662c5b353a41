"""What every endpoint works with, and the first and last steps that they share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError

from ..metrics import GatewayMetrics
from .backend import Backend
from .errors import BodyTooLargeError
from .parsing import parse_request
from .sse import EventStream, unless_client_leaves

T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What one HTTP request may hold."""

    max_body_bytes: int = 32 << 20
    max_choices: int = 256  # prompts x n


@dataclass(frozen=True, slots=True)
class ApiContext:
    backend: Backend
    metrics: GatewayMetrics
    limits: ApiLimits


async def read_request(http: Request, schema: type[T], limits: ApiLimits) -> T:
    """The validated body. Raises `InvalidRequestError`; reads no further than the limit."""
    limit = limits.max_body_bytes
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError(limit)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLargeError(limit)
    return parse_request(schema, bytes(body))


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def check_choices(num_prompts: int, n: int | None, limits: ApiLimits) -> None:
    """Raises `InvalidRequestError` when one HTTP request asks for too many answers."""
    asked = num_prompts * (n or 1)
    if asked > limits.max_choices:
        param = "prompt" if num_prompts > 1 else "n"
        raise InvalidRequestError(
            f"{param}: {asked} answers in one request (prompts x n), at most {limits.max_choices} are allowed.", param
        )


def json_response(payload: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


async def stream_response(http: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Events as a response that begins with the first of them. What is raised until then gets an HTTP status."""
    return EventStream(await unless_client_leaves(http.receive, anext(events)), events)
