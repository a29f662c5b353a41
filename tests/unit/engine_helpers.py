"""Small builders for engine tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fake_executor import FakeExecutor

from quire.engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.gates import Gate
from quire.engine.outputs import EngineOutput, EngineRequest, PromptLogprobs
from quire.engine.sampling_params import SamplingParams


def make_request(
    request_id: str, prompt: list[int], max_tokens: int = 8, seed: int = 0, **fields: object
) -> EngineRequest:
    of_sampling = ("min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    params = {name: fields.pop(name) for name in of_sampling if name in fields}
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        seed=seed,
        **fields,  # type: ignore[arg-type]
    )


def make_core(
    executor: FakeExecutor | None = None,
    *,
    max_model_len: int = 200,
    caching: bool = True,
    gates: tuple[Gate, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    **scheduler: object,
) -> EngineCore:
    executor = executor or FakeExecutor()
    config = EngineConfig(
        cache=CacheConfig(block_size=executor.kv_cache_specs()[0].block_size, enable_prefix_caching=caching),
        parallel=ParallelConfig(pipeline_parallel_size=executor.num_stages),
        scheduler=SchedulerConfig(
            **{"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_speculative_tokens": 0, **scheduler}
        ),  # type: ignore[arg-type]
    )
    return EngineCore(config, executor, max_model_len, gates, clock)


class Collector:
    """Gathers outputs by request and checks what every client relies on: no gap, no repeat, one end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.last: dict[str, EngineOutput] = {}
        self.prompt_logprobs: dict[str, PromptLogprobs] = {}

    def start(self, request: EngineRequest) -> None:
        self.tokens[request.request_id] = list(request.resume_token_ids)

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            tokens = self.tokens[output.request_id]
            assert output.request_id not in self.ends, f"{output.request_id} got output after its end"
            assert output.first_index == len(tokens), f"{output.request_id}: gap or repeat"
            tokens.extend(output.new_token_ids)
            if output.logprobs is not None:
                assert [each.token_id for each in output.logprobs] == output.new_token_ids
            self.last[output.request_id] = output
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, f"{output.request_id}: its prompt came twice"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.finish_reason is not None:
                self.ends[output.request_id] = output


def run(
    core: EngineCore,
    requests: list[EngineRequest],
    max_steps: int = 10_000,
    abort_at: Mapping[int, list[str]] = MappingProxyType({}),
) -> Collector:
    """Run requests that all arrive at once to their ends, checking the cache after every step.

    `abort_at`: after so many steps, these are aborted.
    """
    collector = Collector()
    for request in requests:
        collector.start(request)
        core.add_request(request)
    for step in range(max_steps):
        collector.take(core.abort(abort_at.get(step, [])))
        if not core.has_work:
            return collector
        collector.take(core.step())
        core.scheduler.kv_cache.check_integrity()
    raise AssertionError("the engine does not finish")
