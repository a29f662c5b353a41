"""POST /v1/responses: a chat completion in OpenAI's newer shape, of items in and items out. Nothing is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from hashlib import blake2s
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from quire.engine.errors import InvalidRequestError
from quire.engine.output_processor import RequestState
from quire.engine.outputs import CompletionOutput, FinishReason, TokenLogprobs

from .answers import TokenLogprob
from .chat_reading import Reading, num_thought_tokens
from .chat_turn import ChatTurn, begin_turn
from .context import ApiContext, off_the_loop, read_body, stream_response
from .errors import body_of
from .logprobs import TokenNames, chat_logprobs
from .output_items import (
    End,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    OutputWriter,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    StreamEvent,
)
from .parsing import parse_request, validate_fields
from .protocol import ChatCompletionRequest, ResponsesRequest
from .protocol.fields import StrictModel
from .protocol.responses import FieldNames
from .sse import event, unless_client_leaves
from .whole_answers import whole_response

_AT_ONCE = 64  # logprobs that are encoded while nobody else may run


async def create_response(http: Request, context: ApiContext) -> HttpResponse:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(ResponsesRequest, body, context.limits))
    fields, names = await off_the_loop(body, request.chat_fields)
    with names.spoken():
        chat = await off_the_loop(body, lambda: _as_chat(request, fields, context))
        turn = await begin_turn(http, context, chat, body, "resp_", _check_logprobs if chat.logprobs else None)
        answer = _ResponseAnswer(turn, await off_the_loop(body, lambda: _begun(turn, request)), names)
        if request.stream:
            return await stream_response(http, answer.events(), turn.begun.event_ids, answer.failed)
        await unless_client_leaves(http.receive, turn.generation.run())
    return await whole_response(context.heavy_work, turn.generation.size, answer.whole)


def _as_chat(request: ResponsesRequest, fields: dict[str, Any], context: ApiContext) -> ChatCompletionRequest:
    chat = validate_fields(ChatCompletionRequest, fields, context.limits)
    return chat.model_copy(update=request.shared_fields())


def _check_logprobs(reading: Reading) -> None:
    """Raises `InvalidRequestError` where they cannot be told."""
    if reading.parser is not None:
        raise InvalidRequestError(
            "include: logprobs are not available with tools, and for models that think: they would be told of the text "
            "that the model has written, not of the message that is read from it.",
            "include",
            "unsupported",
        )


def _begun(turn: ChatTurn, request: ResponsesRequest) -> Response:
    """The response as it begins. What it repeats of its request may be long, and a stream has it three times: it is
    encoded once."""
    params = turn.begun.prompts[0][0].sampling_params
    choice = request.tool_choice or "auto"
    return Response(
        id=turn.begun.answer_id,
        created_at=turn.begun.created,
        model=turn.served.name,
        instructions=_raw(request.instructions),
        metadata=_raw(request.metadata or {}),
        reasoning=_raw({"effort": None, "summary": None} | _dumped(request.reasoning)),
        text=_raw({"format": {"type": "text"}} | _dumped(request.text)),
        tool_choice=_raw(choice if isinstance(choice, str) else {"type": "function", **choice["function"]}),
        tools=_raw([_dumped(tool) for tool in request.tools or ()]),
        parallel_tool_calls=request.parallel_tool_calls,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=params.logprobs or 0,
        max_output_tokens=request.max_output_tokens,
    )


def _dumped(part: StrictModel | None) -> dict[str, Any]:
    return {} if part is None else part.given()


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


class _ResponseAnswer:
    """Shapes what a generation yields."""

    def __init__(self, turn: ChatTurn, response: Response, names: FieldNames) -> None:
        """`response` has begun."""
        self._generation = turn.generation
        [self._state] = turn.generation.states
        self._names = names
        self._token_names = TokenNames(turn.served.token_decoder)
        self._writer = OutputWriter(turn.reading, _item_ids(turn.begun.answer_id, turn.begun.attempt))
        self._response = response
        self._num_events = 0
        self._event_ids = turn.begun.event_ids

    def whole(self) -> Response:
        state = self._state
        entries, state.logprobs = state.logprobs or [], None
        for start in range(0, len(entries), _AT_ONCE):
            _leave(self._writer.push("", self._logprobs(entries[start : start + _AT_ONCE])))
        assert state.finish_reason is not None
        _leave(self._writer.push(state.text, ends=_end_of(state)))
        return self._ended(state.finish_reason)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as it begins, its items, and with the last token the response as it has ended."""
        begun = self._sent(
            [ResponseEvent("response.created", self._response), ResponseEvent("response.in_progress", self._response)]
        )
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                yield begun + b"".join([self._delta_events(delta) for delta in deltas])
                begun = b""

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that cannot go on."""
        if isinstance(error, InvalidRequestError):
            error = self._names.renamed(error)
        response = self._response
        _leave(self._writer.end("incomplete"))
        response.output, response.status, response.usage = self._writer.items, "failed", self._usage()
        message = body_of(error).error.message
        refused = isinstance(error, InvalidRequestError)
        response.error = ResponseError("invalid_prompt" if refused else "server_error", message)
        return self._sent([ResponseEvent("response.failed", response)])

    def _delta_events(self, delta: CompletionOutput) -> bytes:
        reason, ids = delta.finish_reason, self._event_ids
        if ids is not None:
            self._num_events = ids.next_number(self._num_events)
        logprobs = self._logprobs(delta.logprobs or ())
        sent = self._sent(self._writer.push(delta.text, logprobs, ends=_end_of(delta)))
        if reason is None:
            return sent
        ended = self._ended(reason)
        completed = ended.status == "completed"
        return sent + self._sent([ResponseEvent("response.completed" if completed else "response.incomplete", ended)])

    def _ended(self, reason: FinishReason) -> Response:
        response = self._response
        response.output = self._writer.items
        response.status = "completed" if reason == "stop" else "incomplete"
        response.completed_at = int(time.time()) if reason == "stop" else None
        response.incomplete_details = None if reason == "stop" else IncompleteDetails()
        response.usage = self._usage()
        response.report = self._generation.report_of(self._state)
        return response

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(num_thought_tokens(self._writer.parser, self._state)),
            usage.total_tokens,
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        return chat_logprobs(entries, self._token_names).content

    def _sent(self, events: Iterable[StreamEvent]) -> bytes:
        """The events, numbered, as lines of a stream."""
        lines = []
        for each in events:
            each.sequence_number = self._num_events
            self._num_events += 1
            lines.append(b"event: %b\n%b" % (each.type.encode(), event(each)))
        if self._event_ids is not None:
            self._event_ids.event_number = self._num_events - 1
        return b"".join(lines)


def _item_ids(answer_id: str, attempt: str) -> Callable[[str, int], str]:
    """Ids that an answer's items have wherever it goes on, and no other answer's."""

    def new_id(kind: str, index: int) -> str:
        return f"{kind}_{blake2s(f'{answer_id} {attempt} {index}'.encode(), digest_size=12).hexdigest()}"

    return new_id


def _end_of(answer: CompletionOutput | RequestState) -> End | None:
    if answer.finish_reason is None:
        return None
    if answer.finish_reason != "stop":
        return "incomplete"
    return "stopped" if isinstance(answer.stop_reason, str) else "completed"


def _leave(events: Iterable[StreamEvent]) -> None:
    """Events that nobody sees: the items are what they lead to."""
    for _ in events:
        pass
