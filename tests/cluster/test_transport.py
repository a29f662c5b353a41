"""Framing, handshake and the ways in which a peer can fail."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import uvloop

from quire.cluster import transport
from quire.cluster.messages import RankAnswer, encoder
from quire.cluster.rank_links import RankServer, broadcast, connect_rank, gather
from quire.cluster.transport import Connection, FrameReader, Handshake, TransportError

SECRET = b"s" * 32
HOST = "127.0.0.1"


class Peer:
    """Collects what a connection delivers."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.opened: asyncio.Queue[Connection] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()

    def on_open(self, connection: Connection) -> None:
        self.opened.put_nowait(connection)

    def on_frame(self, connection: Connection, payload: bytes) -> None:
        self.frames.put_nowait(payload)

    def on_close(self, connection: Connection, reason: str) -> None:
        self.closed.put_nowait(reason)


async def listen(peer: Peer) -> int:
    server = await transport.listen(HOST, SECRET, "server", peer.on_open, peer.on_frame, peer.on_close)
    return server.sockets[0].getsockname()[1]


def test_frames_survive_any_cut() -> None:
    stream = transport.frame(b"one") + transport.frame(b"") + transport.frame(b"three" * 100)
    for size in (1, 2, 5, 7, len(stream)):
        reader, payloads = FrameReader(), []
        for start in range(0, len(stream), size):
            reader.feed(stream[start : start + size])
            while (payload := reader.next()) is not None:
                payloads.append(payload)
        assert payloads == [b"one", b"", b"three" * 100]


def test_an_oversized_frame_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(max_bytes=100)
    reader.feed(struct.pack(">I", 101))
    with pytest.raises(TransportError, match="101 bytes; the limit is 100"):
        reader.next()
    with pytest.raises(TransportError, match="larger than the limit"):
        transport.frame(bytes(transport.MAX_FRAME_BYTES + 1))


def test_the_secret_does_not_travel_and_a_recording_is_useless() -> None:
    def shake(server: Handshake, client: Handshake) -> list[bytes]:
        first = server.first()
        assert first is not None
        answer = client.step(first)
        assert answer is not None
        confirm = server.step(answer)
        assert confirm is not None
        assert client.step(confirm) is None
        return [first, answer, confirm]

    server, client = Handshake(SECRET, "e", is_server=True), Handshake(SECRET, "g", is_server=False)
    recorded = shake(server, client)
    assert (server.peer, client.peer) == ("g", "e")
    assert all(SECRET not in message for message in recorded)
    with pytest.raises(TransportError, match="secret"):
        Handshake(SECRET, "e", is_server=True).step(recorded[1])


async def test_frames_travel_both_ways_in_order() -> None:
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    accepted = await there.opened.get()
    assert (connection.peer, accepted.peer) == ("server", "client")
    for i in range(100):
        connection.send(b"%d" % i)
        accepted.send(b"x" * i + b".")
    assert [await there.frames.get() for _ in range(100)] == [b"%d" % i for i in range(100)]
    assert [await here.frames.get() for _ in range(100)] == [b"x" * i + b"." for i in range(100)]
    connection.close()
    assert await there.closed.get() == "the peer closed the connection"
    assert await here.closed.get() == "closed by this side"
    connection.send(b"dropped")


