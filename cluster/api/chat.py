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
from .beam_search import generation_of
from .context import ApiContext, check_choices, json_response, off_the_loop, read_body, stream_response
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
    ChatLogprobs,
    Usage,
)
from .sse import DONE, event, unless_client_leaves
from .tenants import tenant_of


async def chat_completions(http: Request, context: ApiContext) -> Response:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(ChatCompletionRequest, body, context.limits))
    served = await find_model(context.backend, request.model)
    check_choices(1, request.n, context.limits)
    metrics = context.metrics.start(served.name, request.n or 1)
    prompt = await off_the_loop(body, lambda: _token_ids(served, request))
    room = served.input_processor.room_after(prompt, "messages")
    params = request.sampling_params(served.info.generation_defaults, room)
    answer_id, engine_id = request.ids("chatcmpl")
    tenant = tenant_of(http.scope)
    options = tenant.options(request.options())
    requests = served.input_processor.process(engine_id, prompt, params, param="messages", options=options)
    generation = generation_of(context, served, [requests], metrics, request, tenant)
    answer = _ChatAnswer(answer_id, served, generation, request, prompt)
    if request.stream:
        return await stream_response(http, answer.events())
    await unless_client_leaves(http.receive, generation.run())
    return json_response(answer.whole())


def _token_ids(served: ServedModel, request: ChatCompletionRequest) -> list[int]:
    cut = request.truncate_prompt_tokens is not None
    text = render(served, request)
    token_ids = tokenize(served, text, param="messages", add_special_tokens=False, will_be_cut=cut)
    max_tokens = request.max_completion_tokens or request.max_tokens or 1
    return request.truncated(token_ids, served.input_processor.max_model_len, max_tokens)


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

    def __init__(
        self,
        answer_id: str,
        served: ServedModel,
        generation: Generation,
        request: ChatCompletionRequest,
        prompt_token_ids: list[int],
    ) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = served.name
        self._decoder = served.token_decoder
        self._generation = generation
        self._request = request
        self._prompt_token_ids = prompt_token_ids if request.return_token_ids else UNSET

    def whole(self) -> ChatCompletion:
        choices = [self._choice(state) for state in self._generation.states]
        usage = self._generation.usage()
        return ChatCompletion(
            self._id, self._created, self._model, choices, usage, prompt_token_ids=self._prompt_token_ids
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Role first, deltas, the end of each choice in its last delta, usage when asked for, [DONE]."""
        include_usage = self._request.include_usage
        roles = b"".join(self._role_event(state.index) for state in self._generation.states)
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                usage = self._generation.usage_of_chunk(self._request)
                yield roles + b"".join([self._event([self._chunk_choice(delta)], usage) for delta in deltas])
                roles = b""
        yield (self._event([], self._generation.usage()) if include_usage else b"") + DONE

    def _role_event(self, index: int) -> bytes:
        chunk = self._chunk(
            [ChatChunkChoice(index, ChatDelta("assistant", ""))], self._generation.usage_of_chunk(self._request)
        )
        if index == 0:
            chunk.prompt_token_ids = self._prompt_token_ids
        return event(chunk)

    def _chunk_choice(self, delta: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            delta.index,
            ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            self._logprobs(delta),
            delta.finish_reason,
            UNSET if delta.finish_reason is None else delta.stop_reason,
            self._generation.report_of(delta),
            delta.token_ids if self._request.return_token_ids else UNSET,
        )

    def _choice(self, state: RequestState) -> ChatChoice:
        return ChatChoice(
            state.index,
            AssistantMessage(state.text),
            self._logprobs(state),
            state.finish_reason,
            state.stop_reason,
            self._generation.report_of(state),
            state.token_ids if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, answer: CompletionOutput | RequestState) -> ChatLogprobs | None:
        if answer.logprobs is None:
            return None
        return chat_logprobs(answer.logprobs, self._decoder, as_ids=self._request.return_tokens_as_token_ids)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(self._chunk(choices, usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, choices, usage)
