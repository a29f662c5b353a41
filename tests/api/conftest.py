"""The default model's tokenizer, a fake backend behind the real API, and a real HTTP server for the official SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fake_backend import FakeBackend
from live_server import LiveServer, run_server

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.limits import ApiLimits
from quire.engine.config import ModelConfig
from quire.engine.model_source import load_model_info
from quire.engine.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def served() -> ServedModel:
    info = load_model_info(ModelConfig(max_model_len=1024))
    return ServedModel.create(info, load_tokenizer(info), created=1_700_000_000)


@pytest.fixture
def backend(served: ServedModel) -> FakeBackend:
    return FakeBackend(served)


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the application directly, without a socket."""
    app = create_app(backend, limits=ApiLimits(max_body_bytes=200_000, max_choices=32))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        yield http


@pytest.fixture(scope="module")
def live_server(served: ServedModel) -> Iterator[LiveServer]:
    with run_server(served) as server:
        yield server
