"""Thousands of random workloads: after every step the books balance, and every request says what it would say alone.

A workload is drawn from its seed alone, so a failing one is run again with `replay(seed)`.
"""

from __future__ import annotations

import random

import pytest
from engine_helpers import Collector, make_core, make_request
from fake_executor import FakeExecutor, expected_tokens

from quire.engine.core import EngineCore
from quire.engine.outputs import EngineRequest

NUM_WORKLOADS = 1200
NUM_CHUNKS = 6


class Workload:
    """Arrivals, aborts and executor failures at random moments, on a random engine."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 16])
        windows = rng.choice([(None,), (None,), (None, 5), (3, 8), (None, 4, 9)])
        model_len = rng.choice([20, 50])
        budget = rng.choice([2, 5, 16, 64])
        longest = len(windows) * (model_len // block_size + 2)
        self.executor = FakeExecutor(
            windows,
            block_size,
            num_blocks=longest + rng.choice([2, 6, 30]),
            fail_steps=tuple(rng.sample(range(200), rng.choice([0, 0, 1, 3]))),
        )
        self.core: EngineCore = make_core(
            self.executor,
            max_model_len=model_len,
            caching=rng.random() < 0.8,
            max_num_batched_tokens=budget,
            max_num_seqs=rng.choice([1, 2, 5, 16]),
            max_inflight_steps=rng.choice([1, 1, 2, 3]),
            long_prefill_token_threshold=rng.choice([0, 0, 2, 7]),
            policy=rng.choice(["fcfs", "priority"]),
        )
        self.prefixes = [self._tokens(rng.randint(0, 30)) for _ in range(3)]
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.collector = Collector()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(count)]

    def arrive(self) -> None:
        rng = self.rng
        limit = self.core.max_model_len - 1
        prompt = (rng.choice(self.prefixes) + self._tokens(rng.randint(1, 12)))[:limit]
        max_tokens = rng.randint(1, 15)
        seed = rng.randrange(5)
        known = expected_tokens(prompt, min(max_tokens, limit + 1 - len(prompt)), seed)
        resume = known[: rng.randint(0, len(known) - 1)] if rng.random() < 0.2 else []
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens,
            seed,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice([None, None, "salt"]),
            resume_token_ids=resume,
            stop_token_ids=tuple(self._tokens(2)) if rng.random() < 0.3 else (),
        )
        self.requests[request.request_id] = request
        self.collector.start(request)
        self.core.add_request(request)

    def abort_one(self) -> None:
        request_id = self.rng.choice(list(self.requests))
        outputs = self.core.abort([request_id])
        self.aborted.update(output.request_id for output in outputs)
        self.collector.take(outputs)

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 25)):
            for _ in range(rng.choice([0, 1, 1, 4])):
                self.arrive()
            if self.requests and rng.random() < 0.15:
                self.abort_one()
            if rng.random() < 0.03:
                self.core.reset_prefix_cache()
            self.step()
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        self.check_end()

    def step(self) -> None:
        self.collector.take(self.core.step())
        scheduler = self.core.scheduler
        scheduler.kv_cache.check_integrity()
        table = scheduler.running
        for row in table.rows().tolist():
            request = table.requests[row]
            assert request is not None
            assert request.row == row
            assert table.num_tokens[row] == request.num_tokens
            assert table.num_computed[row] <= table.num_tokens[row] + table.num_pending[row]
            assert table.num_computed[row] < request.max_total_tokens
            assert len(scheduler.kv_cache.tables(row)[0]) == table.num_blocks[row]
            assert table.num_blocks[row] * scheduler.kv_cache.block_size >= table.num_computed[row]
        assert len(table) + len(scheduler.waiting) == len(scheduler.requests)
        for step in self.executor.steps[-1:]:
            assert step.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
            assert len(set(step.rows.tolist())) == len(step.rows) <= scheduler.config.max_num_seqs

    def check_end(self) -> None:
        assert not self.core.has_work, "the engine does not finish"
        assert set(self.collector.ends) == set(self.requests)
        for request_id, request in self.requests.items():
            end, tokens = self.collector.ends[request_id], self.collector.tokens[request_id]
            room = self.core.max_model_len - len(request.prompt_token_ids)
            params = request.sampling_params
            assert params.max_tokens is not None
            expected = expected_tokens(request.prompt_token_ids, min(params.max_tokens, room), request.seed)
            num_resumed = len(request.resume_token_ids)
            stop = next(
                (i for i, t in enumerate(expected) if t in params.stop_token_ids and i >= num_resumed - 1), None
            )
            if request_id in self.aborted:
                assert end.finish_reason == "abort"
                assert tokens == expected[: len(tokens)]
            elif end.finish_reason == "error":
                assert self.executor.num_restarts >= 3
                assert tokens == expected[: len(tokens)]
            elif stop is not None:
                assert (end.finish_reason, tokens) == ("stop", expected[: stop + 1])
            else:
                assert (end.finish_reason, tokens) == ("length", expected)
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def replay(seed: int) -> None:
    """Run one workload; for a debugger."""
    Workload(seed).run()


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_workloads(chunk: int) -> None:
    for seed in range(chunk, NUM_WORKLOADS, NUM_CHUNKS):
        try:
            replay(seed)
        except BaseException as error:
            raise AssertionError(f"workload {seed} failed; run replay({seed})") from error


def test_the_workloads_reach_what_they_are_for() -> None:
    """A random test that never preempts, hits, fails or aborts proves nothing."""
    preemptions = hits = restarts = aborts = windows = 0
    for seed in range(60):
        workload = Workload(seed)
        workload.run()
        stats = workload.core.stats()
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
        restarts += workload.executor.num_restarts
        aborts += len(workload.aborted)
        windows += len(workload.executor.kv_cache_specs()) > 1
    assert min(preemptions, hits, restarts, aborts, windows) >= 5
