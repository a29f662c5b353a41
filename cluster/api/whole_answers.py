"""Whole answers as responses, however long: what takes long is shaped and encoded where no stream waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Embeddings,
)
from .context import json_response
from .heavy_work import LARGE_ANSWER, HeavyWork

_AT_ONCE = 64  # entries of a list; with 20 logprobs each, or as vectors, they take a millisecond or few
_SENT_AT_ONCE = 256 << 10  # bytes
_LARGE = (
    ChatCompletion,
    ChatChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Embeddings,
)


async def whole_response(heavy_work: HeavyWork, size: int, shape: Callable[[], msgspec.Struct]) -> Response:
    """The answer that `shape` returns. `size` is about how many tokens, logprobs and numbers it has."""
    if size < LARGE_ANSWER:
        return json_response(shape())
    return _InPieces(await heavy_work.shape(size, lambda: list(_grouped(json_pieces(shape())))))


class _InPieces(Response):
    """Sent piece by piece, each when the one before is gone: servers copy what a socket does not take at once."""

    def __init__(self, pieces: list[bytes]) -> None:
        length = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(length)}, media_type="application/json")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        with suppress(OSError):  # a client that has left: some servers tell so only when one sends
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _grouped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    group = bytearray()
    for piece in pieces:
        group += piece
        if len(group) >= _SENT_AT_ONCE:
            yield bytes(group)
            group.clear()
    yield bytes(group)


def json_pieces(value: object) -> Iterator[bytes]:
    """The JSON of an answer, whose choices are taken out of it one by one: to encode or to free a million objects at
    once would keep the interpreter's lock from other threads."""
    if isinstance(value, _LARGE):
        before = "{"
        for name in value.__struct_fields__:
            part = getattr(value, name)
            if part is not UNSET:
                yield f'{before}"{name}":'.encode()
                yield from json_pieces(part)
                before = ","
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        if value and isinstance(value[0], _LARGE):
            yield from json_pieces(value.pop(0))
            while value:
                yield b","
                yield from json_pieces(value.pop(0))
        else:
            for start in range(0, len(value), _AT_ONCE):
                yield b"," if start else b""
                yield msgspec.json.encode(value[start : start + _AT_ONCE])[1:-1]
        yield b"]"
    else:
        yield msgspec.json.encode(value)
