"""Framing between processes of one cluster: the only module that owns bytes on a socket.

A frame is a 4-byte big-endian length and that many payload bytes; length 0 is a heartbeat. Payloads are msgpack
records that the caller encodes and decodes by type (`messages.py`): nothing from a socket is ever unpickled.

Before the first frame both sides prove that they hold the same secret, which itself never travels:

    server -> client    b"QUIRE1" + server_nonce
    client -> server    client_nonce + HMAC(secret, "client" + both nonces + identity) + identity
    server -> client    HMAC(secret, "server" + both nonces + identity) + identity

Each is one frame of at most `HANDSHAKE_BYTES`, so that a stranger cannot make us allocate anything. `Connection` is
the asyncio form, between gateways and engines; `rank_links.py` has the blocking one, between an engine and its ranks.

What is sent goes into the socket at once, from whatever thread sends it: an engine's step loop need not wait until an
event loop has woken up. Only what the system does not take then, the event loop writes when it does:

    any thread   send --> nothing waits and the socket has room ---------> the system
                      --> the outbox
    event loop                          the transport writes it in time -> the system
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import cast

from quire.engine.errors import QuireError

MAX_FRAME_BYTES = 64 << 20
HIGH_WATER_BYTES = 1 << 20  # unsent bytes from which on `drain` waits
HANDSHAKE_BYTES = 512
HANDSHAKE_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
DEAD_AFTER_S = 10.0

_MAGIC = b"QUIRE1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct(">I")


class TransportError(QuireError):
    """A connection that cannot go on: refused, closed, silent, or not speaking our protocol."""


def new_secret() -> bytes:
    """A fresh shared secret for one application."""
    return secrets.token_bytes(32)


def frame(payload: bytes) -> bytes:
    """The payload as it travels. Raises `TransportError` when it is larger than any peer accepts."""
    if len(payload) > MAX_FRAME_BYTES:
        raise TransportError(f"A frame of {len(payload)} bytes is larger than the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into payloads. `max_bytes` may be raised once the peer is trusted."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole payload (empty for a heartbeat), or None. Raises `TransportError` on an oversized one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise TransportError(f"The peer announced a frame of {length} bytes; the limit is {self.max_bytes}.")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return payload


class Handshake:
    """One side of the handshake as a pure state machine: frames in, frames out."""

    def __init__(self, secret: bytes, identity: str, *, is_server: bool) -> None:
        self._secret = secret
        self._identity = identity.encode()
        self._is_server = is_server
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._both_nonces = b""
        self.peer: str | None = None  # the peer's identity, once it is proven

    def first(self) -> bytes | None:
        """What to send before anything is received."""
        return _MAGIC + self._nonce if self._is_server else None

    def step(self, payload: bytes) -> bytes | None:
        """Consume one frame of the peer, return the answer if there is one. Raises `TransportError`."""
        if self._is_server:
            return self._server_step(payload)
        return self._client_step(payload)

    def _server_step(self, payload: bytes) -> bytes:
        peer_nonce, proof = payload[:_NONCE_BYTES], payload[_NONCE_BYTES:]
        self._both_nonces = self._nonce + peer_nonce
        self.peer = self._verify(b"client", proof)
        return self._prove(b"server")

    def _client_step(self, payload: bytes) -> bytes | None:
        if not self._both_nonces:
            if len(payload) != len(_MAGIC) + _NONCE_BYTES or not payload.startswith(_MAGIC):
                raise TransportError("The peer does not speak Quire's protocol.")
            self._both_nonces = payload[len(_MAGIC) :] + self._nonce
            return self._nonce + self._prove(b"client")
        self.peer = self._verify(b"server", payload)
        return None

    def _mac(self, role: bytes, identity: bytes) -> bytes:
        return hmac.new(self._secret, role + self._both_nonces + identity, hashlib.sha256).digest()

    def _prove(self, role: bytes) -> bytes:
        return self._mac(role, self._identity) + self._identity

    def _verify(self, role: bytes, proof: bytes) -> str:
        mac, identity = proof[:_MAC_BYTES], proof[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(role, identity)):
            raise TransportError("The peer does not hold this cluster's secret.")
        return identity.decode()


class Connection(asyncio.Protocol):
    """One authenticated connection on an event loop. `send` may be called from any thread, all else on that loop.

    `on_frame(connection, payload)` is called per frame, in order; `on_close(connection, reason)` exactly once, and
    only for a connection whose handshake succeeded. Each side beats every `HEARTBEAT_S`; a peer of which nothing was
    heard, or which has read nothing of what waits for it, during `DEAD_AFTER_S` counts as dead. That is counted in
    beats and not by a clock: a loop that was busy with something else has not beaten, and blames nobody for that.
    """

    def __init__(
        self,
        handshake: Handshake,
        on_open: Callable[[Connection], None],
        on_frame: Callable[[Connection, bytes], None],
        on_close: Callable[[Connection, str], None],
    ) -> None:
        self._handshake = handshake
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_close = on_close
        self._reader = FrameReader(HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sending = threading.Lock()
        # While frames are wanted. With a descriptor of its own: the transport closes its one whenever it likes, and the
        # number may be another file's when a thread sends.
        self._socket: socket.socket | None = None
        self._all_taken = True  # by the system, of what was sent; else it is sent by the loop
        self._outbox: list[bytes] = []  # what the loop has not given to the transport yet
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self._num_written = 0  # bytes
        self._num_taken = 0  # of them, those that the system had taken at the last beat
        self._beats_unheard = 0
        self._beats_unread = 0
        self._reason = "the peer closed the connection"
        self.is_open = False

    @property
    def peer(self) -> str:
        """The proven identity of the other side."""
        return self._handshake.peer or "?"

    def send(self, payload: bytes) -> None:
        """Send one frame behind those before it, without waiting for anybody.

        Frames sent after the connection was lost or closed are dropped: `on_close` tells of it.
        """
        data = frame(payload)
        with self._sending:
            if self._socket is None:
                return
            self._num_written += len(data)
            if self._all_taken:
                data = data[_send_now(self._socket, data) :]
                if not data:
                    return
                self._all_taken = False
                self._loop.call_soon_threadsafe(self._empty_outbox)
            self._outbox.append(data)

    @property
    def is_congested(self) -> bool:
        """More is queued here than `drain` lets pass: the peer reads slowly."""
        return self._num_waiting() > HIGH_WATER_BYTES

    async def drain(self) -> None:
        """Wait until little of what was sent is still queued here, or the connection is lost."""
        if self._socket is not None and self.is_congested:
            self._is_drained.clear()
        await self._is_drained.wait()

    def close(self) -> None:
        """Flush what is queued and close."""
        self._reason = "closed by this side"
        self._stop_sending()
        if self._transport is not None:
            self._empty_outbox()
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._transport.set_write_buffer_limits(0)  # to hear of all that the system does not take
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._fail, "no handshake in time")
        first = self._handshake.first()
        if first is not None:
            self._transport.write(frame(first))

    def data_received(self, data: bytes) -> None:
        self._beats_unheard = 0
        self._reader.feed(data)
        try:
            while (payload := self._reader.next()) is not None:
                if not self.is_open:
                    self._shake_hands(payload)
                elif payload:
                    self._on_frame(self, payload)
        except (QuireError, UnicodeDecodeError) as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._stop_sending()
        self._outbox.clear()
        self._is_drained.set()
        if self.is_open:
            self.is_open = False
            self._on_close(self, str(exc) if exc else self._reason)

    def pause_writing(self) -> None:
        # Only amid a write of the transport: `_sending` is held, or nobody sends yet.
        self._all_taken = False

    def resume_writing(self) -> None:
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        """Give the transport what waits for it. It has nothing left to write, or nobody sends any more."""
        assert self._transport is not None
        with self._sending:
            self._all_taken = True  # as long as it does not ask for a pause
            for data in self._outbox:
                self._transport.write(data)
            self._outbox.clear()
        if not self.is_congested:
            self._is_drained.set()

    def _stop_sending(self) -> None:
        with self._sending:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _num_waiting(self) -> int:
        """Bytes that were sent and that the system has not taken."""
        with self._sending:
            return self._num_unwritten()

    def _num_unwritten(self) -> int:
        assert self._transport is not None
        return self._transport.get_write_buffer_size() + sum(map(len, self._outbox))

    def _shake_hands(self, payload: bytes) -> None:
        assert self._transport is not None
        answer = self._handshake.step(payload)
        if answer is not None:
            self._transport.write(frame(answer))
        if self._handshake.peer is not None:
            self._reader.max_bytes = MAX_FRAME_BYTES
            self._socket = socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno()))
            self._socket.setblocking(False)
            self.is_open = True
            assert self._timer is not None
            self._timer.cancel()
            self._beat()
            self._on_open(self)

    def _beat(self) -> None:
        assert self._transport is not None
        with self._sending:
            num_waiting = self._num_unwritten()
            num_taken = self._num_written - num_waiting
        self._beats_unheard += 1
        self._beats_unread = self._beats_unread + 1 if num_waiting and num_taken == self._num_taken else 0
        self._num_taken = num_taken
        max_beats = DEAD_AFTER_S / HEARTBEAT_S
        if self._beats_unheard > max_beats:
            self._fail(f"nothing was heard for {DEAD_AFTER_S:g} s")
            return
        if self._beats_unread > max_beats:
            self._fail(f"the peer does not read: {num_waiting} bytes have been waiting for {DEAD_AFTER_S:g} s")
            return
        self.send(b"")
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def _fail(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()


def _send_now(target: socket.socket, data: bytes) -> int:
    """How many bytes the system takes. An error is the transport's to find: whoever sends has not lost the peer."""
    try:
        return target.send(data)
    except OSError:
        return 0


