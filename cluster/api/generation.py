"""One HTTP request at work: its choices run on the backend, their tokens become text, batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.engine.errors import EngineError, InvalidRequestError, ModelNotFoundError, OverloadedError, QuireError
from quire.engine.input_processor import RequestOptions
from quire.engine.output_processor import RequestState
from quire.engine.outputs import (
    CompletionOutput,
    EngineOutput,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    RequestReport,
)

from ..request_metrics import RequestMetrics
from .answers import PromptTokensDetails, Usage
from .backend import Backend, ServedModel
from .deadline import Engines
from .errors import DeadlineError
from .protocol.generation import GenerationRequest
from .protocol.scheduling import ScheduledRequest
from .resume import EventIds
from .tenants import NOBODY, PromptBill, Tenant

_MOST_WAIT_S = 1.0  # for room in a queue


async def find_model(backend: Backend, name: str) -> ServedModel:
    """Raises `ModelNotFoundError`, which lists what is served, and `EngineError` for a model that cannot be loaded."""
    names = [card.id for card in backend.models()]
    if name not in names:
        raise ModelNotFoundError(name, names)
    return await backend.load(name)


def raise_unless_answered(reason: FinishReason, output: EngineOutput) -> None:
    """Raises `DeadlineError`, `InvalidRequestError` or `EngineError` where a request ended without its answer.

    `output` is its last one.
    """
    if reason == "error" and output.refusal is not None:
        raise InvalidRequestError(output.error or "", output.refusal.param, output.refusal.code)
    if reason == "error":
        raise EngineError(output.error or "The engine failed while it worked on this request.")
    if reason == "deadline":
        raise DeadlineError
    if reason == "abort":
        raise EngineError("The service stopped working on this request.")


def options_of(request: ScheduledRequest, served: ServedModel, tenant: Tenant) -> RequestOptions:
    """What the scheduler is told of a request. Raises `InvalidRequestError`, also where this model or tenant may not
    have what it asks for."""
    options = request.options()
    if options.priority and not served.has_priorities:
        raise InvalidRequestError(
            f"priority: {served.name} serves requests by arrival (scheduler policy fcfs), so that only 0 is allowed, "
            f"got {options.priority}.",
            "priority",
            "unsupported",
        )
    if request.priority is None:
        options = msgspec.structs.replace(options, priority=tenant.default_priority)
    return tenant.options(options)


async def wait_for_room(refusal: OverloadedError) -> None:
    """Until what a full queue has refused may be asked for again, by a request that has begun."""
    await asyncio.sleep(min(refusal.retry_after_s, _MOST_WAIT_S))


class Generation:
    """Runs the choices of all prompts of one HTTP request; `states[i]` is the answer with index i.

    `prompts` has the engine requests of each prompt, one per choice. `tenant` is charged with the tokens as they come,
    a prompt with the first token of its first choice, or when it is given up before. `include_report`: the user wants
    to know where the time went. `marks`: special tokens that stay in the text.
    """

    def __init__(
        self,
        engines: Engines,
        served: ServedModel,
        prompts: Sequence[Sequence[EngineRequest]],
        metrics: RequestMetrics,
        tenant: Tenant = NOBODY,
        *,
        include_report: bool = False,
        marks: frozenset[int] = frozenset(),
        event_ids: EventIds | None = None,
    ) -> None:
        self._engines = engines
        self._model = served.name
        self._requests = [request for choices in prompts for request in choices]
        self._metrics = metrics
        self._event_ids = event_ids
        self._tenant = tenant
        self._num_choices = len(prompts[0])
        self.states = [
            RequestState(request, served.token_decoder, index=i, marks=marks)
            for i, request in enumerate(self._requests)
        ]
        firsts = enumerate(choices[0] for choices in prompts)
        owed = {i: len(first.prompt_token_ids) for i, first in firsts if not first.resume_token_ids}
        self._bill = PromptBill(tenant, owed)
        self._state_of = {state.request_id: state for state in self.states}
        self._num_unfinished = len(self.states)
        self._include_report = include_report
        self._reports: list[RequestReport | None] = [None] * len(self.states)
        metrics.asked(self._num_choices, self._requests[0].sampling_params.max_tokens)
        self._last_words: dict[str, CompletionOutput] = {}  # ends of answers that wait for their engine's report

    async def deltas(self) -> AsyncGenerator[list[CompletionOutput], None]:
        """What is new, each time that something is. Iterated once; closing it early aborts what still runs.

        Raises what the backend raises, and `EngineError` when an answer ends with an error.
        """
        try:
            for deltas in self._by_event(self._resume()):
                yield deltas
            running = [r for r, state in zip(self._requests, self.states, strict=True) if not state.finished]
            if not running:
                return
            with self._bill:
                async with aclosing(self._engines.generate(self._model, running)) as batches:
                    async for outputs in batches:
                        for deltas in self._by_event(self._take(outputs)):
                            yield deltas
                        if not self._num_unfinished:
                            return
            if len(self._last_words) < self._num_unfinished:
                raise EngineError("The engine ended its work on this request without an answer.")
            for deltas in self._by_event(list(self._last_words.values())):  # their engine was lost before it reported
                yield deltas
        except QuireError as error:
            self._end_unfinished("deadline" if isinstance(error, DeadlineError) else "error")
            raise
        finally:
            self._end_unfinished("abort")

    def _by_event(self, deltas: list[CompletionOutput]) -> Iterator[list[CompletionOutput]]:
        """Those that become an event together: all, or where events are numbered, each by itself."""
        if self._event_ids is None:
            if deltas:
                yield deltas
            return
        for delta in deltas:
            self._event_ids.advance(delta)
            yield [delta]

    def prompt_logprobs(self, index: int) -> PromptLogprobs | None:
        """Of the prompt of answer `index`, if they were asked for and have come."""
        return self.states[index - index % self._num_choices].prompt_logprobs

    @property
    def size(self) -> int:
        """Tokens and logprobs that there are to tell so far."""
        firsts = self.states[:: self._num_choices]
        of_prompts = sum(state.prompt_logprobs.token_ids.size for state in firsts if state.prompt_logprobs is not None)
        num_tokens = sum(len(state.token_ids) for state in self.states)
        num_top = self._requests[0].sampling_params.logprobs
        of_token = 1 if num_top is None else 2 + num_top
        return num_tokens * of_token + of_prompts * self._num_choices

    async def run(self) -> None:
        """Wait until every answer is complete."""
        async with aclosing(self.deltas()) as batches:
            async for _ in batches:
                pass

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        firsts = self.states[:: self._num_choices]
        prompt_tokens = sum(state.num_prompt_tokens for state in firsts)
        completion_tokens = sum(len(state.token_ids) for state in self.states)
        cached = PromptTokensDetails(sum(state.num_cached_tokens for state in firsts))
        return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached)

    def report_of(self, answer: CompletionOutput | RequestState) -> RequestReport | UnsetType | None:
        """For the end of an answer, where the user asked for it; None when the engine has told nothing."""
        if not self._include_report or answer.finish_reason is None:
            return UNSET
        return self._reports[answer.index]

    def usage_of_chunk(self, request: GenerationRequest) -> Usage | UnsetType | None:
        """What a chunk with text says of the usage."""
        if request.continuous_usage:
            return self.usage()
        return None if request.include_usage else UNSET

    def _resume(self) -> list[CompletionOutput]:
        """Take the tokens that requests resume with. Only a stop string can end an answer among them."""
        deltas = []
        for request, state in zip(self._requests, self.states, strict=True):
            if request.resume_token_ids:
                delta = state.push(EngineOutput(request.request_id, 0, request.resume_token_ids))
                if delta is not None:
                    deltas.append(delta)
                self._num_unfinished -= state.finished
        return deltas

    def _parts(self, outputs: list[EngineOutput]) -> Iterator[EngineOutput]:
        """The outputs, cut where one event must not show all of it."""
        for output in outputs:
            state = self._state_of.get(output.request_id)
            if self._event_ids is None or state is None:
                yield output
            else:
                yield from self._event_ids.cut(state.index, len(state.token_ids), output)

    def _take(self, outputs: list[EngineOutput]) -> list[CompletionOutput]:
        deltas, stopped = [], []
        for output in self._parts(outputs):
            state = self._state_of.get(output.request_id)
            if state is None:
                continue
            if output.report is not None:
                self._reports[state.index] = output.report
                self._metrics.reported(output.report)
            if state.finished:
                last_words = self._last_words.pop(state.request_id, None) if output.finish_reason else None
                if last_words is not None:
                    self._num_unfinished -= 1
                    deltas.append(last_words)
                continue
            num_known = len(state.token_ids)
            delta = state.push(output)
            num_new = len(state.token_ids) - num_known
            if num_new:
                self._metrics.tokens(state.index, num_new)
                self._tenant.used(num_new)
            is_computed = num_new > 0 or output.finish_reason in ("stop", "length")
            if num_known == 0 and is_computed and state.index % self._num_choices == 0:
                self._bill.pay(state.index // self._num_choices)
                self._metrics.prompt(state.num_prompt_tokens)
            if delta is not None:
                deltas.append(delta)
            if state.finish_reason is not None:
                self._ended(state, output)
                if state.stopped_here:
                    stopped.append(state.request_id)
                if state.stopped_here and self._include_report:
                    self._last_words[state.request_id] = deltas.pop()
                else:
                    self._num_unfinished -= 1
        if stopped:
            self._engines.abort(stopped, report=True)  # it is counted, whoever wants to see it
        return deltas

    def _ended(self, state: RequestState, output: EngineOutput) -> None:
        """Raises `DeadlineError`, `InvalidRequestError` or `EngineError` unless the answer is one."""
        assert state.finish_reason is not None
        self._metrics.ended(state.index, state.finish_reason)
        raise_unless_answered(state.finish_reason, output)

    def _end_unfinished(self, reason: Literal["abort", "error", "deadline"]) -> None:
        for state in self.states:
            if state.finish_reason is None:
                state.finish_reason = reason
                self._metrics.ended(state.index, reason)
