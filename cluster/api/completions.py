"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequestError
from quire.engine.output_processor import RequestState
from quire.engine.outputs import CompletionOutput
from quire.engine.sampling_params import SamplingParams

from .answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from .backend import ServedModel
from .beam_search import generation_of
from .context import ApiContext, check_choices, off_the_loop, read_body, stream_response
from .deadline import Deadline
from .encoding import tokenize, tokenize_end
from .generation import Generation, find_model, options_of
from .heavy_work import HeavyWork
from .logprobs import (
    TextOffsets,
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs_by_token,
)
from .parsing import parse_request
from .protocol import CompletionRequest
from .protocol.generation import num_kept
from .resume import Begun, may_resume
from .sse import DONE, event, unless_client_leaves
from .tenants import tenant_of
from .whole_answers import whole_response

MAX_PROMPT_LOGPROBS = 1 << 20  # in one response, of more than one answer: some 230 bytes each, and 80 of JSON


async def completions(http: Request, context: ApiContext) -> Response:
    """Answer, whole or as a stream. Raises `InvalidRequestError` and what the backend raises before the first token."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(CompletionRequest, body, context.limits))
    deadline = Deadline(request.deadline_ms)
    served = await deadline.hold(find_model(context.backend, request.model))
    check_choices(request.num_prompts, request.num_choices, context.limits, "best_of" if request.best_of else "n")
    prompts = await off_the_loop(body, request.prompts)
    metrics = context.metrics.start(served.name, len(prompts) * request.num_choices)
    token_ids, room = await deadline.hold(context.heavy_work.run(body, lambda: _tokenize_all(served, request, prompts)))
    params = request.sampling_params(served.info.generation_defaults, room)
    _check_prompt_logprobs(params, token_ids, request.n or 1)
    tenant = tenant_of(http.scope)
    options = options_of(request, served, tenant)
    answer_id, engine_id = request.ids("cmpl-")
    of_prompt = partial(served.input_processor.process, params=params, options=options)
    request_ids = [engine_id if len(prompts) == 1 else f"{engine_id}-p{i}" for i in range(len(prompts))]
    engine_requests = await off_the_loop(body, lambda: list(map(of_prompt, request_ids, token_ids)))
    begun = Begun(engine_requests, answer_id, int(time.time()))
    if request.stream:
        begun = await deadline.hold(may_resume(begun, http, body, context.backend, served.name))
    generation = generation_of(context, served, begun, metrics, request, tenant, deadline)
    shown = prompts if request.truncate_prompt_tokens is None else token_ids
    echoed = await off_the_loop(body, lambda: _echoed_texts(served, shown, params)) if request.echo else []
    answer = _CompletionAnswer(begun, served, generation, request, token_ids, echoed)
    if request.stream:
        return await stream_response(http, answer.events(context.heavy_work), begun.event_ids)
    await unless_client_leaves(http.receive, generation.run())
    return await whole_response(context.heavy_work, generation.size + answer.num_repeated, answer.whole)


def _tokenize_all(
    served: ServedModel, request: CompletionRequest, prompts: list[str | list[int]]
) -> tuple[list[list[int]], int]:
    """Token ids of each prompt, and what the context leaves after the longest. Raises `InvalidRequestError`."""
    max_model_len = served.input_processor.max_model_len
    max_tokens = request.default_max_tokens if request.max_tokens is None else max(1, request.max_tokens)
    most = num_kept(request.truncate_prompt_tokens, max_model_len, max_tokens)
    token_ids = [_tokens_of(served, request, prompt, most) for prompt in prompts]
    return token_ids, min(served.input_processor.room_after(prompt) for prompt in token_ids)


def _tokens_of(served: ServedModel, request: CompletionRequest, prompt: str | list[int], most: int | None) -> list[int]:
    special = request.add_special_tokens
    if not isinstance(prompt, str):
        return prompt if most is None else prompt[-most:]
    if most is None:
        return tokenize(served, prompt, param="prompt", add_special_tokens=special)
    return tokenize_end(served, prompt, most, add_special_tokens=special)


def _check_prompt_logprobs(params: SamplingParams, prompts: Sequence[list[int]], n: int) -> None:
    """Each of a prompt's `n` answers says all that was asked of it, and all are in memory until they are sent. Raises
    `InvalidRequestError`."""
    if params.prompt_logprobs is None or len(prompts) * n == 1:
        return
    asked = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * n
    if asked > MAX_PROMPT_LOGPROBS:
        param = "n" if n > 1 else "prompt"
        raise InvalidRequestError(
            f"{param}: {asked:,} logprobs of prompts in one response (tokens x {1 + params.prompt_logprobs} x n); "
            f"for more than one answer at most {MAX_PROMPT_LOGPROBS:,} are allowed.",
            param,
        )


def _echoed_texts(served: ServedModel, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[str]:
    """The prompt's text for each choice."""
    decode = partial(served.token_decoder.decode, skip_special_tokens=params.skip_special_tokens)
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
    return [text for text in texts for _ in range(params.n)]


