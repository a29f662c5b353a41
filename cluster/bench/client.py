"""One streamed request to an OpenAI-compatible server, timed with as little work as possible.

The client often shares its machine with the server: responses are split into events as bytes, and an event is decoded
into the few fields that are looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from quire.engine.errors import QuireError

from ..cli_http import error_message
from . import Endpoint
from .latency import RequestTiming
from .workload import Question

CLOSED_S = 1.0  # within which a request fails that met a closed connection
MAX_REPEATS = 8  # of it: others of the same age may be closed, too


class BenchError(QuireError):
    """The server cannot be benchmarked: the message says why in one line."""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what vLLM calls it

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Also without text, which a token may not have yet. One that only tells who speaks, or why the answer ends,
        has none."""
        only_role = self.delta is not None and self.delta.role is not None
        has_text = bool(self.text or (self.delta and self.delta.has_text))
        return has_text or (self.finish_reason is None and not only_role)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class SseReader:
    """Splits a byte stream into the data of server-sent events: one `data:` line each, perhaps beside an `id:`."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, in order."""
        *events, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        lines = (line for event in events for line in event.split(b"\n"))
        return [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True)
class Target:
    """What is loaded, and how each request looks apart from its prompt."""

    base_url: str  # ends in /v1
    model: str
    endpoint: Endpoint
    temperature: float
    top_p: float
    ignore_eos: bool

    @property
    def url(self) -> str:
        return self.base_url + ("/completions" if self.endpoint == "completions" else "/chat/completions")

    def body(self, question: Question) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.output_len,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "completions":
            body["prompt"] = question.prompt
        else:
            body["messages"] = [{"role": "user", "content": question.prompt}]
        return msgspec.json.encode(body)


_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _Sending:
    """What is known of a request while its answer has not begun."""

    start_s: float
    on_kept_connection: bool = False
    is_answered: bool = False

    def met_closed_connection(self, error: Exception) -> bool:
        """The server had closed, while it was at rest, a connection that it had promised to keep.

        llama.cpp's does so after each stream. A server that has taken the request and then died is not told from that
        by what is seen, but by the time that it had: a connection that was closed before says so at once.
        """
        is_closed = isinstance(error, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError)
        could_connect = not isinstance(error, aiohttp.ClientConnectorError)
        at_once = time.perf_counter() - self.start_s < CLOSED_S
        return is_closed and could_connect and at_once and self.on_kept_connection and not self.is_answered


def connection_traces() -> list[aiohttp.TraceConfig]:
    """What a session needs for `timed_request` to know whether a connection had been used before."""

    async def note(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        if isinstance(context.trace_request_ctx, _Sending):
            context.trace_request_ctx.on_kept_connection = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(note)
    return [trace]


async def timed_request(session: aiohttp.ClientSession, target: Target, question: Question) -> RequestTiming:
    """Send one request and read its stream to the end. A failure is told in the timing's `error`.

    `session` has `connection_traces`. A request that met a closed connection is sent again; the time that this takes
    is part of its own, and the timing tells it.
    """
    start_s, num_repeats = time.perf_counter(), 0
    while True:
        sending = _Sending(time.perf_counter())
        try:
            return replace(await _send(session, target, question, start_s, sending), num_repeats=num_repeats)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            if num_repeats == MAX_REPEATS or not sending.met_closed_connection(error):
                told = f"{type(error).__name__}: {error}"
                return RequestTiming(start_s, time.perf_counter(), error=told, num_repeats=num_repeats)
            num_repeats += 1


async def _send(
    session: aiohttp.ClientSession, target: Target, question: Question, start_s: float, sending: _Sending
) -> RequestTiming:
    async with session.post(target.url, data=target.body(question), trace_request_ctx=sending) as response:
        sending.is_answered = True
        if response.status != 200:
            message = error_message(response.status, await response.read())
            return RequestTiming(start_s, time.perf_counter(), error=message)
        return await _read_stream(response.content, start_s)


async def _read_stream(content: aiohttp.StreamReader, start_s: float) -> RequestTiming:
    reader = SseReader()
    token_times_s: list[float] = []
    usage = _Usage()
    done = False
    async for chunk in content.iter_any():
        now_s = time.perf_counter()
        for data in reader.feed(chunk):
            if data == b"[DONE]":
                done = True
                continue
            event = _decoder.decode(data)
            if event.error is not None:
                return RequestTiming(start_s, now_s, error=f"in the stream: {event.error}")
            if event.usage is not None:
                usage = event.usage
            token_times_s += [now_s for choice in event.choices if choice.has_token]
    return RequestTiming(
        start_s,
        time.perf_counter(),
        tuple(token_times_s),
        usage.prompt_tokens,
        usage.completion_tokens or len(token_times_s),
        usage.cached_tokens,
        error="the stream ended without [DONE]" if not done else None if token_times_s else "no token in the stream",
    )
