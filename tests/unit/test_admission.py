"""Who gets a row and when: deadlines, tenants, gates, limits, and what the ledgers say about the wait."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
from engine_helpers import Collector, make_core, make_request
from fake_executor import FakeExecutor, expected_tokens

from quire.engine.core import EngineCore
from quire.engine.errors import InvalidRequestError, OverloadedError, TenantShareError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.constraint import Constraint
from quire.engine.grammar.gate import GrammarGate
from quire.engine.kv_cache_manager import PrefixHit
from quire.engine.outputs import EngineRequest, RequestReport
from quire.engine.request import Request
from quire.engine.request_queue import _MAX_IDLE_TENANTS, TenantBook
from quire.engine.shortage import Shortage
from quire.engine.wait_ledger import WaitCause


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, executor: FakeExecutor | None = None, **options: object) -> EngineCore:
    return make_core(executor, clock=clock, **options)


def finish(core: EngineCore, clock: Clock, collector: Collector, step_s: float = 1.0) -> list[str]:
    """Run to the end, a step taking `step_s`. Returns request ids in the order in which they ended."""
    for _ in range(1000):
        if not core.has_work:
            return list(collector.ends)
        clock.now += step_s
        collector.take(core.step())
        core.scheduler.kv_cache.check_integrity()
    raise AssertionError("the engine does not finish")


def start(core: EngineCore, *requests: object) -> Collector:
    collector = Collector()
    for request in requests:
        collector.start(request)  # type: ignore[arg-type]
        core.add_request(request)  # type: ignore[arg-type]
    return collector


def report(collector: Collector, request_id: str) -> RequestReport:
    found = collector.ends[request_id].report
    assert found is not None
    assert found.compute_s + sum(found.wait_s.values()) == pytest.approx(found.wall_s, rel=1e-9)
    return found


# ---- deadlines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_ends_a_running_and_a_waiting_request(depth: int) -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1, max_inflight_steps=depth)
    running = make_request("running", [1, 2], 50, deadline_ms=5500)
    waiting = make_request("waiting", [3], 50, deadline_ms=3500)
    patient = make_request("patient", [4], 3)
    collector = start(core, running)
    core.step()
    start(core, waiting, patient)
    collector.start(waiting)
    collector.start(patient)
    collector.tokens["running"] = list(core.scheduler.requests["running"].output_token_ids)
    order = finish(core, clock, collector)
    assert order == ["waiting", "running", "patient"]
    ends = collector.ends
    assert [ends[name].finish_reason for name in order] == ["deadline", "deadline", "length"]
    assert ends["waiting"].error == "deadline_ms: 3500 ms have passed."
    assert collector.tokens["running"] == expected_tokens([1, 2], 50)[: len(collector.tokens["running"])]
    assert (core.stats().num_used_blocks, core.stats().num_deadlines_missed) == (0, 2)


def test_the_least_slack_goes_first() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    requests = [
        make_request("none", [1], 1),
        make_request("late", [2], 1, deadline_ms=90_000),
        make_request("soon", [3], 1, deadline_ms=60_000),
    ]
    assert finish(core, clock, start(core, *requests)) == ["soon", "late", "none"]


def test_a_preempted_request_comes_back_before_all_who_wait() -> None:
    clock = Clock()
    core = make(clock, FakeExecutor(num_blocks=9), max_model_len=32, max_num_seqs=2)
    collector = start(core, *[make_request(f"r{i}", [i] * 8, 20, seed=i) for i in range(2)])
    while not core.stats().num_preemptions:
        clock.now += 1.0
        collector.take(core.step())
    urgent = make_request("urgent", [5], 2, deadline_ms=600_000)
    collector.start(urgent)
    core.add_request(urgent)
    following = core.scheduler.waiting.queue.peek()
    assert following is not None
    assert following.request_id == "r1"
    finish(core, clock, collector)


def test_a_deadline_that_was_met_leaves_no_trace() -> None:
    clock = Clock()
    core = make(clock)
    collector = start(core, make_request("r", [1], 2, deadline_ms=60_000))
    finish(core, clock, collector)
    again = start(core, make_request("r", [1], 40))  # the same id, without a deadline
    finish(core, clock, again, step_s=10.0)
    assert again.ends["r"].finish_reason == "length"


# ---- tenants --------------------------------------------------------------------------------------------------------


def test_a_tenant_that_floods_does_not_starve_another() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    flood = [make_request(f"flood{i}", [i] * 4, 4, tenant="a") for i in range(20)]
    collector = start(core, *flood)
    late = [make_request(f"late{i}", [30 + i] * 4, 4, tenant="b") for i in range(3)]
    for request in late:
        collector.start(request)
        core.add_request(request)
    order = finish(core, clock, collector)
    # Equal work, equal weight: they take turns, although 20 requests came before.
    assert order[:6] == ["flood0", "late0", "flood1", "late1", "flood2", "late2"]


def test_shares_follow_the_weights() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    requests = [make_request(f"a{i}", [i] * 8, 1, tenant="a", tenant_weight=3.0) for i in range(12)]
    requests += [make_request(f"b{i}", [20 + i] * 8, 1, tenant="b") for i in range(12)]
    order = finish(core, clock, start(core, *requests))
    assert [name[0] for name in order[:12]].count("a") == 9


def test_an_idle_tenant_saves_up_no_credit() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    finish(core, clock, start(core, *[make_request(f"old{i}", [i] * 8, 1, tenant="a") for i in range(10)]))
    requests = [make_request(f"a{i}", [i] * 8, 1, tenant="a") for i in range(4)]
    requests += [make_request(f"b{i}", [20 + i] * 8, 1, tenant="b") for i in range(4)]
    order = finish(core, clock, start(core, *requests))
    assert [name[0] for name in order[:4]].count("b") <= 3


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_short_answers_are_charged_to_their_tenant() -> None:
    """Answers that end inside the block in which their prompt ends cost what they cost: 1 + 2 * 15 against 15 + 2."""
    clock = Clock()
    core = make(clock, FakeExecutor(block_size=16), max_num_seqs=1)
    requests = [make_request(f"a{i}", [i], 15, tenant="a") for i in range(40)]
    requests += [make_request(f"b{i}", [i] * 15, 1, tenant="b") for i in range(40)]
    order = finish(core, clock, start(core, *requests))
    assert [name[0] for name in order[:48]].count("a") == 17  # 17 * 31 against 31 * 17


def test_priority_classes_come_and_go() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1, policy="priority")
    finish(core, clock, start(core, *[make_request(f"r{i}", [1], 1, priority=i) for i in range(40)]))
    assert core.scheduler.waiting.queue.peek() is None
    assert core.scheduler.waiting.queue._classes == {}


def test_many_tenants_cost_no_more_than_few_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.request_queue._MAX_IDLE_TENANTS", 4)
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    for turn in range(3):
        names = [f"t{i}-{turn}" for i in range(12)]
        requests = [make_request(name, [1] * 4, 2, tenant=name.split("-")[0]) for name in names]
        assert set(finish(core, clock, start(core, *requests))) == set(names)
    again = [make_request(f"{t}{i}", [1] * 4, 2, tenant=t) for i in range(3) for t in ("t1", "t2")]
    order = finish(core, clock, start(core, *again))
    assert [name[:2] for name in order] == ["t1", "t2", "t1", "t2", "t1", "t2"]


def test_a_tenant_that_was_forgotten_may_come_back_at_once() -> None:
    """Its first entry is still there, beside that of the new one: with the same counter and the same name."""
    book = TenantBook()
    book.arrive("busy", 1.0, 0.0)
    for _ in range(2):
        book.arrive("back", 1.0, 0.0)
        book.leave("back")
        for i in range(_MAX_IDLE_TENANTS):
            book.arrive(f"t{i}", 1.0, 0.0)
            book.leave(f"t{i}")
    assert book["busy"].num_unfinished == 1
    assert len(book) <= _MAX_IDLE_TENANTS + 1


def test_an_open_stream_is_taken_over_although_the_queue_is_full() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1, max_queued_requests=1)
    collector = start(core, make_request("first", [1], 2))
    with pytest.raises(OverloadedError):
        core.add_request(make_request("new", [2], 2))
    resumed = make_request("resumed", [3], 4, resume_token_ids=expected_tokens([3], 1))
    collector.start(resumed)
    core.add_request(resumed)
    finish(core, clock, collector)
    assert collector.tokens["resumed"] == expected_tokens([3], 4)


def test_a_newcomer_waits_for_what_a_long_prompt_still_needs() -> None:
    """Two prompts that fit one after the other are not admitted together only to preempt each other."""
    clock = Clock()
    executor = FakeExecutor(num_blocks=65)
    core = make(clock, executor, max_model_len=250, long_prefill_token_threshold=16, max_num_batched_tokens=64)
    collector = start(core, make_request("a", [1] * 180, 4), make_request("b", [2] * 160, 4))
    finish(core, clock, collector)
    assert core.stats().num_preemptions == 0
    assert report(collector, "b").wait_s["KV_BLOCKS"] > 0


def test_a_long_prompt_that_has_no_room_is_not_looked_up_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    core = make(clock, FakeExecutor(block_size=4, num_blocks=60), max_num_seqs=8, max_num_batched_tokens=200)
    long = [i % 50 for i in range(150)]
    finish(core, clock, start(core, make_request("before", long, 1)))  # it is in the cache
    collector = start(core, *[make_request(f"r{i}", [i] * 32, 30) for i in range(4)])
    collector.take(core.step())
    collector.start(request := make_request("long", long, 2))
    core.add_request(request)
    num_looked_up, num_steps = 0, 0
    find_prefix = core.scheduler.kv_cache.find_prefix

    def counted(request: Request) -> PrefixHit:
        nonlocal num_looked_up
        num_looked_up += 1
        return find_prefix(request)

    monkeypatch.setattr(core.scheduler.kv_cache, "find_prefix", counted)
    while not collector.ends:
        collector.take(core.step())
        num_steps += 1
    assert num_steps == 29
    assert num_looked_up == 3  # 19 blocks are missing, and four requests store one each in every fourth step
    finish(core, clock, collector)
    assert collector.tokens["long"] == expected_tokens(long, 2)


def test_what_ends_a_shortage() -> None:
    pool = make(Clock()).scheduler.kv_cache.pool
    request, other = (Request(make_request(f"r{i}", [1]), i, 0, 200, 0.0) for i in range(2))

    def lasts(asked: Request, reserve: int = 5, budget: int = 10) -> bool:
        return Shortage(request, 2, pool, 5, 10).lasts(asked, pool, reserve, budget)

    assert lasts(request)
    assert not lasts(other)
    assert not lasts(request, budget=9)  # it asks for less then
    assert [lasts(request, reserve) for reserve in (6, 4, 3)] == [True, True, False]
    shortage = Shortage(request, 2, pool, 5, 10)
    (block,) = pool.allocate(1)
    pool.cache(block, b"key")
    assert shortage.lasts(request, pool, 5, 10)  # one has become findable
    pool.release([block])
    assert not shortage.lasts(request, pool, 5, 10)  # and one free
    shortage = Shortage(request, 2, pool, 5, 10)
    assert [shortage.lasts(request, pool, 5, 10) for _ in range(32)] == [True] * 31 + [False]


def test_a_newcomer_leaves_a_block_for_each_running_request() -> None:
    clock = Clock()
    core = make(clock, FakeExecutor(num_blocks=5), max_model_len=16)
    collector = start(core, make_request("a", [1] * 8, 4), make_request("b", [2] * 8, 4))
    finish(core, clock, collector)  # 4 blocks: both prompts fit, but not their first tokens
    assert core.stats().num_preemptions == 0


def test_idle_time_does_not_count_in_the_drain_rate() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1, max_queued_tokens=100, max_num_batched_tokens=10)
    collector = start(core, make_request("first", [1] * 40, 1))
    finish(core, clock, collector)
    core.step()  # nothing to do: the loop rests
    clock.now += 1000.0
    start(core, make_request("second", [2] * 90, 1))
    core.step()
    start(core, make_request("third", [3] * 90, 1))
    with pytest.raises(OverloadedError) as caught:
        core.add_request(make_request("fourth", [4] * 20, 1))
    assert caught.value.retry_after_s == pytest.approx(9.0)  # 90 tokens at 10 a second, as measured before the rest


def test_a_full_queue_refuses_with_an_estimate() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1, max_queued_tokens=100, max_num_batched_tokens=10)
    collector = start(core, make_request("first", [1] * 60, 1))
    for _ in range(4):
        clock.now += 1.0
        collector.take(core.step())
    start(core, make_request("second", [2] * 90, 1))
    with pytest.raises(OverloadedError, match="90 tokens are waiting, at most 100") as caught:
        core.add_request(make_request("third", [3] * 20, 1))
    assert caught.value.retry_after_s == pytest.approx(9.0)  # 90 tokens at 10 a second
    assert core.stats().num_waiting == 1


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    clock = Clock()
    core = make(clock, max_queued_tokens=10)
    collector = start(core, make_request("r", [1] * 60, 1))
    assert finish(core, clock, collector) == ["r"]


# ---- gates ----------------------------------------------------------------------------------------------------------


class ToyGate:
    """A gate with a number of slots, and requests that it refuses for good."""

    def __init__(self, cause: WaitCause, slots: int, refuses: frozenset[str] = frozenset()) -> None:
        self.cause = cause
        self.version = 0
        self.slots = slots
        self.refuses = refuses
        self.holders: list[str] = []

    def enter(self, request: Request) -> bool:
        if request.request_id in self.refuses:
            raise InvalidRequestError("no such adapter", "model")
        if len(self.holders) >= self.slots:
            return False
        self.holders.append(request.request_id)
        return True

    def may_enter(self, request: Request) -> bool:
        return len(self.holders) < self.slots

    def leave(self, request: Request) -> None:
        self.holders.remove(request.request_id)
        self.version += 1

    def close(self) -> None:
        pass


def test_a_request_is_let_in_by_all_gates_or_by_none() -> None:
    clock = Clock()
    lora, encoder = ToyGate(WaitCause.LORA_SLOT, 3), ToyGate(WaitCause.ENCODER_BUDGET, 1)
    core = make(clock, gates=(lora, encoder))
    collector = start(core, *[make_request(f"r{i}", [i], 4) for i in range(3)])
    collector.take(core.step())
    # r1 and r2 passed the first gate, were refused by the second, and gave the first one's slot back.
    assert (lora.holders, encoder.holders) == (["r0"], ["r0"])
    assert core.scheduler.waiting.num_aside == 2
    assert finish(core, clock, collector) == ["r0", "r1", "r2"]
    assert (lora.holders, encoder.holders) == ([], [])
    assert report(collector, "r1").wait_s["ENCODER_BUDGET"] > 0
    for i in range(3):
        assert collector.tokens[f"r{i}"] == expected_tokens([i], 4)


def test_who_stands_aside_does_not_hold_up_the_others() -> None:
    clock = Clock()
    gate = ToyGate(WaitCause.REMOTE_KV, 0)
    core = make(clock, gates=(gate,))
    collector = start(core, make_request("blocked", [1], 2))
    core.step()
    gate.slots = 1  # but the gate has not said so: only a new version is asked
    core.step()
    assert core.scheduler.waiting.num_aside == 1
    gate.version += 1
    assert finish(core, clock, collector) == ["blocked"]


def test_a_gate_that_opens_while_it_is_asked_is_asked_again() -> None:
    """It refuses one request, changes its mind, and refuses another: the first must not be lost."""

    class Moody(ToyGate):
        def enter(self, request: Request) -> bool:
            if request.request_id == "first" and self.version == 0:
                self.version = 1
                return False
            return request.request_id == "first" and super().enter(request)

    clock = Clock()
    core = make(clock, gates=(Moody(WaitCause.REMOTE_KV, 1),))
    collector = start(core, make_request("first", [1], 2), make_request("second", [2], 2))
    for _ in range(5):
        clock.now += 1.0
        collector.take(core.step())
    assert set(collector.ends) == {"first"}
    assert core.scheduler.waiting.num_aside == 1


def test_a_gate_that_refuses_for_good_ends_the_request_alone() -> None:
    clock = Clock()
    first = ToyGate(WaitCause.ENCODER_BUDGET, 9)
    gate = ToyGate(WaitCause.LORA_SLOT, 9, refuses=frozenset({"bad"}))
    core = make(clock, gates=(first, gate))
    collector = start(core, make_request("bad", [1], 2), make_request("good", [2], 2))
    assert finish(core, clock, collector) == ["bad", "good"]
    assert (collector.ends["bad"].finish_reason, collector.ends["bad"].error) == ("error", "no such adapter")
    assert (first.holders, gate.holders) == ([], [])


def test_a_preempted_or_aborted_request_gives_its_gates_back() -> None:
    clock = Clock()
    gate = ToyGate(WaitCause.LORA_SLOT, 8)
    core = make(clock, FakeExecutor(num_blocks=14), max_model_len=40, gates=(gate,))
    collector = start(core, *[make_request(f"r{i}", [i] * 8, 30, seed=i) for i in range(3)])
    while not core.stats().num_preemptions:
        collector.take(core.step())
    running = {request.request_id for request in core.scheduler.running.requests if request is not None}
    assert set(gate.holders) == running
    collector.take(core.abort(["r0"]))
    assert "r0" not in gate.holders
    finish(core, clock, collector)
    assert gate.holders == []


def lark(source: str) -> GrammarSpec:
    return GrammarSpec(kind="lark", source=source)


class SlowCompiler:
    """Compiles when the test lets it."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, grammar: GrammarSpec) -> AnyText:
        assert self.may_go.wait(10)
        self.compiled.append(grammar.source)
        if grammar.source == "broken":
            raise InvalidRequestError("structured_outputs: not a grammar", "structured_outputs")
        if grammar.source == "crash":
            raise ValueError("a fault of the compiler")
        return AnyText()


