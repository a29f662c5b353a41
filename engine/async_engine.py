"""An engine for programs that live in an event loop: each request is an asynchronous iterator."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .core import EngineCore
from .detokenizer import TokenDecoder
from .errors import EngineError, InvalidRequestError, QuireError
from .input_processor import InputProcessor, RequestOptions
from .llm import Prompt, embedding_output, split_prompt
from .loop import EngineLoop
from .output_processor import OutputKind, OutputProcessor
from .outputs import EmbeddingOutput, EngineOutput, EngineRequest, RequestOutput, SchedulerStats
from .pooling import PoolingParams
from .sampling_params import SamplingParams

_Item = RequestOutput | EngineError


class AsyncEngine:
    """Runs a core in a thread of its own. All methods belong to the event loop in which it was made.

    `kind` "delta" yields what is new, "cumulative" the whole answer so far, "final" the finished answer once.
    """

    def __init__(
        self, core: EngineCore, input_processor: InputProcessor, tokenizer: Any, *, kind: OutputKind = "delta"
    ) -> None:
        self._input_processor = input_processor
        self._outputs = OutputProcessor(TokenDecoder(tokenizer), kind)
        self._queues: dict[str, asyncio.Queue[_Item]] = {}
        self._embeddings: dict[str, asyncio.Future[EngineOutput]] = {}
        self._active: set[str] = set()  # ids of requests that are answered
        self._event_loop = asyncio.get_running_loop()
        self._failure: EngineError | None = None
        self._numbers = itertools.count()
        self._loop = EngineLoop(core, self._on_outputs, self._on_failure)
        self._loop.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - it is immutable
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt. Leaving the iteration (`aclose()`, cancellation, an exception) aborts the request.

        Raises `InvalidRequestError` or `OverloadedError` before anything runs, and `EngineError` if the engine could
        not finish.
        """
        with self._ids(request_id) as (request_id, engine_id):
            text, content = split_prompt(prompt)
            requests = self._input_processor.process(engine_id, content, sampling_params, options=options)
            queue: asyncio.Queue[_Item] = asyncio.Queue()
            self._queues[engine_id] = queue
            self._outputs.add(text, requests)
            finished = False
            try:
                await asyncio.wrap_future(self._loop.call(partial(_add_all, requests)))
                while not finished:
                    item = await queue.get()
                    if isinstance(item, EngineError):
                        raise item
                    finished, item.request_id = item.finished, request_id
                    yield item
            finally:
                del self._queues[engine_id]
                self._outputs.discard([engine_id])
                if not finished:
                    self._loop.abort([request.request_id for request in requests])

    async def embed(
        self,
        prompt: Prompt,
        pooling: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - it is immutable
    ) -> EmbeddingOutput:
        """The embedding of one prompt. Cancellation aborts the request. Raises as `generate` does."""
        with self._ids(request_id) as (request_id, engine_id):
            text, content = split_prompt(prompt)
            request = self._input_processor.process_embedding(engine_id, content, pooling, options=options)
            end: asyncio.Future[EngineOutput] = self._event_loop.create_future()
            self._embeddings[engine_id] = end
            try:
                await asyncio.wrap_future(self._loop.call(partial(_add_all, [request])))
                output = embedding_output(request, text, await end)
                output.request_id = request_id
                return output
            finally:
                del self._embeddings[engine_id]
                if not end.done() or end.cancelled():
                    self._loop.abort([engine_id])

    def stats(self) -> SchedulerStats:
        """As of the last step boundary."""
        return self._loop.stats()

    async def shutdown(self) -> None:
        """End the engine. Iterations that are under way raise `EngineError`."""
        await asyncio.to_thread(self._loop.stop)
        self._fail(EngineError("The engine was shut down."))

    @contextmanager
    def _ids(self, request_id: str | None) -> Iterator[tuple[str, str]]:
        """A request's id, the user's or a new one, and what the engine calls it.

        The engine's is never used again: what it still says of a request that nobody waits for is of no other one.
        """
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers)
        request_id = request_id or f"async-{number}"
        if request_id in self._active:
            raise InvalidRequestError(f"request_id: {request_id!r} is in use.", "request_id")
        self._active.add(request_id)
        try:
            yield request_id, f"{request_id}~{number}"
        finally:
            self._active.discard(request_id)

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, outputs)

    def _on_failure(self, error: BaseException) -> None:
        self._event_loop.call_soon_threadsafe(self._fail, EngineError(f"The engine failed: {error}"))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        for end in outputs:
            future = self._embeddings.get(end.request_id)
            if future is not None and not future.done():
                future.set_result(end)
        processed = self._outputs.process(outputs)
        if processed.abort_ids:
            self._loop.abort(processed.abort_ids)
        for output in processed.request_outputs:
            queue = self._queues.get(output.request_id)
            if queue is None:
                continue
            errors = [choice.error for choice in output.outputs if choice.finish_reason == "error"]
            queue.put_nowait(EngineError(errors[0] or "The request could not be finished.") if errors else output)

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        for queue in self._queues.values():
            queue.put_nowait(error)
        for future in self._embeddings.values():
            if not future.done():
                future.set_exception(error)


def _add_all(requests: list[EngineRequest], core: EngineCore) -> None:
    """Queue the choices of one prompt, or none of them."""
    try:
        for request in requests:
            core.add_request(request)
    except QuireError:
        core.abort([request.request_id for request in requests])
        raise
