"""The engine's memory of requests that a client may want to go on with.

A gateway keeps the journal that outlives an engine. This one outlives a gateway: when a gateway dies, its requests are
aborted and hold nothing, but the tokens that they had stay here for `KEEP_S`, as do those of requests that have ended
or were aborted by a gateway whose client had gone. A client that asks again, with the same request, the same
`x-request-id` and the last event that it has seen, reaches some gateway, which asks all engines for the tokens. They
stay here then, for another `KEEP_S`: that gateway may die, or find all engines full, before another engine has them.
(A gateway has a journal of this kind, too, for streams that had no engine when their client left.)

Streams that came with an `x-request-id` are kept: over HTTP all, as Serve names those that have none. Memory is bounded
by `MAX_TOKENS` for what has ended, oldest first out; what runs is bounded by the engine's own limits.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.engine.outputs import EngineOutput, EngineRequest, ResumeTag

from .messages import ResumePoint

KEEP_S = 60.0
MAX_TOKENS = 2_000_000  # 4 bytes each


@dataclass(slots=True)
class _Entry:
    tag: ResumeTag
    seed: int
    token_ids: array[int]


class ResumeJournal:
    """Entries by request id. Not thread-safe. Unknown ids are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_tokens: int = MAX_TOKENS) -> None:
        self._clock = clock
        self._max_tokens = max_tokens
        self._entries: dict[str, _Entry] = {}
        self._ids: dict[bytes, dict[int, str]] = {}  # a request's key -> answer -> request id
        self._ended: OrderedDict[str, float] = OrderedDict()  # request id -> when, oldest first
        self._num_ended_tokens = 0

    def begin(self, request: EngineRequest) -> None:
        """A request arrives. One with the same tag takes the place of an older one."""
        self._expire()
        tag = request.resume_tag
        self._forget(request.request_id)
        if tag is None:
            return
        older = self._ids.get(tag.key, {}).get(tag.index)
        if older is not None:
            self._forget(older)
        self._entries[request.request_id] = _Entry(tag, request.seed, array("I", request.resume_token_ids))
        self._ids.setdefault(tag.key, {})[tag.index] = request.request_id

    def add(self, output: EngineOutput) -> None:
        entry = self._entries.get(output.request_id)
        if entry is not None and output.request_id not in self._ended:
            entry.token_ids.extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.end([output.request_id])

    def end(self, request_ids: Iterable[str]) -> None:
        """Requests are not worked on any more: keep what they had for a while."""
        for request_id in request_ids:
            if request_id in self._entries and request_id not in self._ended:
                self._ended[request_id] = self._clock()
                self._num_ended_tokens += len(self._entries[request_id].token_ids)
        self._expire()

    def refused(self, request_id: str) -> None:
        """A request was not taken in. If its client has seen something of it, it may still ask for the rest."""
        entry = self._entries.get(request_id)
        if entry is not None and (entry.token_ids or entry.tag.num_resumes):
            self.end([request_id])
        else:
            self._forget(request_id)

    def recall(self, key: bytes) -> dict[str, ResumePoint]:
        """What is known of a request's answers, by request id. They end by that, and their `KEEP_S` begins now."""
        self._expire()
        found = {}
        for request_id in self._ids.get(key, {}).values():
            entry = self._entries[request_id]
            found[request_id] = ResumePoint(entry.tag, entry.seed, entry.token_ids.tolist())
            if request_id in self._ended:
                self._ended[request_id] = self._clock()
                self._ended.move_to_end(request_id)
        self.end(found)
        return found

    def _expire(self) -> None:
        oldest = self._clock() - KEEP_S
        while self._ended:
            request_id, ended = next(iter(self._ended.items()))
            if ended > oldest and self._num_ended_tokens <= self._max_tokens:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        if self._ended.pop(request_id, None) is not None:
            self._num_ended_tokens -= len(entry.token_ids)
        answers = self._ids[entry.tag.key]
        if answers.get(entry.tag.index) == request_id:
            del answers[entry.tag.index]
        if not answers:
            del self._ids[entry.tag.key]