class AnyText:
    """A grammar that allows everything."""

    def open(self, source: EngineRequest, num_left: int) -> Constraint:
        return Free()  # type: ignore[return-value]


class Free:
    is_complete = False
    allowed = np.full(2, -1, np.int32)

    def accept(self, token_id: int, num_left: int) -> bool:
        return True


def test_the_grammar_gate_compiles_off_the_hot_path() -> None:
    compiler = SlowCompiler()
    core: EngineCore | None = None
    gate = GrammarGate(compiler.compile, lambda: core.wake() if core else None)
    core = make_core(gates=(gate,))
    requests = [
        make_request("a", [1], 3, grammar=lark("g")),
        make_request("b", [2], 3, grammar=lark("g")),
        make_request("broken", [3], 3, grammar=lark("broken")),
        make_request("plain", [4], 3),
    ]
    collector = start(core, *requests)
    while "plain" not in collector.ends:
        collector.take(core.step())
    assert core.scheduler.waiting.num_aside == 3
    compiler.may_go.set()
    while core.has_work:
        collector.take(core.step())
    gate.close()
    assert compiler.compiled == ["g", "broken"]
    assert collector.ends["broken"].finish_reason == "error"
    assert collector.tokens["a"] == expected_tokens([1], 3)
    assert report(collector, "a").wait_s["GRAMMAR"] > 0


