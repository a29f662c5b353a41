"""The peers that have a server: what each is called, the option that names its program, and how that is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .servers import QUANTIZE, Server, Setup, llamacpp_server, ray_server, vllm_server


@dataclass(frozen=True, slots=True)
class Peer:
    title: str
    option: str
    help: str
    server: Callable[[Setup], Server]
    beside: tuple[str, ...] = ()  # programs that lie beside it and are needed, too
    is_packed_in_int8: bool = False  # reads the packed file there; others have a part of it in 16 bits


PEERS = {
    "vllm": Peer("vLLM", "--vllm-python", "a Python with vllm (for CPUs) installed", vllm_server),
    "llamacpp": Peer(
        "llama.cpp", "--llama-server", "llama.cpp's server", llamacpp_server, (QUANTIZE,), is_packed_in_int8=True
    ),
    "ray": Peer(
        "Ray Serve LLM", "--ray-python", "a Python with Ray Serve LLM and vllm (for CPUs) installed", ray_server
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, peer in PEERS.items():
        parser.add_argument(peer.option, dest=name, type=Path, metavar="PATH", help=peer.help)


def given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Path]:
    """By peer, of those whose option was given. Ends the program where one is not there: its turn comes late."""
    paths = {name: getattr(args, name) for name in PEERS}
    for name, path in paths.items():
        needed = [] if path is None else [path, *(path.with_name(other) for other in PEERS[name].beside)]
        for each in needed:
            if not os.access(each, os.X_OK):
                parser.error(f"{PEERS[name].option}: {each} is not a program")
    return {name: path.absolute() for name, path in paths.items() if path is not None}
