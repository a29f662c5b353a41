"""The peers that have a server: what each is called, and the option that names the program that starts it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    title: str
    option: str
    help: str


PEERS = {
    "vllm": Peer("vLLM", "--vllm-python", "a Python with vllm (for CPUs) installed"),
    "llamacpp": Peer("llama.cpp", "--llama-server", "llama.cpp's server; its llama-quantize lies beside it"),
    "ray": Peer("Ray Serve LLM", "--ray-python", "a Python with Ray Serve LLM and vllm (for CPUs) installed"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, peer in PEERS.items():
        parser.add_argument(peer.option, dest=name, type=Path, metavar="PATH", help=peer.help)


def given(args: argparse.Namespace) -> dict[str, Path]:
    """By peer, of those whose option was given."""
    paths = {name: getattr(args, name) for name in PEERS}
    return {name: path for name, path in paths.items() if path is not None}
