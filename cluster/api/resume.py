"""Streams that go on where they were interrupted: `x-request-id` and `Last-Event-ID`.

The last event that a token brings has an id: how many tokens of each answer the client has seen with it, and whether
the answer has ended; which attempt it belongs to; and the number of the event, where a stream has numbers.

    id: 17-3fa0c2     17 tokens of the only answer
    id: 12e.9-3fa0c2  of two answers: the first is complete with 12 tokens, the second has shown 9
    id: 17-3fa0c2.21  17 tokens, with event 21

A client whose connection was lost sends the same request again, with its `x-request-id`, which the answer had, too, and
with the last id as `Last-Event-ID`. Engines remember the tokens and the seed for a minute
(`cluster/resume_journal.py`). The whole answer is then shaped once more from its first token, and the events that the
client has seen are left out: so what follows is what would have followed, whatever the answer is made of. Tokens that
no engine remembers, or that come with logprobs, are computed again, and are the same, for sampling is a function of the
seed and the position.

A client that lost its connection before the first event begins anew, under the same `x-request-id` and with another
seed, and engines may remember both answers. The attempt, drawn at the beginning and kept by all that goes on from it,
keeps them apart. An id without one means the attempt that began last.

Who may go on with a stream is who knows all of it: the id, the tenant's API key and every byte of the request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from secrets import token_hex

import msgspec
from starlette.requests import Request

from quire.engine.errors import InvalidRequestError, OverloadedError
from quire.engine.outputs import CompletionOutput, EngineOutput, EngineRequest, ResumeTag

from ..messages import ResumePoint
from .backend import Backend
from .sse import DONE
from .tenants import tenant_of

_EVENT_ID = re.compile(r"(\d{1,9}e?(?:\.\d{1,9}e?)*)(?:-([0-9a-f]{6})(?:\.(\d{1,9}))?)?")
_MAX_ID_CHARS = 256
_NO_ENGINE_RETRY_S = 5.0  # about what an engine takes to start


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """How far an answer has come: tokens shown, and whether its end was."""

    num_tokens: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}e" if self.ended else f"{self.num_tokens}"


class EventIds:
    """Numbers the events of one stream, and leaves out those that its client has seen.

    `Generation` tells it of each delta before the delta becomes an event (`advance`); `number` is what each event of a
    stream passes through on its way out.
    """

    def __init__(
        self, num_answers: int, attempt: str, seen: Sequence[Position] | None = None, last_number: int | None = None
    ) -> None:
        """`last_number`: of the last event that was seen, where events have numbers."""
        self._positions = [Position()] * num_answers
        self._texts = [str(Position())] * num_answers  # each event has all of them, and changes one
        self._attempt = attempt
        self._seen = seen
        self._is_seen = False
        self._last_number = last_number
        self.event_number: int | None = None  # told by streams that have numbers

    def next_number(self, own: int) -> int:
        """The number of the first event of the delta that was told last, which would have its `own`, had the client
        seen no other stream: there, tokens may have come in other pieces."""
        if self._is_seen or self._last_number is None:
            return own
        last, self._last_number = self._last_number, None
        return last + 1

    def advance(self, delta: CompletionOutput) -> None:
        """The next event is that of `delta`."""
        index = delta.index
        position = Position(self._positions[index].num_tokens + len(delta.token_ids), delta.finish_reason is not None)
        self._positions[index], self._texts[index] = position, str(position)
        self._is_seen = self._seen is not None and position <= self._seen[index]

    def cut(self, index: int, num_known: int, output: EngineOutput) -> list[EngineOutput]:
        """Tokens that are computed again, in two parts where the client has seen only the first of them."""
        seen = self._seen[index].num_tokens if self._seen is not None else 0
        at = seen - max(output.first_index, num_known)
        start = max(num_known - output.first_index, 0)
        if at <= 0 or start + at >= len(output.new_token_ids):
            return [output]
        at += start
        first = msgspec.structs.replace(
            output,
            new_token_ids=output.new_token_ids[:at],
            logprobs=None if output.logprobs is None else output.logprobs[:at],
            finish_reason=None,
            stop_reason=None,
            error=None,
            report=None,
        )
        return [first, output]  # tokens that are known already are ignored

    def number(self, data: bytes) -> bytes:
        """The events that one delta has become, with its id; nothing where the client has seen them."""
        if data.endswith(DONE):
            return data
        if self._is_seen or not data:
            return b""
        before = data.rfind(b"\n\n", 0, -2)  # where the last of them begins; JSON has no line ends
        last = 0 if before < 0 else before + 2
        return b"%bid: %b\n%b" % (data[:last], str(self).encode(), data[last:])

    def __str__(self) -> str:
        number = "" if self.event_number is None else f".{self.event_number}"
        return f"{'.'.join(self._texts)}-{self._attempt}{number}"


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that begins, or goes on: what the engines get, and what it is called."""

    prompts: list[list[EngineRequest]]  # per prompt, one for each choice
    answer_id: str
    created: int
    attempt: str = field(default_factory=lambda: token_hex(3))  # six digits, as in `_EVENT_ID`
    num_resumes: int = 0
    event_ids: EventIds | None = None  # of a stream that can go on elsewhere


