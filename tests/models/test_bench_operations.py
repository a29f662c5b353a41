"""`python -m tests.benchmarks.operations` on real steps."""

from __future__ import annotations

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpu.intrinsics import IS_X86
from tests.benchmarks import operations


@pytest.mark.skipif(not IS_X86, reason="prompts are recorded on x86 alone, where there is a clock")
def test_what_programs_call_is_timed() -> None:
    """Every call once, in the order in which they are over; and answers are what they were."""
    programs: list[operations.Clocks] = []
    prompts = [{"prompt_token_ids": list(range(start, start + 20))} for start in (5, 900)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def answers() -> list[list[int]]:
        llm = LLM(max_model_len=128, num_kv_blocks=32, num_speculative_tokens=0, enable_prefix_caching=False)
        return [
            [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, params, use_tqdm=False)]
            for _ in range(3)
        ][-1]

    with operations.watched(programs):
        found = answers()
    assert found == answers()
    for num_rows, attended in ((40, 30), (0, 30)):  # of the prompts, and of decodes: once in each layer
        clocks = operations.most_run(programs, num_rows)
        runs = np.array(clocks.runs[num_rows])
        assert len(runs) >= 2
        assert (runs > -10_000).all()  # some microseconds: clocks of cores may differ
        assert (runs.sum(axis=1) > 0).all()
        assert clocks.labels.count("rotate_and_write_kv") == attended
        assert clocks.labels.count("paged_attention") >= attended


def test_the_cores_answer_each_other() -> None:
    assert 1 < operations.exchange_ns() < 1e9