class _CompletionAnswer:
    """Shapes what a generation yields. `echoed` has a text to put before each choice, or nothing."""

    def __init__(
        self,
        begun: Begun,
        served: ServedModel,
        generation: Generation,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        echoed: list[str],
    ) -> None:
        self._id = begun.answer_id
        self._created = begun.created
        self._model = served.name
        self._decoder = served.token_decoder
        self._names = TokenNames(served.token_decoder, as_ids=request.return_tokens_as_token_ids, spells_bytes=True)
        self._generation = generation
        self._request = request
        self._prompts = prompts
        self._echoed = echoed
        self._begun: set[int] = set()  # choices of which something was sent
        params = begun.prompts[0][0].sampling_params
        self._offsets = [
            TextOffsets(
                self._decoder,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            for _ in generation.states
        ]
        self._scores_prompt = request.echo and request.logprobs is not None
        self._unscored = set(range(len(generation.states))) if self._scores_prompt else set()  # no echo sent yet
        self._waiting: list[CompletionOutput] = []  # deltas of choices that came before their prompt's logprobs

    @property
    def num_repeated(self) -> int:
        """About how many tokens of prompts the choices of a whole answer repeat."""
        echoed = sum(map(len, self._echoed)) // 4
        if not self._request.return_token_ids:
            return echoed
        return echoed + sum(map(len, self._prompts)) * self._request.num_choices

    def whole(self) -> Completion:
        choices = []
        for index, state in enumerate(self._best()):
            choices.append(self._choice(state.completion()))
            choices[-1].index = index
            state.logprobs = None  # so they end one by one, not all at once
        return Completion(self._id, self._created, self._model, choices, self._generation.usage())

    async def events(self, heavy_work: HeavyWork) -> AsyncGenerator[bytes, None]:
        """Deltas, the end of each choice in its last one, usage when asked for, [DONE]."""
        include_usage = self._request.include_usage
        async with aclosing(self._generation.deltas()) as batches:
            async for deltas in batches:
                usage = self._generation.usage_of_chunk(self._request)
                complete = self._complete(deltas)
                if not self._unscored:
                    yield self._events(complete, usage)
                    continue
                shape = partial(self._events, complete, usage)
                yield await heavy_work.shape(self._num_echoed_logprobs(complete), shape)
        usage = self._generation.usage_of_chunk(self._request)
        left = self._events(self._waiting, usage)
        yield left + (self._event([], self._generation.usage()) if include_usage else b"") + DONE

    def _events(self, deltas: list[CompletionOutput], usage: Usage | UnsetType | None) -> bytes:
        return b"".join([self._event([self._choice(delta)], usage) for delta in deltas])

    def _num_echoed_logprobs(self, deltas: list[CompletionOutput]) -> int:
        """Logprobs of prompts that these deltas bring."""
        told = (self._generation.prompt_logprobs(delta.index) for delta in deltas if delta.index in self._unscored)
        return sum(logprobs.token_ids.size for logprobs in told if logprobs is not None)

    def _complete(self, deltas: list[CompletionOutput]) -> list[CompletionOutput]:
        """The deltas that can be sent now: a prompt's first choice brings its logprobs, and others may be faster."""
        if not self._scores_prompt:
            return deltas
        told = [self._generation.prompt_logprobs(index) is not None for index in range(len(self._offsets))]
        waiting = self._waiting + deltas
        self._waiting = [delta for delta in waiting if not told[delta.index]]
        return [delta for delta in waiting if told[delta.index]]

    def _best(self) -> list[RequestState]:
        """The `n` of each prompt that are returned: with `best_of`, those with the highest logprob per token."""
        states, num_made, n = self._generation.states, self._request.num_choices, self._request.n or 1
        if num_made == n:
            return states
        of_prompts = [states[start : start + num_made] for start in range(0, len(states), num_made)]
        return [state for each in of_prompts for state in sorted(each, key=_mean_logprob, reverse=True)[:n]]

    def _choice(self, output: CompletionOutput) -> CompletionChoice:
        text, index = output.text, output.index
        logprobs, report = self._logprobs(output), self._generation.report_of(output)
        if self._echoed:
            text, self._echoed[index] = self._echoed[index] + text, ""
        choice = CompletionChoice(index, text, logprobs, output.finish_reason, output.stop_reason, report)
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
            if index not in self._begun:
                self._begun.add(index)
                choice.prompt_token_ids = self._prompts[index // self._request.num_choices]
        if self._request.prompt_logprobs is not None:
            told = self._generation.prompt_logprobs(index)
            num_top = self._request.prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs_by_token(told, self._decoder, num_top)
        return choice

    def _logprobs(self, output: CompletionOutput) -> CompletionLogprobs | None:
        if output.logprobs is None or self._request.logprobs is None:
            return None
        index, echoed = output.index, None
        told = self._generation.prompt_logprobs(index)
        if told is not None and index in self._unscored:
            self._unscored.remove(index)
            prompt = self._prompts[index // self._request.num_choices]
            text = self._echoed[index]
            echoed = echoed_logprobs(prompt, text, told, self._decoder, self._names, self._request.logprobs)
            self._offsets[index].position = len(text)
        logprobs = completion_logprobs(output.logprobs, self._names, self._offsets[index])
        return logprobs if echoed is None else joined(echoed, logprobs)

    def _event(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(Completion(self._id, self._created, self._model, choices, usage))


def _mean_logprob(state: RequestState) -> float:
    return (state.cumulative_logprob or 0.0) / max(1, len(state.token_ids))
