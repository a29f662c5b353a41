"""A dashboard and a service that answer over real HTTP with what a test says, and remember what was sent to them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

APPLICATIONS = "/api/serve/applications/"
LOGS = "/api/v0/logs/file"


@dataclass
class FakeServer:
    """`answers` by path: (status, body), or a list of them of which the last one stays."""

    url: str = ""
    answers: dict[str, Any] = field(default_factory=dict)
    received: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path with query, JSON body
    headers: list[dict[str, str]] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, Any]:
        found = self.answers.get(path, (404, "not here"))
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        return found


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            fake.received.append((self.command, self.path, body))
            fake.headers.append({key.lower(): value for key, value in self.headers.items()})
            path = self.path.partition("?")[0]
            status, answer = fake.answer(f"PUT {path}" if self.command == "PUT" else path)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # s in which it notices its end
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def deployment(name: str, status: str = "HEALTHY", *, running: int = 1, target: int = 1, **fields: Any) -> dict:
    """As Serve tells it. `dead`: actor ids of replicas that have ended."""
    replicas = [
        {"replica_id": f"{name}{i}", "state": "RUNNING", "actor_id": f"a{i}", "start_time_s": 1.0}
        for i in range(running)
    ]
    dead = [
        {"replica_id": f"dead{i}", "state": "STOPPED", "actor_id": actor_id, "start_time_s": 2.0 + i}
        for i, actor_id in enumerate(fields.pop("dead", []))
    ]
    return {
        "name": name,
        "status": status,
        "message": "",
        "target_num_replicas": target,
        "replicas": replicas,
        "recent_dead_replicas": dead,
        **fields,
    }


def details(
    status: str, *deployments: dict, at: float = 10.0, message: str = "", port: int = 8000, proxy: str = "HEALTHY"
) -> dict:
    """Serve's details with one application."""
    application = {
        "name": "quire",
        "status": status,
        "message": message,
        "last_deployed_time_s": at,
        "deployments": {each["name"]: each for each in deployments},
    }
    return {
        "applications": {"quire": application},
        "http_options": {"host": "127.0.0.1", "port": port},
        "proxies": {"node": {"node_ip": "10.0.0.1", "status": proxy}},
        "proxy_location": "HeadOnly",
    }


NOTHING = {"applications": {}}
