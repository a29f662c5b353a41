"""`quire bench offline`: throughput of the engine alone, through `quire.LLM`, with every prompt given at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from quire import LLM, SamplingParams

from .workload import random_token_prompts


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """Rates are over the time of `generate`, without loading the model."""

    num_prompts: int
    load_s: float
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def run(
    engine: dict[str, Any], num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int
) -> OfflineResult:
    """Generate exactly `output_len` tokens after each of `num_prompts` random prompts. Raises `QuireError`."""
    start_s = time.perf_counter()
    llm = LLM(**engine)
    try:
        load_s = time.perf_counter() - start_s
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        prompts = random_token_prompts(num_prompts + 1, input_len, vocab_size, seed)
        llm.generate(
            [{"prompt_token_ids": prompts.pop()}], params, use_tqdm=False
        )  # threads, caches and kernels are up

        start_s = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        duration_s = time.perf_counter() - start_s
    finally:
        llm.shutdown()
    num_output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return OfflineResult(
        num_prompts=num_prompts,
        load_s=load_s,
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=num_prompts / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
    )
