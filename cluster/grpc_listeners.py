"""Serve's gRPC servers, off the interfaces on which nobody asked for them.

Every replica has one for calls between deployments, which unpickles what it is sent and asks nobody who they are:
whoever can connect to it can run code. Serve binds it, like those that carry gRPC from outside, to all interfaces, and
has no setting for that. Here they bind to the node's address, by which Serve's own processes call them.

What is replaced is private, gRPC's `add_insecure_port` and `add_secure_port`: through these go all of Serve's servers,
wherever in its own private modules they are made.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from grpc.aio import _server
from ray.util import get_node_ip_address

from .ray_local import GRPC_HOST

_EVERYWHERE = "[::]:"


def keep_off_the_network() -> None:
    """No gRPC server that this process starts from now on listens on all interfaces because Serve says `[::]`."""
    for name in ("add_insecure_port", "add_secure_port"):
        add_port = getattr(_server.Server, name)
        if not hasattr(add_port, "__wrapped__"):
            setattr(_server.Server, name, _narrowed(add_port))


def _narrowed(add_port: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(add_port)
    def add_narrow_port(server: Any, address: str, *credentials: Any) -> int:
        if address.startswith(_EVERYWHERE):
            address = _here(int(address.removeprefix(_EVERYWHERE)))
        return add_port(server, address, *credentials)

    return add_narrow_port


def _here(port: int) -> str:
    """Port 0 is Serve's choice for calls between deployments, which are never for anybody outside."""
    host = (port and os.environ.get(GRPC_HOST)) or get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