def test_a_compiler_that_crashes_ends_that_request_alone() -> None:
    compiler = SlowCompiler()
    compiler.may_go.set()
    woken = threading.Event()
    gate = GrammarGate(compiler.compile, woken.set)
    core = make_core(gates=(gate,))
    collector = start(core, make_request("crash", [1], 2, grammar=lark("crash")), make_request("plain", [2], 2))
    while core.has_work:
        collector.take(core.step())
    gate.close()
    assert collector.ends["crash"].error == "structured_outputs: it cannot be compiled (a fault of the compiler)."
    assert collector.tokens["plain"] == expected_tokens([2], 2)


def test_a_grammar_that_is_refused_keeps_nothing_of_its_requests() -> None:
    def refuse(spec: GrammarSpec) -> Constraint:
        raise InvalidRequestError(f"{spec.source}: cannot be compiled", "grammar")

    clock = Clock()
    gate = GrammarGate(refuse, lambda: None)  # type: ignore[arg-type]
    core = make(clock, gates=(gate,))
    for i in range(5):
        collector = start(core, make_request(f"r{i}", [1], 2, grammar=lark("bad")))
        while not collector.ends:
            collector.take(core.step())
        assert collector.ends[f"r{i}"].error == "bad: cannot be compiled"
    gate.close()
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is Request and each.source.grammar == lark("bad")] == []