async def test_any_thread_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the system does not take at once, nothing is overtaken by a later frame, whoever sends that."""
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.001)  # the loop sends as well
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 60.0)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    accepted = await there.opened.get()

    def send_all(sender: int) -> None:
        for i in range(60):
            accepted.send(struct.pack(">II", sender, i) + bytes([sender]) * (i % 3) * 300_000)

    threads = [threading.Thread(target=send_all, args=(sender,)) for sender in range(2)]
    for thread in threads:
        thread.start()
    found: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(120):
        payload = await asyncio.wait_for(here.frames.get(), 10)
        sender, i = struct.unpack_from(">II", payload)
        assert payload[8:] == bytes([sender]) * (i % 3) * 300_000
        found[sender].append(i)
    assert found == {0: list(range(60)), 1: list(range(60))}
    connection.close()


async def test_what_was_sent_before_a_close_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEARTBEAT_S", 60.0)  # one that came in the end would be unread
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 600.0)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    accepted = await there.opened.get()
    connection.send(b"and no heartbeat is under way")  # a close with something unread breaks the connection
    await there.frames.get()
    for size in (8 << 20, 1, 3 << 20):
        accepted.send(bytes(size))
    accepted.close()
    accepted.send(b"dropped")
    assert [len(await asyncio.wait_for(here.frames.get(), 10)) for _ in range(3)] == [8 << 20, 1, 3 << 20]
    assert await asyncio.wait_for(here.closed.get(), 10) == "the peer closed the connection"
    assert here.frames.empty()
    assert not connection.is_open


async def test_whoever_sends_on_a_connection_that_breaks_is_not_to_blame() -> None:
    """Not even before the loop has heard of it."""
    there = Peer()
    port = await listen(there)
    link = await asyncio.to_thread(connect_rank, HOST, port, SECRET, 0)
    accepted = await there.opened.get()
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()  # with a reset
    with ThreadPoolExecutor() as pool:  # the loop waits for it, and hears nothing
        for _ in range(3):
            pool.submit(accepted.send, b"to nobody").result(10)
    assert accepted.is_open
    await asyncio.wait_for(there.closed.get(), 10)
    accepted.send(b"dropped")
    await asyncio.sleep(0)
    assert there.closed.empty()


async def test_what_waited_only_for_the_loop_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport takes all of it at once, and so never asks for a pause."""
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    accepted = await there.opened.get()
    connection.send(b"and no heartbeat is under way")
    await there.frames.get()
    with monkeypatch.context() as patch:
        patch.setattr(transport, "_send_now", lambda _target, _data: 0)
        monkeypatch.setattr(transport, "HIGH_WATER_BYTES", 1000)
        accepted.send(bytes(2000))
    async with asyncio.timeout(5):
        await accepted.drain()  # which looks before the loop has its turn
    accepted.send(b"next")
    assert [len(await asyncio.wait_for(here.frames.get(), 5)) for _ in range(2)] == [2000, 4]
    await asyncio.wait_for(accepted.drain(), 5)


async def test_no_descriptor_is_left_of_a_connection() -> None:
    here, there = Peer(), Peer()
    port = await listen(there)
    before = len(os.listdir("/proc/self/fd"))
    closing, breaking = [
        await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close) for _ in range(2)
    ]
    closing.close()
    assert breaking._transport is not None
    breaking._transport.abort()
    for _ in range(2):
        await asyncio.wait_for(there.closed.get(), 5)
        await asyncio.wait_for(here.closed.get(), 5)
    with pytest.raises(TransportError):
        await transport.connect(HOST, port, b"w" * 32, "client", here.on_frame, here.on_close)
    async with asyncio.timeout(5):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "test",
    [
        test_frames_travel_both_ways_in_order,
        test_any_thread_may_send,
        test_what_was_sent_before_a_close_arrives,
        test_whoever_sends_on_a_connection_that_breaks_is_not_to_blame,
        test_what_waited_only_for_the_loop_is_drained,
        test_no_descriptor_is_left_of_a_connection,
    ],
)
def test_the_loop_may_be_uvloop(
    test: Callable[..., Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve runs replicas on it, and its transports are not those of asyncio."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test(*(monkeypatch for name in inspect.signature(test).parameters if name == "monkeypatch")))


async def test_a_wrong_secret_is_turned_away() -> None:
    here, there = Peer(), Peer()
    port = await listen(there)
    with pytest.raises(TransportError):
        await transport.connect(HOST, port, b"w" * 32, "client", here.on_frame, here.on_close)
    assert there.opened.empty()
    assert there.closed.empty()
    assert here.closed.empty()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1 << 31), transport.frame(b"\x00" * 10)]
)
async def test_garbage_is_cut_off_before_it_can_cost_anything(garbage: bytes) -> None:
    there = Peer()
    reader, writer = await asyncio.open_connection(HOST, await listen(there))
    writer.write(garbage)
    received = await asyncio.wait_for(reader.read(), 5)  # until the server hangs up
    assert received.startswith(struct.pack(">I", 38) + b"QUIRE1")
    assert len(received) == 42
    assert there.opened.empty()


async def test_a_silent_peer_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 0.2)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    assert connection._timer is not None
    connection._timer.cancel()  # it stops to give signs of life, as a stopped process does
    assert "nothing was heard" in await asyncio.wait_for(there.closed.get(), 5)
    await asyncio.wait_for(here.closed.get(), 5)


async def test_heartbeats_keep_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 0.2)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(there.closed.get(), 0.6)
    assert connection.is_open


async def test_a_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 0.2)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    assert connection._transport is not None
    connection._transport.pause_reading()
    connection._beats_unheard = -1_000_000  # it goes on giving signs of life
    accepted = await there.opened.get()
    for _ in range(20):
        accepted.send(bytes(1 << 20))
    assert "does not read" in await asyncio.wait_for(there.closed.get(), 5)


