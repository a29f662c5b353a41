"""Whole answers as responses, however long: what takes long is shaped and encoded where no stream waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from .context import json_response
from .heavy_work import LARGE_ANSWER, HeavyWork
from .responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Embeddings,
)

_AT_ONCE = 64  # entries of a list; with 20 logprobs each, or as vectors, they take a millisecond or few
_IN_PIECES = (
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
    body = await heavy_work.in_thread(lambda: b"".join(json_pieces(shape())))
    return Response(body, media_type="application/json")


def json_pieces(value: object) -> Iterator[bytes]:
    """The JSON of an answer, whose choices are taken out of it one by one: to encode or to free a million objects at
    once would keep the interpreter's lock from other threads."""
    if isinstance(value, _IN_PIECES):
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
        if value and isinstance(value[0], _IN_PIECES):
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
