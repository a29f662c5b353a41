"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.outputs import CompletionOutput

from .backend import ServedModel
from .context import ApiContext, check_choices, json_response, new_id, off_the_loop, read_body, stream_response
from .generation import Generation, find_model, tokenize
from .logprobs import completion_logprobs
from .parsing import parse_request
from .protocol import CompletionRequest
from .responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from .sse import DONE, event, unless_client_leaves


async def completions(http: Request, context: ApiContext) -> Response:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(CompletionRequest, body))
    served = await find_model(context.backend, request.model)
    prompts = await off_the_loop(body, request.prompts)
    check_choices(len(prompts), request.n, context.limits)
    metrics = context.metrics.start(served.name, len(prompts) * (request.n or 1))
    token_ids, room = await off_the_loop(body, lambda: _tokenize_all(served, prompts))
    params = request.sampling_params(served.info.generation_defaults, room)
    options = request.options()
    answer_id = new_id("cmpl")
    engine_requests = []
    for i, prompt_token_ids in enumerate(token_ids):
        request_id = answer_id if len(prompts) == 1 else f"{answer_id}-p{i}"
        engine_requests.append(served.input_processor.process(request_id, prompt_token_ids, params, options=options))
    generation = Generation(context.backend, served, engine_requests, metrics, include_report=request.include_report)
    echoed = await off_the_loop(body, lambda: _echoed_texts(served, prompts, params.n)) if request.echo else []
    answer = _CompletionAnswer(answer_id, served, generation, echoed)
    if request.stream:
        return await stream_response(http, answer.events(include_usage=request.include_usage))
    await unless_client_leaves(http.receive, generation.run())
    return json_response(answer.whole())


def _tokenize_all(served: ServedModel, prompts: list[str | list[int]]) -> tuple[list[list[int]], int]:
    """Token ids of each prompt, and what the context leaves after the longest. Raises `InvalidRequestError`."""
    token_ids = [
        tokenize(served, prompt, param="prompt", add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]
    return token_ids, min(served.input_processor.room_after(prompt) for prompt in token_ids)


def _echoed_texts(served: ServedModel, prompts: list[str | list[int]], n: int) -> list[str]:
    """The prompt's text for each choice."""
    decode = served.token_decoder.decode
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(n)]


class _CompletionAnswer:
    """Shapes what a generation yields. `echoed` has a text to put before each choice, or nothing."""

    def __init__(self, answer_id: str, served: ServedModel, generation: Generation, echoed: list[str]) -> None:
        self._id = answer_id
        self._created = int(time.time())
        self._model = served.name
        self._decoder = served.token_decoder
        self._generation = generation
        self._echoed = echoed
        self._offsets = [0] * len(generation.states)  # characters of each choice's tokens so far, for logprobs

    def whole(self) -> Completion:
        choices = [self._choice(state.completion()) for state in self._generation.states]
        return Completion(self._id, self._created, self._model, choices, self._generation.usage())

    async def events(self, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Deltas, the end of each choice in its last one, usage when asked for, [DONE]."""
        no_usage: UnsetType | None = None if include_usage else UNSET
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                yield b"".join([self._event([self._choice(delta)], no_usage) for delta in deltas])
        yield (self._event([], self._generation.usage()) if include_usage else b"") + DONE

    def _choice(self, output: CompletionOutput) -> CompletionChoice:
        text, index = output.text, output.index
        if self._echoed:
            text, self._echoed[index] = self._echoed[index] + text, ""
        logprobs, report = self._logprobs(output), self._generation.report_of(output)
        return CompletionChoice(index, text, logprobs, output.finish_reason, output.stop_reason, report)

    def _logprobs(self, output: CompletionOutput) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        logprobs, self._offsets[output.index] = completion_logprobs(
            output.logprobs, self._decoder, self._offsets[output.index]
        )
        return logprobs

    def _event(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(Completion(self._id, self._created, self._model, choices, usage))
