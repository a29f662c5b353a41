"""The API on a fake backend behind a real HTTP server, for clients that need a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fake_backend import FakeBackend

from quire.cluster.api.app import create_app
from quire.cluster.api.backend import ServedModel


@dataclass
class LiveServer:
    """uvicorn on a free port of the loopback, in a thread; `backend` lives on its loop."""

    url: str
    backend: FakeBackend
    loop: asyncio.AbstractEventLoop

    def wait_for(self, event: Callable[[FakeBackend], asyncio.Event]) -> None:
        """Block until an event of the backend is set."""

        async def wait() -> None:
            await asyncio.wait_for(event(self.backend).wait(), 10)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result(15)

    def call(self, function: Callable[[], Any]) -> None:
        """Run something on the server's loop, and wait for it."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(15)


@contextmanager
def run_server(served: ServedModel) -> Iterator[LiveServer]:
    started = threading.Event()
    live: list[LiveServer] = []
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        backend = FakeBackend(served)
        server = uvicorn.Server(uvicorn.Config(create_app(backend), port=0, log_level="warning", lifespan="off"))
        servers.append(server)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        live.append(LiveServer(f"http://127.0.0.1:{port}", backend, asyncio.get_running_loop()))
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(15)
    try:
        yield live[0]
    finally:
        servers[0].should_exit = True
        thread.join(15)
