"""The HTTP API as a FastAPI application over a backend."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import quire
from quire.engine.errors import ModelNotFoundError

from ..metrics import CONTENT_TYPE, GatewayMetrics
from . import docs_page, openapi
from .answers import ModelList
from .backend import Backend
from .chat import chat_completions
from .completions import completions
from .context import ApiContext, json_response
from .embeddings import embeddings
from .errors import install_error_handlers
from .health import health_response
from .keys import KeyMiddleware, KeyRing
from .last_resort import LastResortMiddleware
from .limits import ApiLimits
from .readiness import Readiness
from .responses import create_response
from .sse import ClientGoneError
from .tokenization import detokenize_endpoint, tokenize_endpoint

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_OF_ORIGINS: Any = {
    "allow_methods": ["GET", "HEAD", "POST"],
    "allow_headers": ["*"],
    "expose_headers": ["x-request-id", "retry-after", "x-should-retry"],
}
_CLIENT_CLOSED_REQUEST = 499  # nginx's status for logs; nobody receives it


def create_app(
    backend: Backend,
    *,
    metrics: GatewayMetrics | None = None,
    limits: ApiLimits | None = None,
    keys: KeyRing | None = None,
    open_metrics: bool = True,
    allowed_origins: Sequence[str] = (),
    request_ids: bool = True,
) -> FastAPI:
    """The API of one gateway.

    `metrics` is its own, for it to name itself when there are several. With `keys` requests need one; whether /metrics
    does says `open_metrics`. `allowed_origins`: of web pages that may read answers. `request_ids`: answer with
    `x-request-id`; False where the server around the application does so itself (Ray Serve), lest it come twice.
    """
    context = ApiContext(backend, metrics or GatewayMetrics(), limits or ApiLimits())
    app = FastAPI(title="Quire", version=quire.__version__, docs_url=None, redoc_url=None)
    described = openapi.document()
    app.openapi = lambda: described  # type: ignore[method-assign]  # FastAPI documents that it is replaced so
    if keys is not None:
        app.add_middleware(KeyMiddleware, keys=keys, open_metrics=open_metrics)
    app.add_middleware(LastResortMiddleware)
    if allowed_origins:  # a browser asks first, without a key, and reads errors, too
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, **_OF_ORIGINS)
    app.add_middleware(CountMiddleware, metrics=context.metrics)
    if request_ids:
        app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app)
    _add_generation_routes(app, context)
    _add_service_routes(app, context)
    return app


def _add_generation_routes(app: FastAPI, context: ApiContext) -> None:
    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await completions(request, context)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await chat_completions(request, context)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await create_response(request, context)

    @app.post("/v1/embeddings")
    async def create_embeddings(request: Request) -> Response:
        return await embeddings(request, context)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await tokenize_endpoint(request, context)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await detokenize_endpoint(request, context)

    async def client_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGoneError, client_gone)
    app.add_exception_handler(ClientDisconnect, client_gone)


def _add_service_routes(app: FastAPI, context: ApiContext) -> None:
    backend = context.backend

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(ModelList(list(backend.models())))

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        cards = {card.id: card for card in backend.models()}
        if model not in cards:
            raise ModelNotFoundError(model, list(cards))
        return json_response(cards[model])

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        return health_response(backend.health())

    readiness = Readiness(backend)

    @app.get("/ready")
    async def ready() -> Response:
        return json_response(await readiness.check())

    page = docs_page.render(openapi.document())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html")

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": quire.__version__})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(await backend.stats()), media_type=CONTENT_TYPE)


class CountMiddleware:
    """Counts every answer by endpoint and status, also those that no handler has seen."""

    _HANDLERS = frozenset(endpoint.path for endpoint in openapi.ENDPOINTS)

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
                self._metrics.answered(self._handler(scope), method, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

    def _handler(self, scope: Scope) -> str:
        """One of a few names: a series for every path that a stranger tries would fill the memory."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._HANDLERS:
            return str(path)
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


class RequestIdMiddleware:
    """Every response carries `x-request-id`: the client's own, where it is printable and short, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
