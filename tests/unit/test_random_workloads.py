"""Thousands of random workloads: after every step the books balance, and every request says what it would say alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from workloads import Script, draw, failure_of, play, shrink

from quire.engine.block_pool import BlockPool

NUM_WORKLOADS = 2000
NUM_CHUNKS = 6


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_workloads(chunk: int, tmp_path: Path) -> None:
    for seed in range(chunk, NUM_WORKLOADS, NUM_CHUNKS):
        error = failure_of(draw(seed))
        if error is not None:
            small = shrink(draw(seed), lambda script: failure_of(script) is not None)
            path = tmp_path / f"workload-{seed}.txt"
            path.write_text(f"{small}\n")
            raise AssertionError(f"workload {seed} fails; shrunk to {len(small.ops)} operations:\n{small}") from error


def test_the_workloads_reach_what_they_are_for() -> None:
    """A random test that never preempts, hits, fails or aborts proves nothing."""
    totals = dict.fromkeys(
        (
            "preemptions",
            "hits",
            "restarts",
            "windows",
            "pipelines",
            "gated",
            "abort",
            "deadline",
            "stop",
            "scored",
            "embedded",
            "drafted",
            "accepted",
        ),
        0,
    )
    for seed in range(100):
        played = play(draw(seed))
        stats = played.core.stats()
        totals["preemptions"] += stats.num_preemptions
        totals["hits"] += stats.prefix_cache_hits
        totals["drafted"] += stats.num_draft_tokens
        totals["accepted"] += stats.num_accepted_tokens
        totals["restarts"] += played.executor.num_restarts
        totals["windows"] += len(played.script.executor["windows"]) > 1
        totals["pipelines"] += played.executor.num_stages > 1
        totals["scored"] += len(played.collector.prompt_logprobs)
        totals["embedded"] += sum(end.embedding is not None for end in played.collector.ends.values())
        for end in played.collector.ends.values():
            if end.finish_reason in totals:
                totals[end.finish_reason] += 1
            totals["gated"] += end.report is not None and "LORA_SLOT" in end.report.wait_s
    assert min(totals.values()) >= 5, totals


def test_a_failing_workload_shrinks_to_a_short_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is never given back is found by some workload, and a few operations show it."""
    release = BlockPool.release

    def leaky(self: BlockPool, block_ids: object) -> None:
        release(self, [block_id for block_id in block_ids if block_id != 3])  # type: ignore[attr-defined]

    monkeypatch.setattr(BlockPool, "release", leaky)

    def fails(script: Script) -> bool:
        return isinstance(failure_of(script), AssertionError)

    script = next(script for script in map(draw, range(20)) if fails(script))
    small = shrink(script, fails)
    assert fails(small)
    assert len(small.ops) <= 6 < len(script.ops)
