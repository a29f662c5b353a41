"""What every endpoint works with, and the first and last steps that they share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError

from ..metrics import GatewayMetrics
from .backend import Backend
from .errors import BodyTimeoutError, BodyTooLargeError
from .heavy_work import LARGE, HeavyWork
from .limits import ApiLimits
from .resume import EventIds
from .sse import EventStream, error_event, first_event, unless_client_leaves
from .template_sandbox import TemplateSandbox

T = TypeVar("T")
_BODY_IDLE_S = 30.0
_BODY_S = 300.0


@dataclass(frozen=True, slots=True)
class ApiContext:
    backend: Backend
    metrics: GatewayMetrics
    limits: ApiLimits
    templates: TemplateSandbox = field(default_factory=TemplateSandbox)  # for those that come with requests
    heavy_work: HeavyWork = field(default_factory=HeavyWork)


async def read_body(http: Request, limits: ApiLimits) -> bytes:
    """The body as it came. Raises `BodyTooLargeError`; reads no further than the limit. Raises `BodyTimeoutError` when
    nothing comes for a while, or it takes too long in all."""
    limit = limits.max_body_bytes
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLargeError(limit)
    body = bytearray()
    chunks, now = http.stream(), asyncio.get_running_loop().time
    end = now() + _BODY_S
    try:
        while True:
            async with asyncio.timeout_at(min(now() + _BODY_IDLE_S, end)):
                chunk = await anext(chunks, None)
            if chunk is None:
                return bytes(body)
            body += chunk
            if len(body) > limit:
                raise BodyTooLargeError(limit)
    except TimeoutError:
        raise BodyTimeoutError(_BODY_IDLE_S, _BODY_S) from None


async def off_the_loop(body: bytes, work: Callable[[], T]) -> T:
    """What `work` returns; from a thread where the body is large enough for others to feel it.

    No text and no list in a request has more entries than its body has bytes. What a template makes of them may be
    longer: texts are tokenized by `heavy_work`. So may an answer be: `whole_answers` goes by its own length.
    """
    return work() if len(body) < LARGE else await asyncio.to_thread(work)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def check_choices(num_prompts: int, n: int | None, limits: ApiLimits, param: str = "n") -> None:
    """Raises `InvalidRequestError` when one HTTP request asks for too many answers. `param`: the field that says n."""
    asked = num_prompts * (n or 1)
    if asked > limits.max_choices:
        param, counted = "prompt" if num_prompts > 1 else param, param
        raise InvalidRequestError(
            f"{param}: {asked} answers in one request (prompts x {counted}), at most {limits.max_choices} are allowed.",
            param,
        )


def json_response(payload: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")


async def stream_response(
    http: Request,
    events: AsyncGenerator[bytes, None],
    event_ids: EventIds | None = None,
    failed: Callable[[Exception], bytes] = error_event,
) -> Response:
    """Events as a response that begins with the first of them. What is raised until then gets an HTTP status, and
    becomes an event afterwards, which `failed` makes."""
    number = None if event_ids is None else event_ids.number
    first = await unless_client_leaves(http.receive, first_event(events, number))
    return EventStream(first, events, number, failed)
