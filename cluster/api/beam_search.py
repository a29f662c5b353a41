"""Beam search for one HTTP request: each step asks the engines for one token after every beam."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from quire.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from quire.engine.errors import EngineError, OverloadedError, QuireError
from quire.engine.outputs import EngineOutput, EngineRequest, FinishReason

from ..request_metrics import RequestMetrics
from .backend import ServedModel
from .context import ApiContext
from .deadline import Deadline, Engines
from .errors import DeadlineError
from .generation import Generation, wait_for_room
from .protocol.generation import GenerationRequest
from .resume import Begun
from .tenants import NOBODY, PromptBill, Tenant


def generation_of(
    context: ApiContext,
    served: ServedModel,
    begun: Begun,
    metrics: RequestMetrics,
    request: GenerationRequest,
    tenant: Tenant,
    deadline: Deadline,
    *,
    marks: frozenset[int] = frozenset(),
) -> Generation:
    """What answers a request: sampling, or a search. Raises `InvalidRequestError`."""
    prompts = begun.prompts
    engines = deadline.over(context.backend)
    params = request.beam_search_params(prompts[0][0].sampling_params)
    if params is None:
        return Generation(
            engines,
            served,
            prompts,
            metrics,
            tenant,
            include_report=request.include_report,
            marks=marks,
            event_ids=begun.event_ids,
        )
    return BeamGeneration(engines, served, prompts, metrics, tenant, params, marks)


class BeamGeneration(Generation):
    """The choices of a prompt are its beams, the best first. They are known only when the search is over: `run` it.

    The tenant is charged for each step: every token that an engine makes, beam or not, and those it has to read for it.
    """

    def __init__(
        self,
        engines: Engines,
        served: ServedModel,
        prompts: Sequence[Sequence[EngineRequest]],
        metrics: RequestMetrics,
        tenant: Tenant,
        params: BeamSearchParams,
        marks: frozenset[int],
    ) -> None:
        super().__init__(engines, served, prompts, metrics, NOBODY, marks=marks)  # the steps are charged, not the beams
        self._payer = tenant
        self._firsts = [choices[0] for choices in prompts]
        processor = served.input_processor
        self._search = BeamSearch(
            [request.prompt_token_ids for request in self._firsts],
            params,
            processor.info.eos_token_ids,
            processor.max_model_len,
        )
        self._begun = time.monotonic()
        self._num_steps = 0
        self._num_cached = [0] * len(prompts)  # prompt tokens that the first step found in the cache

    async def run(self) -> None:
        """Search to the end. Raises what the backend raises, `DeadlineError` and `EngineError`."""
        try:
            while wanted := self._search.wanted():
                self._search.advance(await self._step_with_patience(wanted))
                self._num_steps += 1
            for i, beams in enumerate(self._search.results()):
                for rank, beam in enumerate(beams):
                    self._answer(i * self._num_choices + rank, beam, self._num_cached[i])
                    await asyncio.sleep(0)  # a long beam takes a while to become text: others go on in between
        except QuireError as error:
            self._end_unfinished("deadline" if isinstance(error, DeadlineError) else "error")
            raise
        finally:
            self._end_unfinished("abort")

    async def _step_with_patience(self, wanted: list[list[int]]) -> list[list[tuple[int, float]]]:
        """A search that has begun is not lost to a queue that others have filled: it waits for room."""
        while True:
            try:
                return await self._step(wanted)
            except OverloadedError as refusal:
                if self._num_steps == 0:
                    raise
                await wait_for_room(refusal)

    async def _step(self, wanted: list[list[int]]) -> list[list[tuple[int, float]]]:
        """The likeliest tokens after each prompt."""
        requests = [self._request(i, token_ids) for i, token_ids in enumerate(wanted)]
        position = {request.request_id: i for i, request in enumerate(requests)}
        tops: list[list[tuple[int, float]]] = [[] for _ in wanted]
        bill = PromptBill(self._payer, self._num_new_tokens(wanted))
        with bill:
            async with aclosing(self._engines.generate(self._model, requests)) as batches:
                async for output in _each(batches):
                    self._check(output)
                    i = position[output.request_id]
                    if output.logprobs and not tops[i]:
                        tops[i] = output.logprobs[0].top
                        bill.pay(i)
                        self._payer.used(1 + self._num_repeated(wanted[i], output.num_cached_tokens))
                    if self._num_steps == 0:
                        self._num_cached[i] = output.num_cached_tokens
        if not all(tops):
            raise EngineError("The engine ended its work on this request without an answer.")
        return tops

    def _num_new_tokens(self, wanted: list[list[int]]) -> dict[int, int]:
        """Tokens of each prompt that the step before has not sent."""
        return {i: len(token_ids) if self._num_steps == 0 else 1 for i, token_ids in enumerate(wanted)}

    def _num_repeated(self, token_ids: list[int], num_cached: int) -> int:
        """Tokens that an earlier step has sent, and that an engine computes again as its cache lacks them."""
        return 0 if self._num_steps == 0 else max(0, len(token_ids) - 1 - num_cached)

    def _request(self, i: int, token_ids: list[int]) -> EngineRequest:
        first = self._firsts[0]
        deadline_ms = first.deadline_ms
        if deadline_ms is not None:
            deadline_ms -= round(1000 * (time.monotonic() - self._begun))
            if deadline_ms < 1:
                raise DeadlineError
        return msgspec.structs.replace(
            first,
            request_id=f"{first.request_id}-s{self._num_steps}-{i}",
            prompt_token_ids=token_ids,
            sampling_params=self._search.one_token,
            deadline_ms=deadline_ms,
        )

    def _check(self, output: EngineOutput) -> None:
        if output.finish_reason == "deadline":
            raise DeadlineError
        if output.finish_reason in ("error", "abort"):
            raise EngineError(output.error or "The service stopped working on this request.")

    def _answer(self, index: int, beam: Beam, num_cached: int) -> None:
        """Shape a beam as if an engine had sent it in one piece."""
        state = self.states[index]
        reason: FinishReason = "stop" if beam.finished else "length"
        token_ids = beam.token_ids
        self._take([EngineOutput(state.request_id, 0, token_ids, reason, num_cached_tokens=num_cached)])


async def _each(batches: AsyncGenerator[list[EngineOutput], None]) -> AsyncGenerator[EngineOutput, None]:
    async for outputs in batches:
        for output in outputs:
            yield output
