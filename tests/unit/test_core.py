"""The engine core on a model of hashes: whatever the engine does, the tokens are those of the plain run."""

from __future__ import annotations

import itertools
import random

import pytest
from engine_helpers import Collector, make_core, make_request, run
from fake_executor import FakeExecutor, expected_tokens

from quire.engine.errors import ConfigError, InvalidRequestError, OverloadedError


def prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(50) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def check(collector: Collector, requests: list) -> None:
    for request in requests:
        expected = expected_tokens(
            request.prompt_token_ids, request.sampling_params.max_tokens, request.seed, request.choice_index
        )
        assert collector.tokens[request.request_id] == expected, request.request_id
        assert collector.ends[request.request_id].finish_reason == "length"


FEATURES = {
    "chunked": {"max_num_batched_tokens": 5},
    "long_prefill": {"long_prefill_token_threshold": 3},
    "depth2": {"max_inflight_steps": 2},
    "pipeline": {"num_stages": 2},
    "few_rows": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 22},
    "window": {"windows": (None, 6)},
    "all_windows": {"windows": (5, 9)},
    "failures": {"fail_steps": (3, 15)},
    "shared_prefix": {"prefix": 17},
    "no_cache": {"caching": False},
    "aborts": {"aborts": (0, 2, 5, 9)},
}


@pytest.mark.parametrize(
    "pair", [(name,) for name in FEATURES] + list(itertools.combinations(FEATURES, 2)), ids="+".join
)
def test_features_in_pairs_leave_the_tokens_alone(pair: tuple[str, ...]) -> None:
    options: dict = {}
    for name in pair:
        options.update(FEATURES[name])
    prefix = [7] * options.pop("prefix", 0)
    aborts = options.pop("aborts", ())
    model = {
        name: options.pop(name) for name in ("windows", "num_blocks", "fail_steps", "num_stages") if name in options
    }
    if "windows" in model and "num_blocks" in model:
        model["num_blocks"] = 24 if None in model["windows"] else 16
        options["max_num_batched_tokens"] = 16
    executor = FakeExecutor(**{"num_blocks": 200, **model})
    core = make_core(executor, max_model_len=80, **options)
    requests = [make_request(f"r{i}", prefix + prompt, 20, seed=i) for i, prompt in enumerate(prompts(8))]
    leaving = {step: make_request(f"leaves{step}", prefix + [step] * 9, 20) for step in aborts}
    collector = run(
        core, [*leaving.values(), *requests], abort_at={step: [r.request_id] for step, r in leaving.items()}
    )
    check(collector, requests)
    assert {collector.ends[request.request_id].finish_reason for request in leaving.values()} <= {"abort"}
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    if "preempted" in pair and not {"few_rows", "failures", "all_windows"} & set(pair):
        assert stats.num_preemptions > 0
    if "failures" in pair:
        assert executor.num_restarts >= 2


def test_prefix_hit_is_counted_and_recomputes_the_last_token() -> None:
    core = make_core()
    prompt = list(range(12))
    run(core, [make_request("a", prompt, 1)])
    collector = run(core, [make_request("b", prompt, 3)])
    # 12 tokens are 3 full blocks of 4; the last token must be computed, so only 2 blocks can be used.
    assert collector.ends["b"].num_cached_tokens == 8
    assert collector.tokens["b"] == expected_tokens(prompt, 3)
    assert core.stats().prefix_cache_hits == 8
    assert core.stats().prefix_cache_queries == 24


def test_cache_salt_separates() -> None:
    core = make_core()
    prompt = list(range(12))
    run(core, [make_request("a", prompt, 1, cache_salt="x")])
    collector = run(core, [make_request("b", prompt, 1), make_request("c", prompt, 1, cache_salt="x")])
    assert collector.ends["b"].num_cached_tokens == 0
    assert collector.ends["c"].num_cached_tokens == 8


def test_choices_admitted_together_share_their_prompt_blocks() -> None:
    core = make_core()
    prompt = list(range(12))
    requests = [make_request(f"r{i}", prompt, 2, choice_index=i) for i in range(4)]
    for request in requests:
        core.add_request(request)
    core.step()
    tables = [core.scheduler.kv_cache.tables(row)[0] for row in range(4)]
    assert tables == [[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6]]


def test_resume_gives_the_same_tokens() -> None:
    prompt = prompts(1)[0]
    expected = expected_tokens(prompt, 20, seed=5)
    for known in range(20):
        request = make_request("r", prompt, 20, seed=5, resume_token_ids=expected[:known])
        collector = run(make_core(), [request])
        assert collector.tokens["r"] == expected


