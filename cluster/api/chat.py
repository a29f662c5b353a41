"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from jinja2 import TemplateError
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError
from quire.engine.output_processor import RequestState
from quire.engine.outputs import CompletionOutput

from .backend import ServedModel
from .context import ApiContext, check_choices, json_response, new_id, off_the_loop, read_body, stream_response
from .generation import Generation, find_model, tokenize
from .logprobs import chat_logprobs
from .parsing import parse_request
from .protocol import ChatCompletionRequest
from .responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Usage,
)
from .sse import DONE, event, unless_client_leaves


async def chat_completions(http: Request, context: ApiContext) -> Response:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(ChatCompletionRequest, body))
    served = await find_model(context.backend, request.model)
    check_choices(1, request.n, context.limits)
    metrics = context.metrics.start(served.name, request.n or 1)
    prompt = await off_the_loop(body, lambda: _token_ids(served, request))
    room = served.input_processor.room_after(prompt, "messages")
    params = request.sampling_params(served.info.generation_defaults, room)
    answer_id = new_id("chatcmpl")
    requests = served.input_processor.process(answer_id, prompt, params, param="messages", options=request.options())
    generation = Generation(context.backend, served, [requests], metrics, include_report=request.include_report)
    answer = _ChatAnswer(answer_id, served, generation)
    if request.stream:
        return await stream_response(http, answer.events(include_usage=request.include_usage))
    await unless_client_leaves(http.receive, generation.run())
    return json_response(answer.whole())


def _token_ids(served: ServedModel, request: ChatCompletionRequest) -> list[int]:
    return tokenize(served, render(served, request), param="messages", add_special_tokens=False)


def render(served: ServedModel, request: ChatCompletionRequest) -> str:
    """The prompt's text, by the model's chat template. Raises `InvalidRequestError`."""
    messages = request.template_messages()
    if not served.tokenizer.chat_template:
        raise InvalidRequestError(
            f"messages: the model {served.name!r} has no chat template; use /v1/completions.", "messages"
        )
    try:
        text: str = served.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise InvalidRequestError(
            f"messages: the model's chat template refuses them: {str(error)[:200]}.", "messages"
        ) from error
    return text


class _ChatAnswer:
    """Shapes what a generation yields."""

    def __init__(self, answer_id: str, served: ServedModel, generation: Generation) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = served.name
        self._decoder = served.token_decoder
        self._generation = generation

    def whole(self) -> ChatCompletion:
        choices = [self._choice(state) for state in self._generation.states]
        return ChatCompletion(self._id, self._created, self._model, choices, self._generation.usage())

    async def events(self, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Role first, deltas, the end of each choice in its last delta, usage when asked for, [DONE]."""
        no_usage: UnsetType | None = None if include_usage else UNSET
        roles = b"".join(
            self._event([ChatChunkChoice(state.index, ChatDelta("assistant", ""))], no_usage)
            for state in self._generation.states
        )
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                yield roles + b"".join([self._event([self._chunk_choice(delta)], no_usage) for delta in deltas])
                roles = b""
        yield (self._event([], self._generation.usage()) if include_usage else b"") + DONE

    def _chunk_choice(self, delta: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            delta.index,
            ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._decoder),
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            self._generation.report_of(delta),
        )

    def _choice(self, state: RequestState) -> ChatChoice:
        logprobs = None if state.logprobs is None else chat_logprobs(state.logprobs, self._decoder)
        message, report = AssistantMessage(state.text), self._generation.report_of(state)
        return ChatChoice(state.index, message, logprobs, state.finish_reason, state.stop_reason, report)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(ChatChunk(self._id, self._created, self._model, choices, usage))