async def listen(
    host: str,
    secret: bytes,
    identity: str,
    on_open: Callable[[Connection], None],
    on_frame: Callable[[Connection, bytes], None],
    on_close: Callable[[Connection, str], None],
) -> asyncio.Server:
    """Accept connections on `host` and a free port (`server.sockets[0].getsockname()[1]`)."""

    def accept() -> Connection:
        return Connection(Handshake(secret, identity, is_server=True), on_open, on_frame, on_close)

    return await asyncio.get_running_loop().create_server(accept, host, 0)


async def connect(
    host: str,
    port: int,
    secret: bytes,
    identity: str,
    on_frame: Callable[[Connection, bytes], None],
    on_close: Callable[[Connection, str], None],
) -> Connection:
    """An open, authenticated connection. Raises `TransportError` (bad secret, silence) or `OSError` (refused)."""
    opened = asyncio.get_running_loop().create_future()

    class Opening(Connection):
        """Tells the waiting `connect` when the connection is lost before it is open."""

        def connection_lost(self, exc: Exception | None) -> None:
            if not opened.done():
                opened.set_exception(TransportError(f"{host}:{port}: {exc or self._reason}"))
            super().connection_lost(exc)

    def on_open(_: Connection) -> None:
        if not opened.done():
            opened.set_result(None)

    handshake = Handshake(secret, identity, is_server=False)
    connection: Connection | None = None
    try:
        async with asyncio.timeout(2 * HANDSHAKE_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Opening(handshake, on_open, on_frame, on_close), host, port
            )
            await opened
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection
