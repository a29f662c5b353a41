"""Random workloads as data: drawn from a seed, played step by step with every check, and shrunk when one fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_helpers import Collector, make_core, make_request
from fake_executor import VOCABULARY, FakeExecutor, expected_tokens, pooled, prompt_logprobs_of, states_of

from quire.engine.core import EngineCore
from quire.engine.outputs import EngineRequest
from quire.engine.pooling import POOLING_TYPES, PoolingParams
from quire.engine.request import Request
from quire.engine.wait_ledger import WaitCause

Op = tuple[str, Any]  # ("add", EngineRequest) | ("abort", request_id) | ("reset", None) | ("step", seconds)
MAX_DRAIN_STEPS = 5000


class SlotGate:
    """A feature with a few slots; a request holds one while it runs."""

    cause = WaitCause.LORA_SLOT

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.version = 0
        self.holders: set[str] = set()

    def enter(self, request: Request) -> bool:
        if len(self.holders) >= self.slots:
            return False
        assert request.request_id not in self.holders
        self.holders.add(request.request_id)
        return True

    def may_enter(self, request: Request) -> bool:
        return len(self.holders) < self.slots

    def leave(self, request: Request) -> None:
        self.holders.remove(request.request_id)
        self.version += 1

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Script:
    """One workload: an engine, and what happens to it."""

    executor: dict[str, Any]
    engine: dict[str, Any]
    gate_slots: int | None
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        lines = [f"FakeExecutor(**{self.executor})", f"make_core(**{self.engine}, gate_slots={self.gate_slots})"]
        return "\n".join(lines + [f"{name} {value}" for name, value in self.ops])


def draw(seed: int) -> Script:
    """The workload of a seed."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    windows = rng.choice([(None,), (None,), (None, 5), (3, 8), (None, 4, 9)])
    model_len = rng.choice([20, 50])
    most_blocks = len(windows) * (model_len // block_size + 2)
    executor = {
        "windows": windows,
        "block_size": block_size,
        "num_blocks": most_blocks + rng.choice([2, 6, 30]),
        "fail_steps": tuple(rng.sample(range(200), rng.choice([0, 0, 1, 3]))),
        "poison": frozenset(f"r{rng.randrange(20)}" for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))),
        "poison_from": rng.randint(0, 30),
    }
    engine = {
        "max_model_len": model_len,
        "caching": rng.random() < 0.8,
        "max_num_batched_tokens": rng.choice([2, 5, 16, 64]),
        "max_num_seqs": rng.choice([1, 2, 5, 16]),
        "max_inflight_steps": rng.choice([1, 1, 2, 3]),
        "long_prefill_token_threshold": rng.choice([0, 0, 2, 7]),
        "policy": rng.choice(["fcfs", "priority"]),
        "num_speculative_tokens": rng.choice([None, 0, 1, 3, 7]),
    }
    prefixes = [_tokens(rng, rng.randint(0, 30)) for _ in range(3)]
    ops: list[Op] = []
    num_requests = 0
    for _ in range(rng.randint(1, 25)):
        for _ in range(rng.choice([0, 1, 1, 4])):
            ops.append(("add", _draw_request(rng, f"r{num_requests}", prefixes, model_len)))
            num_requests += 1
        if num_requests and rng.random() < 0.15:
            ops.append(("abort", f"r{rng.randrange(num_requests)}"))
        if rng.random() < 0.03:
            ops.append(("reset", None))
        ops.append(("step", rng.choice([0.0, 0.5, 2.0])))
    if rng.random() < 0.3:
        executor["num_stages"] = rng.choice([2, 3])
        engine["num_speculative_tokens"] = rng.choice([None, 0])
    return Script(executor, engine, rng.choice([None, None, 1, 3]), tuple(ops))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _draw_request(rng: random.Random, request_id: str, prefixes: list[list[int]], model_len: int) -> EngineRequest:
    prompt = (rng.choice(prefixes) + _tokens(rng, rng.randint(1, 12)))[: model_len - 1]
    max_tokens = rng.randint(1, rng.choice([15, 15, 40]))
    seed = rng.randrange(5)
    known = expected_tokens(prompt, min(max_tokens, model_len - len(prompt)), seed)
    tenant, weight = rng.choice([("", 1.0), ("", 1.0), ("a", 1.0), ("b", 3.0)])
    kind = rng.choice(["answer"] * 6 + ["scored", "scored", "prompt_only", "embedded"])
    if kind == "embedded":
        prompt = (prompt + _tokens(rng, rng.choice([0, 0, model_len])))[:model_len]
        pooling = PoolingParams(type=rng.choice(POOLING_TYPES))
        return make_request(request_id, prompt, priority=rng.randint(0, 2), tenant=tenant, pooling=pooling)
    if kind == "prompt_only":
        return make_request(request_id, prompt, 0, tenant=tenant, prompt_logprobs=rng.choice([None, 0]))
    return make_request(
        request_id,
        prompt,
        max_tokens,
        seed,
        priority=rng.randint(0, 2),
        cache_salt=rng.choice([None, None, "salt"]),
        resume_token_ids=known[: rng.randint(0, len(known) - 1)] if rng.random() < 0.2 else [],
        stop_token_ids=tuple(_tokens(rng, 2)) if rng.random() < 0.3 else (),
        deadline_ms=rng.choice([None, None, None, 3000, 20_000]),
        tenant=tenant,
        tenant_weight=weight,
        prompt_logprobs=0 if kind == "scored" else None,
        logprobs=rng.choice([None, None, 0, 2]),
    )


@dataclass
class Play:
    """A script under way."""

    script: Script
    now: float = 0.0
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    collector: Collector = field(default_factory=Collector)

    def __post_init__(self) -> None:
        self.executor = FakeExecutor(**self.script.executor)
        self.gate = None if self.script.gate_slots is None else SlotGate(self.script.gate_slots)
        gates = () if self.gate is None else (self.gate,)
        self.core: EngineCore = make_core(self.executor, gates=gates, clock=lambda: self.now, **self.script.engine)

    def run(self) -> None:
        for name, value in self.script.ops:
            if name == "add":
                self.requests[value.request_id] = value
                self.collector.start(value)
                self.core.add_request(value)
            elif name == "abort":
                self.collector.take(self.core.abort([value]))
            elif name == "reset":
                self.core.reset_prefix_cache()
            else:
                self.now += value
                self.step()
        for _ in range(MAX_DRAIN_STEPS):
            if not self.core.has_work:
                break
            self.now += 0.1
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
            assert self.gate is None or request.request_id in self.gate.holders
        assert self.gate is None or len(self.gate.holders) == len(table) <= self.gate.slots
        assert len(table) + len(scheduler.waiting) == len(scheduler.requests)
        assert scheduler.waiting.num_tokens == sum(
            request.num_tokens for request in scheduler.requests.values() if request.row < 0
        )
        for step in self.executor.steps[-1:]:
            assert step.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
            assert len(set(step.rows.tolist())) == len(step.rows) <= scheduler.config.max_num_seqs

    def check_end(self) -> None:
        assert not self.core.has_work, "the engine does not finish"
        assert set(self.collector.ends) == set(self.requests)
        for request_id, request in self.requests.items():
            self._check_answer(request, self.collector.tokens[request_id])
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)

    def _check_answer(self, request: EngineRequest, tokens: list[int]) -> None:
        """It is what the model says without any engine, up to where it was ended, and its time is accounted for."""
        end = self.collector.ends[request.request_id]
        params = request.sampling_params
        assert params.max_tokens is not None
        room = self.core.max_model_len - len(request.prompt_token_ids)
        expected = expected_tokens(request.prompt_token_ids, min(params.max_tokens, room), request.seed)
        if request.pooling is not None:
            self._check_embedding(request, tokens)
            expected = []
        self._check_prompt_logprobs(request, tokens)
        first = max(len(request.resume_token_ids) - 1, 0)
        stop = next((i for i in range(first, len(expected)) if expected[i] in params.stop_token_ids), None)
        if end.finish_reason in ("abort", "deadline", "error"):
            assert tokens == expected[: len(tokens)]
            assert end.finish_reason != "error" or self._may_fail(request.request_id)
            assert end.finish_reason != "deadline" or request.deadline_ms is not None
        elif stop is not None:
            assert (end.finish_reason, tokens) == ("stop", expected[: stop + 1])
        else:
            assert (end.finish_reason, tokens) == ("length" if request.pooling is None else "stop", expected)
        report = end.report
        if report is not None:  # there is none for a resumed request that had ended before
            assert abs(report.compute_s + sum(report.wait_s.values()) - report.wall_s) < 1e-6
            assert min([report.compute_s, *report.wait_s.values()]) >= -1e-9

    def _check_embedding(self, request: EngineRequest, tokens: list[int]) -> None:
        assert request.pooling is not None
        assert tokens == []
        embedding = self.collector.ends[request.request_id].embedding
        if self.collector.ends[request.request_id].finish_reason != "stop":
            assert embedding is None
            return
        states = dict(enumerate(states_of(request.prompt_token_ids)))
        assert embedding is not None
        assert embedding.tolist() == pooled(request.pooling, states, len(states)).tolist()

    def _check_prompt_logprobs(self, request: EngineRequest, tokens: list[int]) -> None:
        """They come once, with the first output that the prompt leads to; not again to one who has that already."""
        end, prompt = self.collector.ends[request.request_id], request.prompt_token_ids
        wanted = request.sampling_params.prompt_logprobs is not None and not request.resume_token_ids
        is_computed = bool(tokens) or (request.sampling_params.max_tokens == 0 and end.finish_reason == "length")
        told = self.collector.prompt_logprobs.get(request.request_id)
        assert (told is not None) is (wanted and is_computed)
        if told is not None:
            expected = prompt_logprobs_of(prompt, range(1, len(prompt)), states_of(prompt)[:-1])
            assert told.first_position == 1
            assert told.token_ids[:, 0].tolist() == prompt[1:]
            assert told.logprobs[:, 0].tolist() == expected.logprobs[:, 0].tolist()
            assert told.ranks.tolist() == expected.ranks.tolist()

    def _may_fail(self, request_id: str) -> bool:
        """It breaks its steps itself, or the machine may have failed it three times in a row, poison counted in."""
        poison, fail_steps = self.script.executor["poison"], self.script.executor["fail_steps"]
        return request_id in poison or len(fail_steps) + 2 * bool(poison) >= 3


def play(script: Script) -> Play:
    """Play a script to its end, with every check."""
    playing = Play(script)
    playing.run()
    return playing


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """A script that still fails and from which no single operation can be left out (greedy, halves first)."""
    ops = list(script.ops)
    size = max(len(ops) // 2, 1)
    while True:
        start = 0
        shortened = False
        while start < len(ops):
            candidate = ops[:start] + ops[start + size :]
            if fails(_with_ops(script, candidate)):
                ops, shortened = candidate, True
            else:
                start += size
        if size == 1 and not shortened:
            return _with_ops(script, ops)
        size = max(size // 2, 1)


def _with_ops(script: Script, ops: list[Op]) -> Script:
    return Script(script.executor, script.engine, script.gate_slots, tuple(ops))


def failure_of(script: Script) -> Exception | None:
    """What goes wrong when a script is played, if anything does."""
    try:
        play(script)
    except Exception as error:
        return error
    return None
