"""Connections between an engine and its worker ranks: the framing and handshake of `transport.py` on blocking sockets.

A step is one message to every rank and one back, in strict turns: a thread that waits in `recv` answers sooner, and
costs less, than an event loop.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from .messages import RankAnswer, rank_answer_decoder
from .transport import (
    HANDSHAKE_BYTES,
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    FrameReader,
    Handshake,
    TransportError,
    frame,
)


class RankLink:
    """One authenticated connection on a blocking socket. Used by one reading and one writing thread at most."""

    def __init__(self, sock: socket.socket, handshake: Handshake, timeout_s: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._reader = FrameReader(HANDSHAKE_BYTES)
        sock.settimeout(timeout_s)
        try:
            self._shake_hands(handshake)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        self._reader.max_bytes = MAX_FRAME_BYTES
        assert handshake.peer is not None
        self.peer = handshake.peer

    def fileno(self) -> int:
        return self._socket.fileno()

    def limit_sends(self, timeout_s: float) -> None:
        """From now on, sending fails when the peer makes no room for `timeout_s`. Receiving goes on waiting."""
        seconds, fraction = divmod(timeout_s, 1.0)
        timeval = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, payload: bytes) -> None:
        self.send_frame(frame(payload))

    def send_frame(self, framed: bytes) -> None:
        """Send bytes made by `frame()`: one serialization for all ranks. Raises `TransportError`."""
        try:
            self._socket.sendall(framed)
        except OSError as error:
            raise TransportError(f"{self.peer}: {error}") from error

    def recv(self) -> bytes:
        """The next frame; waits for it. Raises `TransportError` when the peer is gone."""
        while (payload := self._reader.next()) is None:
            self.read_available()
        return payload

    def poll(self) -> bytes | None:
        """A frame that was already read, without touching the socket."""
        return self._reader.next()

    def read_available(self) -> None:
        """Read once from the socket (waits when there is nothing). Raises `TransportError`."""
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise TransportError(f"{getattr(self, 'peer', 'peer')}: {error or type(error).__name__}") from error
        if not data:
            raise TransportError(f"{getattr(self, 'peer', 'peer')}: the connection was closed")
        self._reader.feed(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in recv
        self._socket.close()

    def _shake_hands(self, handshake: Handshake) -> None:
        outgoing = handshake.first()
        while True:
            if outgoing is not None:
                self._socket.sendall(frame(outgoing))
            if handshake.peer is not None:
                return
            outgoing = handshake.step(self.recv())


def connect_rank(host: str, port: int, secret: bytes, rank: int, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> RankLink:
    """The link of a worker rank to its engine. Raises `TransportError` or `OSError`."""
    sock = socket.create_connection((host, port), timeout_s)
    return RankLink(sock, Handshake(secret, f"rank {rank}", is_server=False), timeout_s)


class RankServer:
    """The engine's side of its ranks: accepts one link per rank, whatever the order in which they come."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]

    def accept(self, world_size: int, timeout_s: float) -> list[RankLink]:
        """Links in rank order. A stranger is turned away. Raises `TransportError` when a rank does not come."""
        links: dict[int, RankLink] = {}
        deadline = time.monotonic() + timeout_s
        names = {f"rank {rank}": rank for rank in range(world_size)}
        while len(links) < world_size:
            missing = [rank for rank in range(world_size) if rank not in links]
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                for link in links.values():
                    link.close()
                raise TransportError(f"Ranks {missing} did not connect within {timeout_s:g} s.")
            self._listener.settimeout(remaining)
            with contextlib.suppress(TransportError, TimeoutError, OSError, UnicodeDecodeError):
                sock, _ = self._listener.accept()
                link = RankLink(sock, Handshake(self._secret, "engine", is_server=True), min(remaining, 5.0))
                if link.peer in names:
                    links[names[link.peer]] = link
                else:
                    link.close()
        return [links[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._listener.close()


def broadcast(links: Sequence[RankLink], payload: bytes) -> None:
    """Send one payload to each of these ranks, framed once."""
    framed = frame(payload)
    for link in links:
        link.send_frame(framed)


def gather(links: Sequence[RankLink], timeout_s: float) -> list[RankAnswer]:
    """The answers to one step, in rank order; or fewer, as soon as one of them is an error.

    Raises `TransportError` as soon as a rank is gone that has not answered, even while another one is still silent (it
    may be waiting in a collective for the dead one), or `TimeoutError` naming the ranks that said nothing for
    `timeout_s`. A rank that is gone and has answered was lost in a later step: the others, in a pipeline, may still
    finish this one, and then it is known which step failed.
    """
    answers: dict[int, RankAnswer] = {}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, link in enumerate(links):
            if not _take_answer(answers, rank, link):
                selector.register(link, selectors.EVENT_READ, rank)
        while len(answers) < len(links) and not any(answer.error for answer in answers.values()):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = [rank for rank in range(len(links)) if rank not in answers]
                raise TimeoutError(f"ranks {silent} did not answer within {timeout_s:g} s")
            for key, _ in ready:
                links[key.data].read_available()
                if _take_answer(answers, key.data, links[key.data]):
                    selector.unregister(links[key.data])
    return [answers[rank] for rank in sorted(answers)]


def _take_answer(answers: dict[int, RankAnswer], rank: int, link: RankLink) -> bool:
    """Take the next answer of a rank if it has been read."""
    payload = link.poll()
    if payload is not None:
        answers[rank] = rank_answer_decoder.decode(payload)
    return payload is not None
