"""Chat templates of strangers, rendered in a process that has little memory and little time.

A template is a program. Jinja's sandbox keeps it from the interpreter, but not from loops that never end or strings
that fill the machine; the limits of a process do. It is started for the first template that comes with a request, and
again after one that overstepped.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from typing import IO

import msgspec

from quire.engine.errors import InvalidRequestError, OverloadedError

from .chat_template import Conversation, render_chat

TIME_LIMIT_S = 2.0
START_LIMIT_S = 20.0
MEMORY_LIMIT_BYTES = 512 << 20
MAX_SOURCE_CHARS = 128 << 10
MAX_WAITING = 16
_LENGTH_BYTES = 4


class _Order(msgspec.Struct):
    source: str
    chat: Conversation
    max_chars: int


class _Result(msgspec.Struct):
    """A text, or why there is none."""

    text: str | None = None
    message: str = ""
    param: str | None = None
    code: str | None = None


class TemplateSandbox:
    """Renders one template at a time; few may wait for it."""

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._turn = asyncio.Semaphore(1)  # so that those who wait hold no thread
        self._num_waiting = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def render(self, source: str, chat: Conversation, max_chars: int) -> str:
        """The prompt's text. Raises `InvalidRequestError`, and `OverloadedError` when too many wait.

        Cancelled while it waits it is never rendered.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(
                f"chat_template: {len(source)} characters given, at most {MAX_SOURCE_CHARS} are allowed.",
                "chat_template",
            )
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                f"chat_template: {MAX_WAITING} templates of other requests wait to be rendered.", self._time_limit_s
            )
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
        # Shielded: a thread cannot be cancelled, and the next one must not speak to the process meanwhile.
        rendering = asyncio.ensure_future(asyncio.to_thread(self._render, _Order(source, chat, max_chars)))
        rendering.add_done_callback(self._next_turn)
        return await asyncio.shield(rendering)

    def _next_turn(self, rendering: asyncio.Future[str]) -> None:
        self._turn.release()
        if not rendering.cancelled():
            rendering.exception()  # somebody has seen it, also where nobody waits any more

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _render(self, order: _Order) -> str:
        try:
            data = msgspec.msgpack.encode(order)
        except OverflowError as error:
            raise InvalidRequestError(f"messages: hold a number that is too large ({error}).", "messages") from error
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._time_limit_s, process.kill)
        timer.start()
        try:
            _write(process.stdin, data)
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            self.close()
            raise InvalidRequestError(
                f"chat_template: cannot be rendered within {self._time_limit_s:g} seconds and "
                f"{MEMORY_LIMIT_BYTES >> 20} MiB.",
                "chat_template",
            )
        result = msgspec.msgpack.decode(answer, type=_Result)
        if result.text is None:
            raise InvalidRequestError(result.message, result.param, result.code)
        return result.text

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            timer = threading.Timer(START_LIMIT_S, self._process.kill)
            timer.start()
            assert self._process.stdout is not None
            _read(self._process.stdout)  # it is there
            timer.cancel()
        return self._process


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next message; None when the other side has ended."""
    head = pipe.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    data = pipe.read(length)
    return data if len(data) == length else None


def main() -> None:
    """The process: an order in, a result out, until nobody is there any more."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    decode = msgspec.msgpack.Decoder(_Order).decode
    with contextlib.suppress(BrokenPipeError):
        _write(sys.stdout.buffer, b"")
        while (data := _read(sys.stdin.buffer)) is not None:
            order = decode(data)
            try:
                result = _Result(render_chat(order.source, order.chat, order.max_chars))
            except InvalidRequestError as error:
                result = _Result(None, error.message, error.param, error.code)
            _write(sys.stdout.buffer, msgspec.msgpack.encode(result))


if __name__ == "__main__":
    main()