def test_those_whose_grammar_is_compiled_are_asked_again_alone() -> None:
    asked: list[str] = []

    class Gate(GrammarGate):
        def enter(self, request: Request) -> bool:
            asked.append(request.request_id)
            return super().enter(request)

    may_go, ready = threading.Semaphore(0), threading.Semaphore(0)

    def compile_grammar(spec: GrammarSpec) -> AnyText:
        assert may_go.acquire(timeout=60)
        return AnyText()

    clock = Clock()
    gate = Gate(compile_grammar, ready.release)
    core = make(clock, gates=(gate,))
    collector = start(core, *[make_request(f"r{i}", [i], 1, grammar=lark(str(i))) for i in range(5)])
    core.step()
    assert asked == ["r0", "r1", "r2", "r3", "r4"]
    for i in range(5):
        asked.clear()
        may_go.release()
        assert ready.acquire(timeout=60)
        collector.take(core.step())
        assert asked == [f"r{i}"]
    assert finish(core, clock, collector) == ["r0", "r1", "r2", "r3", "r4"]
    gate.close()


def test_more_grammars_than_the_gate_keeps_are_each_compiled_once() -> None:
    compiler = SlowCompiler()
    gate = GrammarGate(compiler.compile, lambda: None, max_cached=2)
    core = make_core(gates=(gate,), max_num_seqs=8)
    collector = start(core, *[make_request(f"r{i}", [i], 2, grammar=lark(f"g{i}")) for i in range(8)])
    core.step()
    compiler.may_go.set()
    while core.has_work:
        collector.take(core.step())
    gate.close()
    assert len(collector.ends) == 8
    assert compiler.compiled == [f"g{i}" for i in range(8)]


