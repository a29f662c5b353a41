"""Runs token prompts through a real engine core, for tests that need neither text nor a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import Executor
from quire.engine.outputs import EngineRequest, SchedulerStats, TokenLogprobs
from quire.engine.prompt_logprobs import by_token
from quire.engine.sampling_params import SamplingParams


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: Tensor | None = None
    num_preemptions: int = 0


class Driver:
    """An engine core on an executor that may be shared: each core allocates the cache anew."""

    def __init__(self, executor: Executor, max_model_len: int, **sections: dict[str, object]) -> None:
        self.core = EngineCore(EngineConfig.model_validate(sections), executor, max_model_len)
        self._num_requests = 0

    def greedy(self, prompts: list[list[int]], num_tokens: int, logprobs: int | None = None) -> list[Answer]:
        """The answers to `prompts`, all of them running at the same time where they fit."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)
        requests = []
        for prompt in prompts:
            requests.append(
                EngineRequest(
                    request_id=str(self._num_requests), prompt_token_ids=prompt, sampling_params=params, seed=0
                )
            )
            self._num_requests += 1
        return self.run(requests)

    def run(self, requests: list[EngineRequest]) -> list[Answer]:
        """The answers to requests that all come at once, with the tokens that they resume from."""
        answers: dict[str, Answer] = {}
        for request in requests:
            answers[request.request_id] = Answer(list(request.resume_token_ids))
            self.core.add_request(request)
        while self.core.has_work:
            for output in self.core.step():
                assert output.error is None, output.error
                answer = answers[output.request_id]
                assert output.first_index == len(answer.token_ids)
                answer.token_ids += output.new_token_ids
                answer.logprobs += output.logprobs or []
                if output.prompt_logprobs is not None:
                    assert answer.prompt_logprobs is None
                    answer.prompt_logprobs = by_token(output.prompt_logprobs)
                if output.report is not None:
                    answer.num_preemptions = output.report.num_preemptions
                if output.embedding is not None:
                    answer.embedding = torch.tensor(output.embedding)
                answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        return list(answers.values())

    def one_by_one(self, prompts: list[list[int]], num_tokens: int, logprobs: int | None = None) -> list[Answer]:
        return [self.greedy([prompt], num_tokens, logprobs)[0] for prompt in prompts]

    def stats(self) -> SchedulerStats:
        return self.core.stats()
