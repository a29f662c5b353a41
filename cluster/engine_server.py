"""The engine's side of its gateways: takes requests in, sends the outputs of every step back. Knows no Ray.

The step loop lives in a thread of its own. Before it goes on it sends one message to each gateway that has a stream
among the outputs of a step, or several where one frame cannot hold them: where the CPU computes the steps, a gateway
does its work meanwhile, and not when all cores compute. So who owns a request is known to two threads, under a lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from quire.engine.cache_history import KVEvent
from quire.engine.config import ParallelConfig
from quire.engine.core import EngineCore
from quire.engine.errors import EngineEndedError, QuireError
from quire.engine.loop import EngineLoop
from quire.engine.outputs import EngineOutput

from . import transport
from .cache_publisher import CachePublisher
from .messages import (
    Abort,
    Add,
    EngineMessage,
    FollowCache,
    Inject,
    Leaving,
    LoadReport,
    Recall,
    Recalled,
    Refused,
    StepOutputs,
    encoder,
    gateway_message_decoder,
)
from .output_frames import pack_outputs
from .resume_journal import ResumeJournal

logger = logging.getLogger(__name__)

LEAVE_POLL_S = 0.02
REPORT_S = 0.2  # how often a gateway hears how busy the engine is, while that changes


class EngineServer:
    """Serves one engine core to any number of gateways. Methods are called on the event loop that ran `start`.

    A gateway whose connection ends has its requests aborted: it will resubmit what is still wanted, and if it does not
    come back, another may do so for its clients (`ResumeJournal`). `failed` is completed with the exception if the core
    itself fails. `on_fault` does what `Inject` asks for, in a thread; without it, nothing does.
    """

    def __init__(
        self,
        core: EngineCore,
        engine_id: str,
        secret: bytes,
        limits: ParallelConfig,
        on_fault: Callable[[Inject], None] | None = None,
    ) -> None:
        self._core = core
        self._engine_id = engine_id
        self._secret = secret
        self._limits = limits
        self._on_fault = on_fault
        self._event_loop = asyncio.get_running_loop()
        self._cache = CachePublisher(core)
        self._journal = ResumeJournal()
        self._engine = EngineLoop(core, self._on_outputs, self._on_failure, self._on_kv_events)
        self._lock = threading.Lock()  # for owners and journal
        self._owners: dict[str, transport.Connection] = {}  # request id -> the gateway that gets its outputs
        self._gateways: set[transport.Connection] = set()
        self._is_leaving = False
        self._server: asyncio.Server | None = None
        self._reporter: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[BaseException] = self._event_loop.create_future()

    async def start(self, host: str) -> int:
        """Start the step loop and listen on `host`; returns the port."""
        self._server = await transport.listen(
            host, self._secret, self._engine_id, self._on_open, self._on_frame, self._on_close
        )
        self._engine.start()
        self._reporter = asyncio.create_task(self._report())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def leave(self, grace_s: float) -> None:
        """Let gateways move what runs here to other engines. Returns when nothing is left, or after `grace_s`.

        Where there is no other engine, work goes on here: perhaps another one comes in time.
        """
        self._is_leaving = True
        for gateway in self._gateways:
            self._send(gateway, Leaving())
        deadline = self._event_loop.time() + grace_s
        while (num_left := self._num_owned()) and self._event_loop.time() < deadline:
            await asyncio.sleep(LEAVE_POLL_S)
        if num_left:
            logger.warning("%d requests are left behind after %g s.", num_left, grace_s)

    async def close(self) -> None:
        """Leave all gateways and shut the engine down."""
        if self._reporter is not None:
            self._reporter.cancel()
        if self._server is not None:
            self._server.close()
        for gateway in list(self._gateways):
            gateway.close()
        await asyncio.to_thread(self._engine.stop)

    def load(self) -> LoadReport:
        """The engine's numbers as of its last step, and why it makes no progress if that is so."""
        return LoadReport(self._engine.stats(), self.problem(), len(self._gateways))

    def _num_owned(self) -> int:
        """Requests whose last output has not been sent."""
        with self._lock:
            return len(self._owners)

    def problem(self) -> str | None:
        """Forward progress is health: None as long as the step under way is younger than the step timeout.

        A step that fails goes on with rebuilding the ranks, which may take as long as their start.
        """
        if not self._engine.is_alive:
            return "the engine's step loop has ended"
        seconds = self._engine.seconds_in_step()
        allowed = self._limits.step_timeout_s
        if self._core.is_recovering:
            allowed += self._limits.startup_timeout_s
        if seconds > allowed:
            return f"the step under way has taken {seconds:.1f} s, more than {allowed:g} s"
        return None

    # From gateways

    def _on_open(self, gateway: transport.Connection) -> None:
        logger.info("Gateway %s connected.", gateway.peer)
        self._gateways.add(gateway)
        self._send(gateway, self.load())
        if self._is_leaving:
            self._send(gateway, Leaving())

    def _on_frame(self, gateway: transport.Connection, payload: bytes) -> None:
        try:
            message = gateway_message_decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise transport.TransportError(f"not a message of a gateway: {error}") from error
        if isinstance(message, Add):
            self._add(gateway, message)
        elif isinstance(message, Abort):
            self._on_abort(gateway, message)
        elif isinstance(message, FollowCache):
            self._cache.follow(gateway)
        elif isinstance(message, Recall):
            self._recall(gateway, message.key)
        elif self._on_fault is None:
            logger.error("Gateway %s asks for a fault, which the configuration does not allow.", gateway.peer)
        else:
            self._event_loop.run_in_executor(None, self._try_fault, self._on_fault, message)

    def _on_abort(self, gateway: transport.Connection, message: Abort) -> None:
        with self._lock:
            its_own = [i for i in message.request_ids if self._owners.get(i) is gateway]
            if message.report:
                self._engine.abort(its_own)  # they keep their owner until it has the last output
            else:
                self._abort(its_own)

    @staticmethod
    def _try_fault(on_fault: Callable[[Inject], None], message: Inject) -> None:
        try:
            on_fault(message)
        except Exception:
            logger.exception("The fault %s failed.", message)

    def _on_close(self, gateway: transport.Connection, reason: str) -> None:
        self._gateways.discard(gateway)
        self._cache.unfollow(gateway)
        with self._lock:
            lost = [request_id for request_id, owner in self._owners.items() if owner is gateway]
            self._abort(lost)
        logger.info("Gateway %s left (%s); %d requests are aborted.", gateway.peer, reason, len(lost))

    def _add(self, gateway: transport.Connection, message: Add) -> None:
        request = message.request
        with self._lock:
            if request.request_id in self._owners:
                # Its gateway came back before we noticed that it had gone.
                self._abort([request.request_id])
            self._owners[request.request_id] = gateway
            self._journal.begin(request)
        accepted = self._engine.call(lambda core: core.add_request(request))
        accepted.add_done_callback(
            lambda future: self._event_loop.call_soon_threadsafe(self._on_accepted, gateway, request.request_id, future)
        )

    def _on_accepted(self, gateway: transport.Connection, request_id: str, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, EngineEndedError):
            return  # the connection closes with the engine, and its gateway sends the request to another one
        if isinstance(error, QuireError):
            with self._lock:
                if self._owners.get(request_id) is gateway:
                    del self._owners[request_id]
                    self._journal.refused(request_id)
            self._send(gateway, Refused.from_error(request_id, error))

    def _recall(self, gateway: transport.Connection, key: bytes) -> None:
        """Give a request's answers to a gateway. Whoever has them still is told that they end: its client has gone."""
        with self._lock:
            points = self._journal.recall(key)
            running = [request_id for request_id in points if request_id in self._owners]
            for request_id in running:
                last = EngineOutput(request_id, len(points[request_id].token_ids), [], "abort")
                self._send(self._owners[request_id], StepOutputs([last]))
            self._abort(running)
        self._send(gateway, Recalled(key, list(points.values())))

    def _abort(self, request_ids: list[str]) -> None:
        """To be called under the lock."""
        self._journal.end(request_ids)
        for request_id in request_ids:
            del self._owners[request_id]
        if request_ids:
            self._engine.abort(request_ids)

    # To gateways

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        """In the step loop's thread, which ends when this raises: what each gateway that has a stream among the outputs
        of a step gets of them."""
        with self._lock:
            by_gateway: dict[transport.Connection, list[EngineOutput]] = {}
            for output in outputs:
                gateway = self._owners.get(output.request_id)
                if gateway is None:
                    continue
                by_gateway.setdefault(gateway, []).append(output)
                self._journal.add(output)
                if output.finish_reason is not None:
                    del self._owners[output.request_id]
            for gateway, its_outputs in by_gateway.items():
                payloads, too_large = pack_outputs(its_outputs)
                for payload in payloads:
                    gateway.send(payload)
                self._abort([request_id for request_id in dict.fromkeys(too_large) if request_id in self._owners])

    def _on_kv_events(self, events: list[KVEvent]) -> None:
        self._event_loop.call_soon_threadsafe(self._cache.on_events, events)

    def _send(self, gateway: transport.Connection, message: EngineMessage) -> None:
        gateway.send(encoder.encode(message))

    async def _report(self) -> None:
        sent: LoadReport | None = None
        while True:
            await asyncio.sleep(REPORT_S)
            report = self.load()
            if report != sent:
                for gateway in self._gateways:
                    self._send(gateway, report)
                sent = report

    def _on_failure(self, error: BaseException) -> None:
        def tell() -> None:
            if not self.failed.done():
                self.failed.set_result(error)

        self._event_loop.call_soon_threadsafe(tell)