# ---- ledgers --------------------------------------------------------------------------------------------------------


def test_the_ledger_names_rows_budget_and_blocks() -> None:
    clock = Clock()
    core = make(clock, FakeExecutor(num_blocks=10), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=36)
    collector = start(
        core,
        make_request("a", [1] * 20, 6),  # chunks of 8: short of budget for two steps
        make_request("b", [2] * 8, 6),
        make_request("c", [3], 1),  # waits for a row
    )
    finish(core, clock, collector)
    a, b, c = (report(collector, name) for name in "abc")
    # It waits a second for the first step; then come 8, 8 and 4 tokens, and the first two steps are too few.
    assert a.wait_s == {"TOKEN_BUDGET": 3.0}
    assert a.compute_s == 5.0  # from its last chunk on, until the step of its sixth token
    assert b.wait_s["TOKEN_BUDGET"] >= 2.0
    assert c.wait_s["MAX_NUM_SEQS"] > 0
    assert core.stats().num_waiting == 0


def test_the_ledger_names_preemptions_and_who_preempted() -> None:
    clock = Clock()
    core = make(clock, FakeExecutor(num_blocks=12), max_model_len=40)
    collector = start(core, *[make_request(f"r{i}", [i] * 8, 24, seed=i) for i in range(2)])
    finish(core, clock, collector)
    victim = report(collector, "r1")
    assert victim.num_preemptions >= 1
    assert set(victim.preempted_by) <= {"r0", "r1"}
    assert victim.wait_s["KV_BLOCKS"] > 0
    assert report(collector, "r0").num_preemptions == 0
    assert collector.tokens["r1"] == expected_tokens([1] * 8, 24, seed=1)


