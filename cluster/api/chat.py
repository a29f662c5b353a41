"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.output_processor import RequestState
from quire.engine.outputs import CompletionOutput, FinishReason

from .answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    CompletionTokensDetails,
    Usage,
)
from .chat_reading import MessageWriter, num_thought_tokens
from .chat_turn import ChatTurn, begin_turn
from .context import ApiContext, off_the_loop, read_body, stream_response
from .logprobs import TokenNames, chat_logprobs, prompt_logprobs_by_token
from .parsing import parse_request
from .protocol import ChatCompletionRequest
from .sse import DONE, event, unless_client_leaves
from .whole_answers import whole_response


async def chat_completions(http: Request, context: ApiContext) -> Response:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(ChatCompletionRequest, body, context.limits))
    turn = await begin_turn(http, context, request, body, "chatcmpl-")
    answer = _ChatAnswer(turn, request)
    if request.stream:
        return await stream_response(http, answer.events(), turn.begun.event_ids)
    await unless_client_leaves(http.receive, turn.generation.run())
    return await whole_response(context.heavy_work, turn.generation.size, answer.whole)


class _ChatAnswer:
    """Shapes what a generation yields."""

    def __init__(self, turn: ChatTurn, request: ChatCompletionRequest) -> None:
        served, self._generation = turn.served, turn.generation
        self._id = turn.begun.answer_id
        self._created = turn.begun.created
        self._model = served.name
        self._decoder = served.token_decoder
        self._names = TokenNames(served.token_decoder, as_ids=request.return_tokens_as_token_ids)
        self._request = request
        self._prompt_token_ids = turn.prompt.token_ids if request.return_token_ids else UNSET
        echo = request.echoed_text()
        self._writers = [
            MessageWriter(turn.reading, echo=echo, include_reasoning=request.include_reasoning)
            for _ in self._generation.states
        ]
        self._reasons = turn.reading.finds_thoughts
        self._thoughts: dict[int, int] = {}  # tokens of those that have ended, by choice

    def whole(self) -> ChatCompletion:
        choices = [self._choice(state) for state in self._generation.states]
        answer = ChatCompletion(
            self._id, self._created, self._model, choices, self._usage(), prompt_token_ids=self._prompt_token_ids
        )
        num_top, told = self._request.prompt_logprobs, self._generation.prompt_logprobs(0)
        if num_top is not None:
            answer.prompt_logprobs = prompt_logprobs_by_token(told, self._decoder, num_top)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Role first, deltas, the end of each choice in its last delta, usage when asked for, [DONE]."""
        roles = b"".join(self._role_event(state.index) for state in self._generation.states)
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                yield roles + b"".join([self._delta_event(delta) for delta in deltas])
                roles = b""
        yield (self._event([], self._usage()) if self._request.include_usage else b"") + DONE

    def _role_event(self, index: int) -> bytes:
        chunk = self._chunk([ChatChunkChoice(index, self._writers[index].first_delta())], self._usage_of_chunk())
        if index == 0:
            chunk.prompt_token_ids = self._prompt_token_ids
        return event(chunk)

    def _delta_event(self, delta: CompletionOutput) -> bytes:
        """A chunk, or nothing while all that the delta brings is held back."""
        choice = self._chunk_choice(delta)
        says_nothing = choice.delta == ChatDelta() and choice.finish_reason is None
        if says_nothing and choice.logprobs is None and choice.token_ids is UNSET:
            return b""
        return self._event([choice], self._usage_of_chunk())

    def _chunk_choice(self, delta: CompletionOutput) -> ChatChunkChoice:
        written = self._writers[delta.index].delta(delta.text, finished=delta.finish_reason is not None)
        return ChatChunkChoice(
            delta.index,
            written,
            self._logprobs(delta),
            self._finish_reason(delta),
            UNSET if delta.finish_reason is None else delta.stop_reason,
            self._generation.report_of(delta),
            delta.token_ids if self._request.return_token_ids else UNSET,
        )

    def _choice(self, state: RequestState) -> ChatChoice:
        logprobs, state.logprobs = self._logprobs(state), None  # so they end one by one, not all at once
        return ChatChoice(
            state.index,
            self._writers[state.index].whole(state.text),
            logprobs,
            self._finish_reason(state),
            state.stop_reason,
            self._generation.report_of(state),
            state.token_ids if self._request.return_token_ids else UNSET,
        )

    def _finish_reason(self, answer: CompletionOutput | RequestState) -> ChatFinishReason | None:
        """`tool_calls` where the model ended its turn after calls."""
        reason: FinishReason | None = answer.finish_reason
        return "tool_calls" if reason == "stop" and self._writers[answer.index].made_calls else reason

    def _logprobs(self, answer: CompletionOutput | RequestState) -> ChatLogprobs | None:
        if answer.logprobs is None:
            return None
        return chat_logprobs(answer.logprobs, self._names)

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        if self._reasons:
            thoughts = map(self._num_thought_tokens, self._generation.states)
            usage.completion_tokens_details = CompletionTokensDetails(sum(thoughts))
        return usage

    def _usage_of_chunk(self) -> Usage | UnsetType | None:
        """What a chunk with text says of the usage."""
        if self._request.continuous_usage:
            return self._usage()
        return None if self._request.include_usage else UNSET

    def _num_thought_tokens(self, state: RequestState) -> int:
        parser = self._writers[state.index].parser
        if parser is None or parser.thinks or not parser.thought_end:
            return num_thought_tokens(parser, state)
        if state.index not in self._thoughts:
            self._thoughts[state.index] = num_thought_tokens(parser, state)
        return self._thoughts[state.index]

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(self._chunk(choices, usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, choices, usage)