async def may_resume(begun: Begun, http: Request, body: bytes, backend: Backend, model: str) -> Begun:
    """A stream as it can be resumed later, or resumed now, by what the headers say. Raises `InvalidRequestError`, and
    `OverloadedError` while no engine of the model is there that could remember it."""
    name, last = http.headers.get("x-request-id"), http.headers.get("last-event-id")
    if not name or len(name) > _MAX_ID_CHARS:
        if last:
            raise InvalidRequestError(
                f"Last-Event-ID: needs the x-request-id (1 to {_MAX_ID_CHARS} characters) of the request that is to "
                "go on.",
                "Last-Event-ID",
            )
        return begun
    key = _key(name, tenant_of(http.scope).name, http.url.path, body)
    if last:
        return await _resume(begun, key, last, backend, model)
    return _tagged(begun, key, [request for choices in begun.prompts for request in choices])


async def _resume(begun: Begun, key: bytes, last_event_id: str, backend: Backend, model: str) -> Begun:
    requests = [request for choices in begun.prompts for request in choices]
    seen, attempt, number = _read(last_event_id, len(requests))
    points = _of_one_attempt(await backend.recall(key), attempt)
    num_choices = len(begun.prompts[0])
    seeds = {index // num_choices: point.seed for index, point in points.items()}  # each prompt has its own
    if not all(
        index // num_choices in seeds or seen[index] == Position() or _is_repeatable(request)
        for index, request in enumerate(requests)
    ):
        if any(each.status != "asleep" and not each.engines for each in backend.health().models if each.id == model):
            message = f"No engine of {model} is there that could remember this request. Send it again, as it is."
            raise OverloadedError(message, _NO_ENGINE_RETRY_S)
        raise InvalidRequestError(
            "Last-Event-ID: no engine remembers this request: they do so for a minute, and only for the same "
            "x-request-id and the same body. Send it without Last-Event-ID to begin anew.",
            "Last-Event-ID",
            "not_resumable",
        )
    if points:
        last = max((point.tag for point in points.values()), key=lambda tag: tag.num_resumes)
        begun = replace(
            begun,
            answer_id=last.answer_id,
            created=last.created,
            attempt=last.attempt or begun.attempt,
            num_resumes=last.num_resumes + 1,
        )
    resumed = []
    for index, request in enumerate(requests):
        request = msgspec.structs.replace(request, seed=seeds.get(index // num_choices, request.seed))
        if index in points and request.sampling_params.logprobs is None:
            known = points[index].token_ids[: seen[index].num_tokens]
            request = msgspec.structs.replace(request, resume_token_ids=known)
        resumed.append(request)
    return _tagged(begun, key, resumed, seen, number)


def _of_one_attempt(points: Sequence[ResumePoint], attempt: str) -> dict[int, ResumePoint]:
    """What engines remember of this attempt, or of the newest where none is named, by answer.

    Of several copies of an answer the one counts with which the client has gone on last: two engines may go on
    differently, as they sum in another order, and an older copy can be longer. Then the longest.
    """

    def beginning(point: ResumePoint) -> tuple[int, str, str]:
        return point.tag.created, point.tag.answer_id, point.tag.attempt

    points = [point for point in points if attempt in ("", point.tag.attempt)]
    newest = max(map(beginning, points), default=None)
    copies = [point for point in points if beginning(point) == newest]
    copies.sort(key=lambda point: (point.tag.num_resumes, len(point.token_ids)))
    return {point.tag.index: point for point in copies}


def _tagged(
    begun: Begun,
    key: bytes,
    requests: list[EngineRequest],
    seen: list[Position] | None = None,
    last_number: int | None = None,
) -> Begun:
    """With these requests in place of its own, for engines to remember."""
    of_all = (begun.answer_id, begun.created, begun.attempt, begun.num_resumes)
    tagged = iter(
        msgspec.structs.replace(request, resume_tag=ResumeTag(key, index, *of_all))
        for index, request in enumerate(requests)
    )
    prompts = [[next(tagged) for _ in choices] for choices in begun.prompts]
    return replace(begun, prompts=prompts, event_ids=EventIds(len(requests), begun.attempt, seen, last_number))


def _key(name: str, tenant: str, path: str, body: bytes) -> bytes:
    digest = sha256()
    for part in (name.encode(), tenant.encode(), path.encode(), body):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _read(text: str, num_answers: int) -> tuple[list[Position], str, int | None]:
    """What an event id says: the positions; the attempt, or "" where it names none; and the number, if it has one."""
    match = _EVENT_ID.fullmatch(text)
    parts = match[1].split(".") if match else []
    if match is None or len(parts) != num_answers:
        raise InvalidRequestError(
            f"Last-Event-ID: must be the id of an event of this stream, got {text[:100]!r}.", "Last-Event-ID"
        )
    positions = [Position(int(part.removesuffix("e")), part.endswith("e")) for part in parts]
    return positions, match[2] or "", None if match[3] is None else int(match[3])


def _is_repeatable(request: EngineRequest) -> bool:
    """Whether the answer is the same without anybody's memory: it is greedy, or its seed is in the body."""
    return request.sampling_params.temperature == 0 or request.sampling_params.seed is not None
