"""Runs a tiny model in every way that must not change its tokens, and compares each with `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from core_driver import Answer, Driver
from hf_reference import TIE, Reference
from rank_executors import ThreadExecutor
from tiny_families import VOCAB_SIZE, TinyFamily
from torch import Tensor

from quire.engine.config import EngineConfig, ModelConfig
from quire.engine.executor import Executor
from quire.engine.kv_cache_spec import group_layers
from quire.engine.model_source import ModelInfo, load_model_info
from quire.workers.local_executor import LocalExecutor

NUM_TOKENS = 12
TOP = 4  # logprobs compared per token


@dataclass
class Parity:
    """What came out of one comparison. A tie is a token that differs where the reference has two as good."""

    num_tokens: int = 0
    num_ties: int = 0
    mismatches: list[str] = field(default_factory=list)
    max_logprob_difference: float = 0.0
    num_preemptions: int = 0


class FamilyUnderTest:
    """A model on disk, the reference, and an executor of one rank."""

    def __init__(self, family: TinyFamily, directory: Path, implementation: str = "auto") -> None:
        self.max_model_len, self._min_length = family.max_model_len, family.min_length
        self.reference = Reference(family.make(directory))
        fields = {"model": str(directory), "max_model_len": family.max_model_len, "implementation": implementation}
        self.info: ModelInfo = load_model_info(ModelConfig.model_validate(fields))
        self.executor: Executor = LocalExecutor(EngineConfig.model_validate({"model": {"num_threads": 1}}), self.info)
        self._parallel: dict[str, object] = {}
        generator = torch.Generator().manual_seed(2)
        lengths = [max(length, family.min_length) for length in (1, 16, 17, 40, 97)]
        self.prompts = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
        self._expected: dict[tuple[int, ...], Tensor] = {}

    def driver(self, executor: Executor | None = None, **sections: dict[str, object]) -> Driver:
        return Driver(executor or self.executor, self.max_model_len, parallel=self._parallel, **sections)

    @contextmanager
    def on_ranks(self, **parallel: object) -> Iterator[None]:
        """Inside, everything runs on ranks that share the model as the configuration's section says."""
        config = EngineConfig.model_validate({"model": {"num_threads": 1}, "parallel": parallel})
        one_rank, self.executor, self._parallel = self.executor, ThreadExecutor(config, self.info), parallel
        try:
            yield
        finally:
            self.executor.shutdown()
            self.executor, self._parallel = one_rank, {}

    def modes(self) -> dict[str, list[Answer]]:
        """The answers to the same prompts: alone, batched, in chunks, with a prefix in the cache."""
        batched = self.driver()
        answers = {
            "alone": [self.driver().greedy([prompt], NUM_TOKENS, TOP)[0] for prompt in self.prompts],
            "batched": batched.greedy(self.prompts, NUM_TOKENS, TOP),
            "hit": batched.greedy(self.prompts, NUM_TOKENS, TOP),
            "chunked": self.driver(scheduler={"max_num_batched_tokens": 7}).greedy(self.prompts, NUM_TOKENS, TOP),
        }
        assert all(answer.num_cached_tokens for answer in answers["hit"][2:])
        return answers

    def batched(self) -> Parity:
        return self.compare(self.driver().greedy(self.prompts, NUM_TOKENS, TOP))

    def preempted(self) -> Parity:
        """Five requests that all fit when they come, and not when they have grown by 40 tokens."""
        length = max(14, self._min_length)
        prompts = [(prompt * length)[:length] for prompt in self.prompts]
        groups = group_layers(self.executor.kv_cache_specs(), len(self.executor.available_kv_cache_bytes()))
        num_blocks = len(prompts) * (-(-length // 16) + 1) * len(groups) + 1
        driver = self.driver(cache={"num_kv_blocks": num_blocks, "enable_prefix_caching": False})
        parity = self.compare(driver.greedy(prompts, 40, TOP), prompts)
        parity.num_preemptions = driver.stats().num_preemptions
        return parity

    def compare(self, answers: list[Answer], prompts: list[list[int]] | None = None) -> Parity:
        parity = Parity()
        for prompt, answer in zip(prompts or self.prompts, answers, strict=True):
            self._compare_one(prompt, answer, parity)
        return parity

    def _compare_one(self, prompt: list[int], answer: Answer, parity: Parity) -> None:
        sequence = (*prompt, *answer.token_ids)
        if sequence not in self._expected:
            self._expected[sequence] = self.reference.logits(prompt, answer.token_ids)
        logits = self._expected[sequence]
        gaps = logits.amax(dim=-1) - logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        parity.num_tokens += len(answer.token_ids)
        for i, gap in enumerate(gaps.tolist()):
            if gap > TIE:
                where = f"prompt of {len(prompt)}, token {i}"
                parity.mismatches.append(f"{where}: {answer.token_ids[i]} is {gap:.2g} below the best")
            parity.num_ties += 0 < gap <= TIE
        expected = logits.log_softmax(dim=-1).topk(TOP).values
        ours = torch.tensor([[logprob for _, logprob in token.top] for token in answer.logprobs])
        difference = (ours - expected).abs().max().item()
        parity.max_logprob_difference = max(parity.max_logprob_difference, difference)
