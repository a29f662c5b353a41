"""An engine for programs that live in an event loop: each request is an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from .core import EngineCore
from .detokenizer import TokenDecoder
from .errors import EngineError
from .input_processor import InputProcessor
from .llm import Prompt, split_prompt
from .loop import EngineLoop
from .output_processor import OutputKind, OutputProcessor
from .outputs import EngineOutput, RequestOutput, SchedulerStats
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
        self._event_loop = asyncio.get_running_loop()
        self._failure: EngineError | None = None
        self._num_requests = 0
        self._loop = EngineLoop(core, self._on_outputs, self._on_failure)
        self._loop.start()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt. Leaving the iteration (`aclose()`, cancellation, an exception) aborts the request.

        Raises `InvalidRequestError` before anything runs, and `EngineError` if the engine could not finish.
        """
        if self._failure is not None:
            raise self._failure
        if request_id is None:
            request_id = f"async-{self._num_requests}"
            self._num_requests += 1
        text, content = split_prompt(prompt)
        requests = self._input_processor.process(request_id, content, sampling_params)
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._queues[request_id] = queue
        self._outputs.add(text, requests)
        finished = False
        try:
            for request in requests:
                self._loop.add(request)
            while not finished:
                item = await queue.get()
                if isinstance(item, EngineError):
                    raise item
                finished = item.finished
                yield item
        finally:
            del self._queues[request_id]
            self._outputs.discard([request_id])
            if not finished:
                self._loop.abort([request.request_id for request in requests])

    def stats(self) -> SchedulerStats:
        """As of the last step boundary."""
        return self._loop.stats()

    async def shutdown(self) -> None:
        """End the engine. Iterations that are under way raise `EngineError`."""
        await asyncio.to_thread(self._loop.stop)
        self._fail(EngineError("The engine was shut down."))

    def _on_outputs(self, outputs: list[EngineOutput]) -> None:
        self._event_loop.call_soon_threadsafe(self._deliver, outputs)

    def _on_failure(self, error: BaseException) -> None:
        self._event_loop.call_soon_threadsafe(self._fail, EngineError(f"The engine failed: {error}"))

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        failed = {output.request_id: output.error for output in outputs if output.finish_reason == "error"}
        processed = self._outputs.process(outputs)
        if processed.abort_ids:
            self._loop.abort(processed.abort_ids)
        for output in processed.request_outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)
        for request_id, error in failed.items():
            queue = self._queues.get(request_id)
            if queue is not None:
                queue.put_nowait(EngineError(error or "The engine could not finish the request."))

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        for queue in self._queues.values():
            queue.put_nowait(error)