def test_the_ledger_names_the_recovery_and_the_tokens_computed_again() -> None:
    clock = Clock()
    executor = FakeExecutor(fail_steps=(3,))
    restart = executor.restart

    def slow_restart() -> None:
        clock.now += 7.0
        restart()

    executor.restart = slow_restart  # type: ignore[method-assign]
    core = make(clock, executor)
    collector = start(core, make_request("r", [1] * 5, 6))
    finish(core, clock, collector)
    told = report(collector, "r")
    assert told.wait_s["RECOVERY"] == pytest.approx(8.0)  # and one second until the next step
    assert told.num_recomputed_tokens == 8  # 5 of the prompt, 2 known, and the one of the failed step


def test_the_ledger_names_the_tenants_share() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    requests = [make_request(f"a{i}", [i] * 8, 4, tenant="a") for i in range(3)]
    requests.append(make_request("b0", [9] * 8, 4, tenant="b"))
    collector = start(core, *requests)
    finish(core, clock, collector)
    assert report(collector, "a1").wait_s["TENANT_SHARE"] > 0
    assert "TENANT_SHARE" not in report(collector, "b0").wait_s


def test_explain_tells_of_an_unfinished_request() -> None:
    clock = Clock()
    core = make(clock, max_num_seqs=1)
    start(core, make_request("a", [1], 30), make_request("b", [2], 30))
    core.step()
    clock.now += 2.0
    told = core.explain("b")
    assert told is not None
    assert told.wait_s == {"MAX_NUM_SEQS": 2.0}
    clock.now += 1.0
    told = core.explain("b")
    assert told is not None
    assert told.wait_s == {"MAX_NUM_SEQS": 3.0}
    assert core.explain("unknown") is None