def test_resume_of_a_request_that_had_ended() -> None:
    expected = expected_tokens([1, 2], 3)
    collector = run(make_core(), [make_request("r", [1, 2], 3, resume_token_ids=expected)])
    end = collector.ends["r"]
    assert (end.first_index, end.new_token_ids, end.finish_reason) == (3, [], "length")


def test_stop_token_ends_with_its_id_and_eos_without() -> None:
    expected = expected_tokens([1, 2, 3], 10)
    third = expected[2]
    assert third not in expected[:2]
    end = run(make_core(), [make_request("r", [1, 2, 3], 10, stop_token_ids=(third,))]).ends["r"]
    assert (end.finish_reason, end.stop_reason, end.first_index) == ("stop", third, 2)
    end = run(make_core(), [make_request("r", [1, 2, 3], 10, eos_token_ids=(third,))]).ends["r"]
    assert (end.finish_reason, end.stop_reason, end.first_index) == ("stop", None, 2)
    collector = run(make_core(), [make_request("r", [1, 2, 3], 10, eos_token_ids=(third,), ignore_eos=True)])
    assert collector.tokens["r"] == expected
    late = run(make_core(), [make_request("r", [1, 2, 3], 10, eos_token_ids=(third,), min_tokens=3)])
    assert len(late.tokens["r"]) > 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_early_stop_with_steps_in_flight_discards_the_extra_token(depth: int) -> None:
    expected = expected_tokens([1, 2, 3], 10)
    core = make_core(max_inflight_steps=depth)
    collector = run(core, [make_request("r", [1, 2, 3], 10, stop_token_ids=(expected[4],))])
    assert collector.tokens["r"] == expected[: expected.index(expected[4]) + 1]
    assert core.stats().num_used_blocks == 0