async def test_a_peer_that_reads_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much waits for it, and a loop that stood still blames nobody."""
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(transport, "DEAD_AFTER_S", 0.2)
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    accepted = await there.opened.get()
    for _ in range(6):
        accepted.send(bytes(30 << 20))
    drained = asyncio.create_task(accepted.drain())
    await asyncio.sleep(0)
    assert not drained.done()
    time.sleep(0.5)  # the loop does stand still
    assert [len(await asyncio.wait_for(here.frames.get(), 10)) for _ in range(6)] == [30 << 20] * 6
    await asyncio.wait_for(drained, 5)
    assert connection.is_open
    assert accepted.is_open


async def test_whoever_waits_to_send_hears_of_a_lost_connection() -> None:
    here, there = Peer(), Peer()
    port = await listen(there)
    connection = await transport.connect(HOST, port, SECRET, "client", here.on_frame, here.on_close)
    assert connection._transport is not None
    connection._transport.pause_reading()
    accepted = await there.opened.get()
    accepted.send(bytes(30 << 20))
    drained = asyncio.create_task(accepted.drain())
    await asyncio.sleep(0)
    assert not drained.done()
    connection._transport.abort()
    await asyncio.wait_for(drained, 5)


def connect_all(world_size: int) -> tuple[list, list]:
    with closing(RankServer(HOST, SECRET)) as server, ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(connect_rank, HOST, server.port, SECRET, rank) for rank in reversed(range(world_size))]
        links = server.accept(world_size, 5.0)
        return links, [future.result() for future in reversed(ranks)]


def answer(step_id: int, error: str | None = None) -> bytes:
    return encoder.encode(RankAnswer(step_id, error=error))


def step_ids(answers: list[RankAnswer]) -> list[int]:
    return [each.step_id for each in answers]


def test_ranks_are_in_order_and_gathered_in_order() -> None:
    links, ranks = connect_all(3)
    broadcast(links, b"step" * 100_000)
    assert [rank.recv() for rank in ranks] == [b"step" * 100_000] * 3
    for rank in (2, 0, 1):
        ranks[rank].send(answer(rank))
    assert step_ids(gather(links, 5.0)) == [0, 1, 2]
    ranks[1].send(answer(11))  # early
    ranks[1].send(answer(21))  # earlier than asked
    ranks[0].send(answer(10))
    ranks[2].send(answer(12))
    assert step_ids(gather(links, 5.0)) == [10, 11, 12]
    ranks[0].send(answer(20))
    ranks[2].send(answer(22))
    assert step_ids(gather(links, 5.0)) == [20, 21, 22]


def test_a_rank_that_is_lost_after_its_answer_is_lost_in_the_next_step() -> None:
    """In a pipeline the others still finish the step that it had done."""
    links, ranks = connect_all(2)
    ranks[0].send(answer(0))
    ranks[0].close()
    timer = threading.Timer(0.1, ranks[1].send, [answer(1)])
    timer.start()
    assert step_ids(gather(links, 5.0)) == [0, 1]
    with pytest.raises(TransportError, match="rank 0: the connection was closed"):
        gather(links, 5.0)


def test_an_error_is_not_kept_waiting_for_silent_ranks() -> None:
    links, ranks = connect_all(2)
    ranks[1].send(answer(7, "it broke"))
    ranks[1].close()
    assert [each.error for each in gather(links, 5.0)] == ["it broke"]


def test_a_dead_rank_is_noticed_while_another_one_is_silent() -> None:
    links, ranks = connect_all(2)
    timer = threading.Timer(0.05, ranks[1].close)
    timer.start()
    with pytest.raises(TransportError, match="rank 1: the connection was closed"):
        gather(links, 5.0)


def test_silent_ranks_are_named() -> None:
    links, ranks = connect_all(3)
    ranks[1].send(answer(1))
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] did not answer within 0.05 s"):
        gather(links, 0.05)


def test_a_rank_that_does_not_read_ends_a_send() -> None:
    """And only a send: a rank that reads may take as long as it likes."""
    links, ranks = connect_all(1)
    links[0].limit_sends(0.2)
    timer = threading.Timer(0.5, ranks[0].send, [b"late"])
    timer.start()
    assert links[0].recv() == b"late"
    with pytest.raises(TransportError, match="rank 0"):
        links[0].send(bytes(60 << 20))


def test_missing_ranks_are_named_and_strangers_are_turned_away() -> None:
    with closing(RankServer(HOST, SECRET)) as server, ThreadPoolExecutor() as pool:
        accepted = pool.submit(server.accept, 2, 1.0)
        connect_rank(HOST, server.port, SECRET, 0)
        with socket.create_connection((HOST, server.port)) as stranger:
            stranger.sendall(b"hello")
        with pytest.raises(TransportError):
            connect_rank(HOST, server.port, b"w" * 32, 1)
        with pytest.raises(TransportError, match=r"Ranks \[1\] did not connect within 1 s"):
            accepted.result()
