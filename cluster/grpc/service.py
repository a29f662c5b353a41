"""What answers the calls of `proto/quire_inference.proto`: the HTTP application itself, asked in this process.

So a call is validated, counted, limited, answered and aborted by the code that does it for HTTP, and it cannot mean
anything else. The price is a chunk's way through JSON, some ten microseconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any, NoReturn, Protocol

import grpc
import msgspec
from starlette.types import ASGIApp

from quire.engine.errors import QuireError

from ..api.errors import body_of, status_of
from . import quire_inference_pb2 as pb
from .asgi_call import AsgiCall
from .translation import generate_body, generate_response, tokenize_body, tokenize_response

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_PASSED_ON = ("authorization", "x-request-id")
# Errors after a stream has begun come without a status: their type or code tells.
_STATUS_OF_EVENT = {"timeout_error": 408, "overloaded": 503, "invalid_request_error": 400}


class CallContext(Protocol):
    """The part of a gRPC servicer's context that is used; Ray Serve's has it too."""

    def invocation_metadata(self) -> Iterable[tuple[str, Any]]: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...


class GrpcError(Exception):
    """The call ends with the status that its context has."""


class InferenceService:
    """The three methods over one application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def generate(
        self, request: pb.GenerateRequest, context: CallContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        try:
            path, body = generate_body(request)
        except QuireError as error:
            _fail(context, status_of(error), msgspec.to_builtins(body_of(error).error))
        async with self._post(path, body, context) as call:
            if call.status != 200 or not body["stream"]:
                yield generate_response(await _whole(call, context))
                return
            async for chunk in _chunks(call):
                if "error" in chunk:
                    told = chunk["error"]
                    status = _STATUS_OF_EVENT.get(told["code"] or "") or _STATUS_OF_EVENT.get(told["type"], 500)
                    _fail(context, status, told)
                yield generate_response(chunk)

    async def tokenize(self, request: pb.TokenizeRequest, context: CallContext) -> pb.TokenizeResponse:
        try:
            body = tokenize_body(request)
        except QuireError as error:
            _fail(context, status_of(error), msgspec.to_builtins(body_of(error).error))
        async with self._post("/tokenize", body, context) as call:
            return tokenize_response(await _whole(call, context))

    async def health(self, _request: pb.HealthRequest, context: CallContext) -> pb.HealthResponse:
        async with AsgiCall(self._app, "GET", "/health", (), b"") as call:
            return pb.HealthResponse(status=(await _whole(call, context))["status"])

    def _post(self, path: str, body: dict[str, Any], context: CallContext) -> AsgiCall:
        given = {name: value for name, value in context.invocation_metadata() if name in _PASSED_ON}
        headers = [("content-type", "application/json"), *((name, str(value)) for name, value in given.items())]
        return AsgiCall(self._app, "POST", path, headers, msgspec.json.encode(body))


async def _whole(call: AsgiCall, context: CallContext) -> dict[str, Any]:
    """The body of a response that is no stream. Raises `GrpcError` unless it is an answer."""
    answer = msgspec.json.decode(b"".join([piece async for piece in call.body()]))
    if call.status != 200:
        _fail(context, call.status, answer["error"], call.headers.get("retry-after"))
    return answer  # type: ignore[no-any-return]


async def _chunks(call: AsgiCall) -> AsyncGenerator[dict[str, Any], None]:
    """The objects of server-sent events, which may have an id before them. A piece of the body holds whole events."""
    async for piece in call.body():
        for line in piece.split(b"\n"):
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]":
                yield msgspec.json.decode(data)


def _printable(value: str) -> str:
    """A value as gRPC's metadata can hold it: a field that is not known may have any name."""
    return value.encode("unicode_escape").decode("ascii")


def _fail(context: CallContext, status: int, error: dict[str, Any], retry_after: str | None = None) -> NoReturn:
    context.set_code(_CODES.get(status, grpc.StatusCode.INTERNAL))
    context.set_details(error["message"])
    told = {"param": error["param"], "code": error["code"], "retry-after": retry_after}
    context.set_trailing_metadata([(name, _printable(value)) for name, value in told.items() if value is not None])
    raise GrpcError(error["message"])