def test_nothing_is_planned_beside_a_step_that_waits_to_be_asked_for() -> None:
    """So the next one is planned with those who have come by then."""

    class Waiting(FakeExecutor):
        def takes_next_step(self) -> bool:
            return False

    executor = Waiting(num_blocks=200)
    core = make_core(executor, max_model_len=80, max_inflight_steps=2)
    collector, requests = Collector(), [make_request(f"r{i}", [1 + i, 2, 3], 5) for i in range(3)]
    for num_steps, request in enumerate(requests, 1):
        collector.start(request)
        core.add_request(request)
        collector.take(core.step())
        assert len(executor.steps) == num_steps
        assert len(executor.steps[-1].rows) == num_steps, "whoever has come is in it"
    while core.has_work:
        collector.take(core.step())
    check(collector, requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_every_state_frees_everything(depth: int) -> None:
    for steps in range(12):
        core = make_core(FakeExecutor(num_blocks=12), max_model_len=40, max_inflight_steps=depth, max_num_seqs=2)
        requests = [make_request(f"r{i}", prompt, 12, seed=i) for i, prompt in enumerate(prompts(4, longest=12))]
        collector = Collector()
        for request in requests:
            collector.start(request)
            core.add_request(request)
        for _ in range(steps):
            collector.take(core.step())
        ended = set(collector.ends)
        collector.take(core.abort([request.request_id for request in requests]))
        core.scheduler.kv_cache.check_integrity()
        while core.has_work:
            collector.take(core.step())
        assert set(collector.ends) == {"r0", "r1", "r2", "r3"}
        assert {name for name, end in collector.ends.items() if end.finish_reason == "abort"} == set(
            collector.ends
        ) - ended
        assert core.stats().num_used_blocks == 0
        assert core.abort(["r0", "unknown"]) == []


def test_each_request_gets_the_logprobs_that_it_asked_for() -> None:
    core = make_core()
    counts: list[int | None] = [1, 7, None, 0]
    requests = [make_request(f"r{i}", [i], 3, logprobs=count) for i, count in enumerate(counts)]
    last = run(core, requests).last
    for i, count in enumerate(counts):
        logprobs = last[f"r{i}"].logprobs
        if count is None:
            assert logprobs is None
        else:
            assert logprobs is not None
            assert logprobs[0].token_id == last[f"r{i}"].new_token_ids[0]
            assert logprobs[0].top == [(token_id, -1.0 - token_id) for token_id in range(count)]


def test_prompt_logprobs_of_a_row_that_was_given_up_come_from_the_next() -> None:
    """A prompt gives way while its step is under way, and is computed again before that step is back."""
    executor, prompt = FakeExecutor(num_blocks=8), list(range(11))
    core = make_core(executor, max_model_len=24, caching=False)
    scheduler, collector, under_way = core.scheduler, Collector(), []
    for request in (make_request("a", [1, 2, 3, 4], 20), make_request("b", prompt, 3, prompt_logprobs=0)):
        collector.start(request)
        core.add_request(request)

    def schedule() -> None:
        step = scheduler.schedule(0.0)
        assert step is not None
        under_way.append((step, executor.execute(step.output)))

    schedule()
    while scheduler.requests["b"].row >= 0:
        schedule()
    ended = scheduler.abort("a", 0.0)
    assert ended is not None
    collector.take([ended])
    schedule()
    assert scheduler.requests["b"].row >= 0
    for step, pending in under_way:
        collector.take(scheduler.update(step, pending.result(), 0.0))
    while core.has_work:
        collector.take(core.step())
    assert collector.tokens["b"] == expected_tokens(prompt, 3)
    assert collector.prompt_logprobs["b"].token_ids[:, 0].tolist() == prompt[1:]


def test_the_context_length_ends_a_request() -> None:
    collector = run(make_core(max_model_len=10), [make_request("r", [1, 2, 3], 100)])
    assert len(collector.tokens["r"]) == 7
    assert collector.ends["r"].finish_reason == "length"


def test_refused_requests_leave_nothing_behind() -> None:
    core = make_core(max_model_len=10, max_queued_requests=1)
    for prompt, field in (([], "prompt"), (list(range(10)), "prompt")):
        with pytest.raises(InvalidRequestError) as caught:
            core.add_request(make_request("r", prompt))
        assert caught.value.param == field
    core.add_request(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        core.add_request(make_request("a", [1]))
    with pytest.raises(OverloadedError):
        core.add_request(make_request("b", [1]))
    assert core.stats().num_waiting == 1


def test_a_request_that_fails_every_time_ends_with_an_error() -> None:
    core = make_core(FakeExecutor(fail_steps=(0, 1, 2)))
    end = run(core, [make_request("r", [1, 2, 3])]).ends["r"]
    assert end.finish_reason == "error"
    assert "3 times" in (end.error or "")
    assert run(core, [make_request("s", [1, 2, 3], 4)]).tokens["s"] == expected_tokens([1, 2, 3], 4)


@pytest.mark.parametrize(("depth", "num_stages"), [(1, 1), (2, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("poison_from", [0, 9])
@pytest.mark.parametrize("num_blocks", [200, 14])
def test_a_poisonous_request_ends_alone(depth: int, num_stages: int, poison_from: int, num_blocks: int) -> None:
    poison = frozenset({"r2", "r5"})
    executor = FakeExecutor(poison=poison, poison_from=poison_from, num_blocks=num_blocks, num_stages=num_stages)
    core = make_core(executor, max_model_len=40, max_inflight_steps=depth)
    requests = [make_request(f"r{i}", [i] * 5, 12, seed=i) for i in range(8)]
    collector = run(core, requests)
    assert {name for name, end in collector.ends.items() if end.finish_reason == "error"} == poison
    check(collector, [request for request in requests if request.request_id not in poison])
    assert core.stats().num_used_blocks == 0


def test_a_streak_of_failures_ends_nobody_who_makes_progress() -> None:
    """The machine fails at every third step: each request has new tokens in between."""
    core = make_core(FakeExecutor(fail_steps=tuple(range(0, 90, 3))))
    requests = [make_request(f"r{i}", [i] * 5, 12, seed=i) for i in range(4)]
    check(run(core, requests), requests)


def test_a_cache_that_is_too_small() -> None:
    core = make_core(FakeExecutor(num_blocks=6), max_model_len=200)
    assert core.max_model_len == 20  # 5 blocks of 4 beside the null block
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        make_core(FakeExecutor(num_blocks=1))


def test_priority_policy_serves_the_lower_number_first() -> None:
    core = make_core(max_num_seqs=1, policy="priority")
    requests = [make_request("late", [1], 2, priority=5), make_request("first", [2], 2, priority=-1)]
    collector = run(core, requests)
    assert list(collector.ends) == ["first", "late"]


def test_steady_decode_sends_no_more_than_the_arrays() -> None:
    executor = FakeExecutor(block_size=16)
    core = make_core(executor)
    run(core, [make_request(f"r{i}", [i] * 3, 12) for i in range(4)])
    steady = executor.steps[2:11]
    assert all(not step.new_rows and not step.block_updates and not step.released_rows for step in steady)
    assert [step.num_scheduled_tokens.tolist() for step in steady] == [[1, 1, 1, 1]] * 9
    assert [step.num_computed_tokens[0] for step in steady] == list(range(4, 13))