@pytest.mark.parametrize("seed", range(20))
def test_ledgers_sum_to_the_wall_time_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    gate = ToyGate(WaitCause.LORA_SLOT, 2)
    executor = FakeExecutor(num_blocks=16, fail_steps=tuple(rng.sample(range(60), 2)))
    core = make(clock, executor, max_model_len=40, gates=(gate,), max_num_seqs=3, max_num_batched_tokens=6)
    collector = Collector()
    for i in range(12):
        request = make_request(
            f"r{i}",
            [i] * rng.randint(1, 12),
            rng.randint(1, 20),
            tenant=rng.choice("ab"),
            deadline_ms=rng.choice([None, 9000]),
        )
        collector.start(request)
        core.add_request(request)
        clock.now += rng.random()
        collector.take(core.step())
        if rng.random() < 0.1:
            collector.take(core.abort([f"r{rng.randint(0, i)}"]))
    finish(core, clock, collector, step_s=0.3)
    assert len(collector.ends) == 12
    for request_id in collector.ends:
        report(collector, request_id)


def test_a_tenant_that_fills_the_queue_fills_its_own_share_only() -> None:
    """Six places and weights 2 : 1: whoever has its share waits for room, and nobody is turned away for another."""
    core = make(Clock(), max_num_seqs=1, max_queued_requests=6)

    def ask(i: int, tenant: str, weight: float) -> None:
        core.add_request(make_request(f"{tenant}{i}", [1], tenant=tenant, tenant_weight=weight))

    for i in range(6):
        ask(i, "a", 2.0)
    with pytest.raises(OverloadedError, match="6 requests are waiting, at most 6") as alone:
        ask(6, "a", 2.0)
    assert not isinstance(alone.value, TenantShareError)  # nobody else is there: it is the service that is full
    for i in range(2):
        ask(i, "b", 1.0)
    with pytest.raises(TenantShareError, match=r"2 of the 8 requests in it are this tenant's, whose share is 2\."):
        ask(2, "b", 1.0)
    with pytest.raises(TenantShareError, match=r"6 of the 8 .* whose share is 4\."):
        ask(6, "a", 2.0)
    assert core.stats().num_waiting == 8
