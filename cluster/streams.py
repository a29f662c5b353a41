"""The journal of a gateway: what lets a stream outlive its engine.

For every stream it keeps the request and the output tokens received. Each attempt travels under an id of
its own, so that late words of an earlier attempt cannot be taken for those of the current one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from quire.engine.errors import QuireError
from quire.engine.outputs import EngineOutput, EngineRequest

from .directory import EngineRecord
from .engine_links import EngineLink
from .prefix_keys import PromptKeys


class Call:
    """One `generate()`: the streams of its requests, and what has arrived for them since the last item."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}  # live ones, by request id
        self.first: Stream | None = None  # the one that tells whether there is room for the call
        self.arrived: list[EngineOutput] = []
        self.error: QuireError | None = None
        self.is_closed = False  # nobody waits for outputs any more
        self._news = asyncio.Event()

    def notify(self) -> None:
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()
        self._news.clear()


class Stream:
    """The journal of one request."""

    __slots__ = (
        "attempt",
        "begun",
        "call",
        "engine",
        "give_up_at",
        "is_complete",
        "model",
        "num_losses",
        "prompt",
        "refusal",
        "request",
        "timer",
        "token_ids",
    )

    def __init__(self, call: Call, model: str, request: EngineRequest, prompt: PromptKeys) -> None:
        self.begun = time.monotonic()
        self.call = call
        self.model = model
        self.request = request
        self.prompt = prompt
        self.token_ids = list(request.resume_token_ids)
        self.engine: EngineLink | None = None
        self.attempt = 0
        self.is_complete = False  # only the engine's report is still wanted
        self.num_losses = 0
        self.timer: asyncio.TimerHandle | None = None  # runs to `give_up_at` while the stream has no engine
        self.give_up_at: float | None = None  # in the loop's time; set since its last engine was lost
        self.refusal: QuireError | None = None  # of the last engine that was full

    @property
    def wire_id(self) -> str:
        return self.request.request_id if self.attempt == 0 else f"{self.request.request_id}@{self.attempt}"

    def fits(self, engine: EngineRecord) -> bool:
        """Whether an engine's context holds the request to its end: a smaller one would cut an open answer."""
        return self.request.max_num_tokens <= engine.max_model_len

    def to_submit(self) -> EngineRequest:
        """The request as the next engine gets it. A deadline counts from the arrival there, and goes on here."""
        deadline_ms = self.request.deadline_ms
        if deadline_ms is not None:
            deadline_ms = max(1, deadline_ms - round(1000 * (time.monotonic() - self.begun)))
        return msgspec.structs.replace(
            self.request,
            request_id=self.wire_id,
            resume_token_ids=list(self.token_ids),
            deadline_ms=deadline_ms,
        )


class Trials:
    """The last attempts of streams under which every engine so far was lost: one after the other, model by model.

    When an engine is lost, each of its streams may be the cause, and most are bystanders. Those that get the last of
    their attempts together with the cause would fail with it. A trial begins when an engine is there to take the
    stream, and ends with its first token, with its end, or when no engine has it any more. So whoever waits here waits
    for a stream that an engine works on, as those do that wait in an engine's queue, and no timer of the gateway runs
    for it meanwhile. `place` is called with the next one, and lets it wait elsewhere if the engine has gone.
    """

    def __init__(self, place: Callable[[Stream], None]) -> None:
        self._place = place
        self._waiting: dict[str, dict[str, Stream]] = {}  # model -> request id -> stream, oldest first
        self._current: dict[str, Stream] = {}  # by model

    def may_begin(self, stream: Stream) -> bool:
        """Whether it is the stream's turn now. If not, it is placed when it is."""
        is_next = self._current.setdefault(stream.model, stream) is stream
        if not is_next:
            self._waiting.setdefault(stream.model, {})[stream.request.request_id] = stream
        return is_next

    def end(self, stream: Stream) -> None:
        """The stream has made progress, lost its engine or ended; harmless for one that is not on trial."""
        waiting = self._waiting.get(stream.model, {})
        waiting.pop(stream.request.request_id, None)
        if self._current.get(stream.model) is not stream:
            return
        del self._current[stream.model]
        while waiting and stream.model not in self._current:
            self._place(waiting.pop(next(iter(waiting))))
