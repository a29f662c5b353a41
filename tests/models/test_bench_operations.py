"""`python -m tests.benchmarks.operations` on real steps."""

from __future__ import annotations

from quire import LLM, SamplingParams
from tests.benchmarks import operations


def test_what_steps_ask_the_kernels_for_is_timed() -> None:
    steps: list[operations.Step] = []
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with operations.watched(steps):
        llm = LLM(max_model_len=128, num_kv_blocks=32, max_inflight_steps=1, num_speculative_tokens=0)
        prompts = [{"prompt_token_ids": list(range(start, start + 20))} for start in (5, 900)]
        llm.generate(prompts, params, use_tqdm=False)
    answered = steps[-3:]
    assert [(step.num_tokens, step.num_requests) for step in answered] == [(40, 2), (2, 2), (2, 2)]
    for step in answered:
        assert step.calls["paged_attention"] == step.calls["rotate_and_write_kv"] == 30  # one of each layer
        assert 0 < sum(step.by_operation.values()) <= step.seconds
