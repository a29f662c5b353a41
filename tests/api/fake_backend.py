"""A backend without engines, for tests of the API: it answers every prompt with a text that it was given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import numpy as np

from quire.cluster.api.answers import ModelCard
from quire.cluster.api.backend import ServedModel
from quire.cluster.api.health import EngineHealth, ModelHealth, ServiceHealth
from quire.cluster.messages import ResumePoint
from quire.cluster.metrics import EngineStats
from quire.engine.outputs import (
    EngineOutput,
    EngineRequest,
    PromptLogprobs,
    Refusal,
    RequestReport,
    SchedulerStats,
    TokenLogprobs,
)

DEFAULT_ANSWER = " The year 2024: 你好 🎉 and more."


class FakeBackend:
    """Answers choice `i` with the tokens of `answer` from token `i` on, then EOS; `tokens_per_step` in each item.

    `refusal` is raised instead of any output; `failure` ends every answer after `failure_after` tokens: a string as an
    error of the request, an exception by raising it. `gate` (when cleared) holds every answer after the first token.
    With `repeat` every token is sent twice, as after a change of engines.
    """

    def __init__(self, served: ServedModel, answer: str = DEFAULT_ANSWER) -> None:
        self.served = served
        self.answer_ids: list[int] = served.input_processor.tokenize(answer, add_special_tokens=False)
        self.tokens_per_step = 1
        self.num_cached_tokens = 0
        self.repeat = False
        self.refusal: Exception | None = None
        self.failure: str | Exception | None = None
        self.failure_after = 3
        self.late_refusal: Refusal | None = None  # that `failure` is the request's own fault
        self.deadline_after: int | None = None  # tokens after which the deadline of every request passes
        self.report: RequestReport | None = None
        self.says_at_once: EngineOutput | None = None  # of every request, before any token
        self.answers_nothing: asyncio.Event | None = None  # until it is set
        self.reports_aborts = True  # False: as if the engine were lost before
        self.last_words: dict[str, EngineOutput] = {}
        self.unhealthy: str | None = None
        self.is_asleep = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []  # by `abort`
        self.remembered: dict[bytes, list[ResumePoint]] = {}
        self.running: dict[str, EngineRequest] = {}
        self.started = asyncio.Event()
        self.closed_early = asyncio.Event()

    def models(self) -> Sequence[ModelCard]:
        return [self.served.card()]

    async def load(self, model: str) -> ServedModel:
        assert model == self.served.name
        return self.served

    async def generate(self, model: str, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        assert model == self.served.name
        if self.refusal is not None:
            raise self.refusal
        self.requests += requests
        mine = {request.request_id: request for request in requests}
        self.running |= mine
        self.started.set()
        num_sent = {request.request_id: len(request.resume_token_ids) for request in requests}
        if self.says_at_once is not None:
            for request_id in mine:
                del self.running[request_id]
            yield [msgspec.structs.replace(self.says_at_once, request_id=request_id) for request_id in mine]
            return
        if self.answers_nothing is not None:
            await self.answers_nothing.wait()
        try:
            while any(request_id in self.running for request_id in mine):
                batch = [self._step(self.running[i], num_sent) for i in mine if i in self.running]
                yield [output for outputs in batch for output in outputs]
                if last_words := [self.last_words.pop(i) for i in mine if i in self.last_words]:
                    yield last_words
                await asyncio.sleep(0)
                await self.gate.wait()
        finally:
            unfinished = [request_id for request_id in mine if self.running.pop(request_id, None)]
            if unfinished:
                self.closed_early.set()

    def _step(self, request: EngineRequest, num_sent: dict[str, int]) -> list[EngineOutput]:
        request_id, params = request.request_id, request.sampling_params
        first = num_sent[request_id]
        answer = [*self.answer_ids[request.choice_index :], *request.eos_token_ids[:1]]
        most = len(answer) if params.max_tokens is None else params.max_tokens
        end = min(first + self.tokens_per_step, len(answer), most)
        num_sent[request_id] = end
        reason, error = None, None
        if self.failure is not None and end >= self.failure_after:
            if isinstance(self.failure, Exception):
                raise self.failure
            reason, error = "error", self.failure
        elif self.deadline_after is not None and end >= self.deadline_after:
            reason = "deadline"
        elif end == len(answer):
            reason = "stop"
        elif end == params.max_tokens:
            reason = "length"
        if request.pooling is not None:
            reason, end = "stop" if error is None and reason != "deadline" else reason, 0
        if reason is not None:
            del self.running[request_id]
        begin = max(0, first - 1) if self.repeat else first
        token_ids = answer[begin:end]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [self.logprobs_of(token_id, params.logprobs) for token_id in token_ids]
        return [
            EngineOutput(
                request_id,
                begin,
                token_ids,
                reason,  # type: ignore[arg-type]
                logprobs=logprobs,
                num_cached_tokens=self.num_cached_tokens,
                error=error,
                refusal=self.late_refusal if error is not None else None,
                report=None if reason is None else self.report,
                prompt_logprobs=None if params.prompt_logprobs is None else self.prompt_logprobs_of(request),
                embedding=self.embedding_of(request) if request.pooling is not None and reason == "stop" else None,
            )
        ]

    @staticmethod
    def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
        """The sampled token first, then the ids after it."""
        top = [(token_id + i, float("-inf") if i == 3 else -0.5 - i) for i in range(num_top)]
        return TokenLogprobs(token_id, -0.5, 1, top)

    @staticmethod
    def prompt_logprobs_of(request: EngineRequest) -> PromptLogprobs:
        """Position p has logprob -p / 4 and rank p; the likeliest are tokens 0, 1, ... with -1, -2, ..."""
        num_top, own = request.sampling_params.prompt_logprobs or 0, request.prompt_token_ids[1:]
        positions = np.arange(1, len(own) + 1)
        top = np.tile(np.arange(num_top), (len(own), 1))
        return PromptLogprobs(
            1,
            np.hstack([np.array(own, np.int32)[:, None], top]).astype(np.int32),
            np.hstack([-positions[:, None] / 4, -1.0 - top]).astype(np.float32),
            positions.astype(np.int32),
        )

    @staticmethod
    def embedding_of(request: EngineRequest) -> np.ndarray:
        """Every component is the sum of the prompt's token ids, and a fraction that float16 could not hold."""
        assert request.pooling is not None
        size = request.pooling.dimensions or 576
        return np.full(size, sum(request.prompt_token_ids) + 1 / 1024, np.float32)

    def abort(self, request_ids: Sequence[str], *, report: bool = False) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None and report and self.reports_aborts:
                last = EngineOutput(request_id, 0, [], "abort", report=self.report)
                self.last_words.setdefault(request_id, last)

    async def recall(self, key: bytes) -> Sequence[ResumePoint]:
        return self.remembered.get(key, [])

    def health(self) -> ServiceHealth:
        if self.is_asleep:
            return ServiceHealth([ModelHealth(self.served.name, is_asleep=True)])
        engine = EngineHealth("engine-0", self.unhealthy, num_running=len(self.running), num_waiting=2)
        return ServiceHealth([ModelHealth(self.served.name, [engine])])

    async def stats(self) -> Sequence[EngineStats]:
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=2,
            num_waiting_by_cause={"kv_blocks": 2},
            num_blocks=8,
            num_used_blocks=2,
            num_prompt_tokens=11,
            num_generation_tokens=12,
            num_preemptions=1,
            prefix_cache_queries=20,
            prefix_cache_hits=5,
            prefix_cache_ghost_hits=3,
            num_evictions=4,
            num_deadlines_missed=1,
            num_waiting_tokens=70,
        )
        return [EngineStats("engine-0", self.served.name, stats)]
