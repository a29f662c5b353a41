"""The gateway's side of its engines: streams, and the journal that lets a stream outlive its engine.

When the engine of a stream is lost, the request is sent to another engine, or to the next one that appears, with
`resume_token_ids` from the journal (`streams.py`); whoever reads the stream sees a pause. Which engine it is, the
`EngineChooser` says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from quire.engine.errors import EngineError, OverloadedError, QuireError
from quire.engine.outputs import EngineOutput, EngineRequest, RequestReport

from .directory import Directory, EngineRecord
from .engine_chooser import EngineChooser
from .engine_links import EngineLink, EngineLinks
from .messages import (
    Abort,
    Add,
    CacheSnapshot,
    CacheUpdate,
    EngineMessage,
    Leaving,
    LoadReport,
    Recall,
    Recalled,
    Refused,
    ResumePoint,
    StepOutputs,
)
from .prefix_keys import PromptKeys
from .recalls import Recalls
from .resume_journal import ResumeJournal
from .router import RoutingPolicy
from .stream_metrics import StreamBook
from .streams import Call, Stream, Trials

logger = logging.getLogger(__name__)

RETRY_S = 0.25  # before a stream that found all engines full asks again; their load reports come as often
# Streams of one call beyond what a queue holds ask when there may be room, so many of them at a time.
MOST_RETRY_S, ASK_TOGETHER = 10.0, 16
NO_ENGINE_RETRY_S = 10.0  # after which a client may try again that found no engine at all
MAX_LOSSES = 3  # engines lost in a row under one request, without a token in between, before it is given up


class EngineClient:
    """Everything a gateway knows of its engines. All methods run on one event loop.

    `failover_timeout_s` bounds how long a stream waits for an engine when there is none, `max_waiting_requests` how
    many that have not begun do so. `on_engines` is called with the connected engines when there are others than before,
    and before a new one gets its first request; `on_waiting` with a model of which an engine is waited for;
    `on_late_report` with a model and the report of an answer that `generate` has not waited for. `book` counts what
    becomes of streams.
    """

    def __init__(
        self,
        directory: Directory,
        identity: str,
        policy: RoutingPolicy,
        *,
        failover_timeout_s: float = 60.0,
        max_waiting_requests: int = 1024,
        on_engines: Callable[[Sequence[EngineRecord]], None] = lambda _: None,
        on_waiting: Callable[[str], None] = lambda _: None,
        on_late_report: Callable[[str, RequestReport], None] = lambda _model, _report: None,
        book: StreamBook | None = None,
    ) -> None:
        self._links = EngineLinks(directory, identity, self)
        self._book = book or StreamBook()
        self._chooser = EngineChooser(policy, self._book)
        self._failover_timeout_s = failover_timeout_s
        self._max_waiting_requests = max_waiting_requests
        self._on_waiting = on_waiting
        self._on_engines = on_engines
        self._on_late_report = on_late_report
        self._streams: dict[str, Stream] = {}  # all live ones, by request id
        self._homeless: dict[str, Stream] = {}  # streams without an engine, by wire id, oldest first
        self._trials = Trials(self._place)
        self._recalls = Recalls()
        self._journal = ResumeJournal()  # of streams that had no engine when their client left

    async def start(self) -> None:
        """Begin to follow the directory."""
        await self._links.start()

    async def close(self) -> None:
        """Leave all engines; what still runs is aborted by them."""
        await self._links.close()

    def links(self) -> list[EngineLink]:
        """The connected engines, ordered by id."""
        return self._links.connected()

    def num_gateways(self) -> int:
        """How many gateways there are, as the engines see it."""
        return max((link.num_gateways for link in self.links()), default=1)

    def waits_for(self, model: str) -> bool:
        """Whether a stream has no engine, and needs one of this model."""
        return any(stream.model == model for stream in self._homeless.values())

    def problem(self) -> str | None:
        """Why engines that come are not noticed; None when they are."""
        return self._links.problem()

    async def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """Run requests; each item is all that arrived since the one before (`Backend.generate` says the rest)."""
        call = Call()
        try:
            for request, prompt in zip(requests, await self._prompts(model, requests), strict=True):
                stream = Stream(call, model, request, prompt)
                call.first = call.first or stream
                call.streams[request.request_id] = self._streams[request.request_id] = stream
                self._place(stream)
                if stream.engine is not None:
                    await stream.engine.drain()
            while True:
                arrived, call.arrived = call.arrived, []
                if arrived:
                    yield arrived
                elif call.error is not None:
                    raise call.error
                elif not call.streams:
                    return
                else:
                    await call.wait()
        finally:
            call.is_closed = True
            for stream in list(call.streams.values()):
                if not stream.is_complete:
                    self._abort(stream)

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None:
        """Stop working on requests by id; their `generate()` yields nothing more for them but, with `report`, their
        last output."""
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            if report and stream.engine is not None:
                stream.is_complete = True
                stream.engine.send(Abort([stream.wire_id], report=True))
            else:
                self._abort(stream)

    async def recall(self, key: bytes) -> list[ResumePoint]:
        """What the engines remember of a request, and end by that (`Backend.recall`); of what waits here for an engine
        none does."""
        for stream in [each for each in self._streams.values() if _waits_with(each, key)]:
            self._abort(stream)
            stream.call.arrived.append(EngineOutput(stream.request.request_id, len(stream.token_ids), [], "abort"))
        own = list(self._journal.recall(key).values())
        links = self.links()
        for link in links:
            link.send(Recall(key))
        points = own + await self._recalls.answers(key, [link.record.engine_id for link in links])
        self._book.resumed_by_client(remembered=bool(points))
        return points

    # Placing streams

    async def _prompts(self, model: str, requests: Sequence[EngineRequest]) -> list[PromptKeys]:
        """One for each request; the choices of a prompt share theirs."""
        prompts: dict[tuple[object, ...], PromptKeys] = {}
        keys = [(id(r.prompt_token_ids), r.cache_salt, r.lora_id) for r in requests]
        for key, request in zip(keys, requests, strict=True):
            if key not in prompts:
                prompts[key] = PromptKeys(request)
                await self._chooser.prepare(prompts[key], [link for link in self.links() if link.record.model == model])
        return [prompts[key] for key in keys]

    def _place(self, stream: Stream) -> None:
        """Send a stream to an engine, or let it wait for one, or for its trial."""
        candidates = self._candidates(stream)
        if not candidates:
            self._wait_for_engine(stream)
            return
        if stream.timer is not None:
            stream.timer.cancel()
            stream.timer = None
        if stream.num_losses == MAX_LOSSES - 1 and not self._trials.may_begin(stream):
            if stream.refusal is None:
                stream.give_up_at = None  # an engine is there; who was refused by it goes on with the time it had left
            return
        link = self._chooser.choose(stream.request, stream.prompt, candidates)
        stream.engine = link
        link.streams[stream.wire_id] = stream
        link.send(Add(stream.to_submit()))

    def _wait_for_engine(self, stream: Stream) -> None:
        """There is no engine for a stream: let it wait for the next one."""
        if stream.attempt == 0 and len(self._homeless) >= self._max_waiting_requests:
            message = f"{len(self._homeless)} requests wait for an engine already; none is there."
            self._fail(stream, OverloadedError(message, NO_ENGINE_RETRY_S))
            return
        self._wait(stream)
        self._homeless[stream.wire_id] = stream
        self._on_waiting(stream.model)

    def _fitting(self, stream: Stream) -> list[EngineLink]:
        """The engines that a stream can go to, ordered by id."""
        links = [link for link in self.links() if link.record.model == stream.model]
        fitting = [link for link in links if stream.fits(link.record)]
        # While nothing is lost, any of them can tell what it would have to be.
        return fitting or (links if stream.attempt == 0 else [])

    def _candidates(self, stream: Stream) -> list[EngineLink]:
        """The engines of which one gets a stream. One that leaves or makes no progress does where no other is."""
        links = self._staying(stream) or self._fitting(stream)
        return [link for link in links if link.problem is None] or links

    def _staying(self, stream: Stream) -> list[EngineLink]:
        return [link for link in self._fitting(stream) if not link.is_leaving]

    def _wait(self, stream: Stream) -> None:
        """The stream has no engine: bound for how long, and let the next one be tried."""
        loop = asyncio.get_running_loop()
        if stream.give_up_at is None:
            stream.give_up_at = loop.time() + self._failover_timeout_s
        if stream.timer is None:
            stream.timer = loop.call_at(stream.give_up_at, self._give_up, stream)
        self._trials.end(stream)

    def _give_up(self, stream: Stream) -> None:
        message = f"No engine was available for this request within {self._failover_timeout_s:g} s."
        self._fail(stream, stream.refusal or OverloadedError(message, NO_ENGINE_RETRY_S))

    def _retry(self, stream: Stream) -> None:
        """Ask again for a stream that was refused, unless an engine that came has it already, or it has ended."""
        if self._homeless.pop(stream.wire_id, None) is not None:
            self._place(stream)

    def _refused(self, stream: Stream, error: QuireError) -> None:
        """An engine does not take a stream. One that was open already has nobody who could try again: it stays. And
        the first stream of a call tells whether there is room for it: the others may be more than any queue holds."""
        stream.engine = None
        is_first = stream is stream.call.first
        if not isinstance(error, OverloadedError) or (stream.attempt == 0 and is_first):
            self._fail(stream, error)
            return
        stream.attempt += 1
        stream.refusal = error
        if is_first:
            delay_s = RETRY_S
            self._wait(stream)
        else:  # for those that were taken, however long they are
            num_waiting = sum(each.engine is None for each in stream.call.streams.values())
            delay_s = min(error.retry_after_s, MOST_RETRY_S) * max(1.0, num_waiting / ASK_TOGETHER)
            stream.give_up_at = None
            self._trials.end(stream)
        self._homeless[stream.wire_id] = stream
        asyncio.get_running_loop().call_later(delay_s, self._retry, stream)

    # What happens on the links (`engine_links.LinkUser`)

    def on_connected(self, link: EngineLink) -> None:
        """An engine is there: streams that wait for one may get it."""
        self._chooser.on_connected(link)
        self._tell_engines()
        waiting, self._homeless = list(self._homeless.values()), {}
        for stream in waiting:
            self._place(stream)
        for leaving in [each for each in self.links() if each.is_leaving]:
            self._hand_over(leaving)

    def _hand_over(self, leaving: EngineLink) -> None:
        """Move the streams of an engine that leaves to others. Where there is none, they stay until one comes."""
        moved = [stream for stream in leaving.streams.values() if not stream.is_complete and self._staying(stream)]
        if not moved:
            return
        logger.info("Engine %s leaves: %d streams go on elsewhere.", leaving.record.engine_id, len(moved))
        leaving.send(Abort([stream.wire_id for stream in moved]))
        for stream in moved:
            del leaving.streams[stream.wire_id]
            stream.engine = None
            stream.give_up_at = stream.refusal = None
            stream.attempt += 1
            self._book.moved(stream.model, "handed_over")
            self._place(stream)

    def on_lost(self, link: EngineLink, reason: str) -> None:
        """An engine is gone: its streams go elsewhere."""
        self._chooser.on_lost(link)
        self._recalls.on_lost(link.record.engine_id)
        self._tell_engines()
        streams, link.streams = list(link.streams.values()), {}
        if streams:
            logger.warning(
                "Engine %s was lost (%s): %d streams are resumed.", link.record.engine_id, reason, len(streams)
            )
        for stream in streams:
            stream.engine = None
            if stream.is_complete:
                self._abort(stream)
                continue
            stream.give_up_at = stream.refusal = None
            stream.attempt += 1
            stream.num_losses += not link.is_leaving
            if stream.num_losses >= MAX_LOSSES:
                self._fail(stream, EngineError(f"{stream.num_losses} engines in a row were lost with this request."))
                continue
            self._book.moved(stream.model, "lost")
            self._place(stream)

    def on_message(self, link: EngineLink, message: EngineMessage) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self._on_output(link, output)
        elif isinstance(message, LoadReport):
            link.report(message)
        elif isinstance(message, Recalled):
            self._recalls.on_answer(link.record.engine_id, message)
        elif isinstance(message, Leaving):
            link.is_leaving = True
            self._hand_over(link)
        elif isinstance(message, CacheSnapshot | CacheUpdate):
            self._chooser.on_message(link, message)
        elif isinstance(message, Refused):
            stream = link.streams.pop(message.request_id, None)
            if stream is not None:
                self._refused(stream, message.to_error())

    def _tell_engines(self) -> None:
        self._on_engines([link.record for link in self.links()])

    def _on_output(self, link: EngineLink, output: EngineOutput) -> None:
        stream = link.streams.get(output.request_id)
        if stream is None:
            return  # aborted here while the engine was still working on it
        known = len(stream.token_ids)
        if output.first_index > known:
            gap = f"Tokens {known} to {output.first_index - 1} of request {stream.request.request_id} never arrived."
            self._fail(stream, EngineError(gap))
            return
        output = _without_known(output, stream.request.request_id, known)
        if output.new_token_ids:
            stream.token_ids += output.new_token_ids
            stream.num_losses = 0
            self._trials.end(stream)
        if output.finish_reason is not None:
            self._forget(stream)
        if stream.call.is_closed:
            if output.report is not None:
                self._on_late_report(stream.model, output.report)
        elif output.new_token_ids or output.finish_reason is not None:
            stream.call.arrived.append(output)
            stream.call.notify()

    # The end of a stream

    def _forget(self, stream: Stream) -> None:
        stream.call.streams.pop(stream.request.request_id, None)
        self._streams.pop(stream.request.request_id, None)
        self._homeless.pop(stream.wire_id, None)
        self._trials.end(stream)
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.engine is not None:
            stream.engine.streams.pop(stream.wire_id, None)

    def _abort(self, stream: Stream) -> None:
        self._forget(stream)
        if stream.engine is not None:
            stream.engine.send(Abort([stream.wire_id]))
        else:  # which would remember it: see `recall`
            self._journal.begin(msgspec.structs.replace(stream.request, resume_token_ids=stream.token_ids))
            self._journal.end([stream.request.request_id])
        stream.call.notify()

    def _fail(self, stream: Stream, error: QuireError) -> None:
        self._abort(stream)
        stream.call.error = error
        stream.call.notify()


def _waits_with(stream: Stream, key: bytes) -> bool:
    """Whether a stream of this request (`ResumeTag.key`) has no engine."""
    tag = stream.request.resume_tag
    return stream.engine is None and tag is not None and tag.key == key


def _without_known(output: EngineOutput, request_id: str, num_known: int) -> EngineOutput:
    """The output under the request's own id and without tokens that were received before."""
    repeated = num_known - output.first_index
    if repeated == 0 and output.request_id == request_id:
        return output
    return msgspec.structs.replace(
        output,
        request_id=request_id,
        first_index=num_known,
        new_token_ids=output.new_token_ids[repeated:],
        logprobs=None if output.logprobs is None else output.logprobs[repeated:],
    )
