"""The one place where errors become HTTP statuses and OpenAI error bodies.

400 a request that cannot work (never 422), 401 no key or an unknown one, 403 a key that is not for this, 404 an unknown
model or path, 405, 408 a deadline that passed or a body that does not come, 413 a body that is too large, 429 a tenant
over its limits and 503 no room or no engine (both with Retry-After), 500 anything that is the service's own fault.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError, ModelNotFoundError, OverloadedError, QuireError, TenantShareError

from .answers import ErrorBody, ErrorDetail

_SHOWN_PATH_CHARS = 200


class BodyTooLargeError(InvalidRequestError):
    """The body has more bytes than the service reads."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is too large: at most {limit_bytes} bytes are allowed.", code="body_too_large")


class BodyTimeoutError(QuireError):
    """The rest of a body does not come."""

    def __init__(self, idle_s: float, whole_s: float) -> None:
        super().__init__(
            f"The body of the request is not complete: nothing more of it came for {idle_s:g} s, or it took more than "
            f"{whole_s:g} s."
        )


class DeadlineError(QuireError):
    """The request's own deadline passed before its answer was complete."""

    def __init__(self) -> None:
        super().__init__("deadline_ms: the time that the request allowed has passed before its answer was complete.")
        self.headers = {"x-should-retry": "false"}  # OpenAI's SDK tries 408 again, and this would only be late again


class AuthenticationError(QuireError):
    """The request comes with no API key that is known here."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.headers = {"www-authenticate": "Bearer"}


class PermissionDeniedError(QuireError):
    """The API key is known, and not for this."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = "permission_denied"


class RateLimitError(QuireError):
    """A tenant has used up what it may for now. `what` is "requests" or "tokens"."""

    def __init__(self, tenant: str, what: str, per_minute: float, retry_after_s: float) -> None:
        super().__init__(
            f"Rate limit reached: {tenant!r} may use {per_minute:g} {what} per minute. Try again in "
            f"{max(1, math.ceil(retry_after_s))} s."
        )
        self.what = what
        self.retry_after_s = retry_after_s


def status_of(error: BaseException) -> int:
    match error:
        case ModelNotFoundError():
            return 404
        case BodyTooLargeError():
            return 413
        case InvalidRequestError():
            return 400
        case AuthenticationError():
            return 401
        case PermissionDeniedError():
            return 403
        case DeadlineError() | BodyTimeoutError():
            return 408
        case RateLimitError() | TenantShareError():
            return 429
        case OverloadedError():
            return 503
        case HTTPException():
            return error.status_code
        case _:
            return 500


def body_of(error: BaseException) -> ErrorBody:
    """What the client is told. Nothing about an error that is not one of ours, except that it happened."""
    match error:
        case InvalidRequestError():
            detail = ErrorDetail(error.message, "invalid_request_error", error.param, error.code)
        case DeadlineError():
            detail = ErrorDetail(error.message, "timeout_error", "deadline_ms", "deadline_exceeded")
        case BodyTimeoutError():
            detail = ErrorDetail(error.message, "timeout_error", None, "body_incomplete")
        case AuthenticationError() | PermissionDeniedError():
            detail = ErrorDetail(error.message, "invalid_request_error", None, error.code)
        case RateLimitError():
            detail = ErrorDetail(error.message, error.what, None, "rate_limit_exceeded")
        case TenantShareError():
            detail = ErrorDetail(error.message, "requests", None, "tenant_over_share")
        case OverloadedError():
            detail = ErrorDetail(error.message, "server_error", None, "overloaded")
        case QuireError():
            detail = ErrorDetail(error.message, "server_error", None, None)
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            detail = ErrorDetail(str(error.detail), kind, None, None)
        case _:
            detail = ErrorDetail("The service failed while it worked on this request.", "server_error", None, None)
    return ErrorBody(detail)


def error_response(error: BaseException) -> Response:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, OverloadedError | RateLimitError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return Response(msgspec.json.encode(body_of(error)), status_of(error), headers, "application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Every known error of a route leaves in OpenAI's shape; `last_resort.py` sees to the unknown ones."""

    async def known(_request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path[:_SHOWN_PATH_CHARS]}"
        detail = f"{HTTPStatus(error.status_code).phrase}: {where} does not exist."
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{HTTPStatus(error.status_code).phrase}: {where}."
        told = HTTPException(error.status_code, detail if error.status_code in (404, 405) else error.detail)
        told.headers = error.headers
        return error_response(told)

    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        param = ".".join(map(str, found["loc"][1:]))
        return error_response(InvalidRequestError(f"{param}: {found['msg']}.", param))

    app.add_exception_handler(QuireError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
