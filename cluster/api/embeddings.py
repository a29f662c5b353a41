"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import EngineError, OverloadedError, QuireError
from quire.engine.outputs import EngineOutput, EngineRequest, FloatArray

from ..request_metrics import RequestMetrics
from .answers import Embedding, Embeddings, EmbeddingUsage
from .backend import ServedModel
from .context import ApiContext, off_the_loop, read_body
from .deadline import Deadline, Engines
from .encoding import tokenize, tokenize_start
from .errors import DeadlineError
from .generation import find_model, options_of, raise_unless_answered, wait_for_room
from .parsing import parse_request
from .protocol.embeddings import EmbeddingRequest
from .sse import unless_client_leaves
from .tenants import PromptBill, Tenant, tenant_of
from .whole_answers import whole_response

_AT_ONCE = 256  # inputs of an HTTP request: engines refuse what their queues do not hold, and others wait in them, too


async def embeddings(http: Request, context: ApiContext) -> Response:
    """The vectors of all inputs. Raises `InvalidRequestError` and what the backend raises."""
    body = await read_body(http, context.limits)
    request = await off_the_loop(body, lambda: parse_request(EmbeddingRequest, body, context.limits))
    deadline = Deadline(request.deadline_ms)
    served = await deadline.hold(find_model(context.backend, request.model))
    inputs = await off_the_loop(body, lambda: request.inputs(context.limits.max_inputs))
    metrics = context.metrics.start(served.name, len(inputs))
    token_ids = await deadline.hold(
        context.heavy_work.run(body, lambda: [_token_ids(served, request, each) for each in inputs])
    )
    tenant = tenant_of(http.scope)
    options = options_of(request, served, tenant)
    pooling = request.pooling(served.info.pooling)
    _, engine_id = request.ids("embd-")
    of_input = partial(served.input_processor.process_embedding, pooling=pooling, param="input", options=options)
    request_ids = [f"{engine_id}-{i}" for i in range(len(token_ids))]
    requests = await off_the_loop(body, lambda: list(map(of_input, request_ids, token_ids)))
    run = EmbeddingRun(deadline.over(context.backend), served.name, requests, metrics, tenant)
    vectors = await unless_client_leaves(http.receive, run.vectors())
    num_numbers = sum(vector.size for vector in vectors)  # some 20 characters each: most of the work for many vectors
    return await whole_response(context.heavy_work, num_numbers, lambda: _answer(served, request, token_ids, vectors))


def _token_ids(served: ServedModel, request: EmbeddingRequest, content: str | list[int]) -> list[int]:
    """The tokens of an input. One that is cut keeps the special tokens at its end: they may be what is pooled."""
    longest = request.longest(served.input_processor.max_model_len)
    if isinstance(content, list):
        given = content if longest is None else content[:longest]
        served.input_processor.check_prompt(given, "input", 0)
        return given
    special = request.add_special_tokens
    if longest is None:
        return tokenize(served, content, param="input", add_special_tokens=special)
    token_ids = tokenize_start(served, content, longest, add_special_tokens=special)
    if len(token_ids) <= longest:
        return token_ids
    ending = tokenize(served, "", param="input", add_special_tokens=True) if special else []
    while ending and token_ids[-len(ending) :] != ending:  # what begins a text is no part of its end
        ending = ending[1:]
    kept = max(longest - len(ending), 0)
    return token_ids[:kept] + ending[len(ending) - (longest - kept) :]


class EmbeddingRun:
    """The requests of one HTTP request at work; each counts as an answer in the metrics."""

    def __init__(
        self,
        engines: Engines,
        model: str,
        requests: Sequence[EngineRequest],
        metrics: RequestMetrics,
        tenant: Tenant,
    ) -> None:
        self._engines = engines
        self._model = model
        self._requests = requests
        self._metrics = metrics
        self._bill = PromptBill(tenant, {each.request_id: len(each.prompt_token_ids) for each in requests})
        self._unfinished = {request.request_id: index for index, request in enumerate(requests)}
        self._vectors: list[FloatArray | None] = [None] * len(requests)

    async def vectors(self) -> list[FloatArray]:
        """In the order of the requests. Raises what the backend raises, and `EngineError` when one has no vector."""
        try:
            with self._bill:
                await self._run()
            vectors = [vector for vector in self._vectors if vector is not None]
            if len(vectors) < len(self._vectors):
                raise EngineError("The engine ended its work on this request without an embedding.")
            return vectors
        except QuireError as error:
            self._end_unfinished("deadline" if isinstance(error, DeadlineError) else "error")
            raise
        finally:
            self._end_unfinished("abort")

    async def _run(self) -> None:
        for first in range(0, len(self._requests), _AT_ONCE):
            some = self._requests[first : first + _AT_ONCE]
            while not await self._run_some(some, may_be_refused=first == 0):
                some = [request for request in some if request.request_id in self._unfinished]
            if any(request.request_id in self._unfinished for request in some):
                return  # the answer is an error already

    async def _run_some(self, requests: Sequence[EngineRequest], *, may_be_refused: bool) -> bool:
        """Whether they were taken. What was begun is not lost to a queue that others have filled: it waits for room."""
        left = len(self._unfinished) - len(requests)
        try:
            async with aclosing(self._engines.generate(self._model, requests)) as batches:
                async for outputs in batches:
                    for output in outputs:
                        self._take(output)
                    if len(self._unfinished) <= left:
                        break
        except OverloadedError as refusal:
            if may_be_refused:
                raise
            await wait_for_room(refusal)
            return False
        return True

    def _take(self, output: EngineOutput) -> None:
        if output.finish_reason is None or output.request_id not in self._unfinished:
            return
        index = self._unfinished.pop(output.request_id)
        if output.report is not None:
            self._metrics.reported(output.report)
        self._metrics.ended(index, output.finish_reason)
        raise_unless_answered(output.finish_reason, output)
        num_tokens = len(self._requests[index].prompt_token_ids)
        self._metrics.prompt(num_tokens)
        self._bill.pay(output.request_id)
        self._vectors[index] = output.embedding

    def _end_unfinished(self, reason: Literal["abort", "error", "deadline"]) -> None:
        for index in self._unfinished.values():
            self._metrics.ended(index, reason)
        self._unfinished = {}


def _answer(
    served: ServedModel, request: EmbeddingRequest, token_ids: Sequence[list[int]], vectors: Sequence[FloatArray]
) -> msgspec.Struct:
    data = [Embedding(index, _encoded(vector, request)) for index, vector in enumerate(vectors)]
    num_tokens = sum(map(len, token_ids))
    return Embeddings(data, served.name, EmbeddingUsage(num_tokens, num_tokens))


def _encoded(vector: FloatArray, request: EmbeddingRequest) -> list[float] | str:
    """base64 is of little-endian float32, as OpenAI's."""
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
