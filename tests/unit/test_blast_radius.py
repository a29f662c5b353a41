"""What one request brings, however odd, must not end the engine for the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_helpers import make_core, make_request
from fake_executor import FakeExecutor

from quire.engine.errors import InvalidRequestError
from quire.engine.grammar.gate import GrammarGate
from quire.engine.grammar.spec import GrammarSpec
from quire.engine.outputs import EngineOutput


def test_a_suspect_waits_for_a_row() -> None:
    """Its turn comes while others hold every row: blocks are free, for a window moved on, and no row is.

    A and B fail together twice. A is tried alone first; B does not fit beside it, C takes the last row.
    """
    executor = FakeExecutor(windows=(8, None), num_blocks=32, fail_steps=(0, 1))
    core = make_core(executor, max_model_len=56, policy="priority", max_num_seqs=2)
    core.add_request(make_request("A", [i % 50 for i in range(40)], max_tokens=10, priority=1))
    core.add_request(make_request("B", [(i * 7 + 3) % 50 for i in range(20)], max_tokens=10, priority=1))
    ends: dict[str, EngineOutput] = {}
    for step in range(60):
        for output in core.step():
            if output.finish_reason is not None:
                ends[output.request_id] = output
        if step == 2:
            core.add_request(make_request("C", [1, 2, 3], max_tokens=10, priority=0))
        if not core.has_work:
            break
    assert {name: end.finish_reason for name, end in ends.items()} == dict.fromkeys("ABC", "length")
    assert core.stats().num_used_blocks == 0


class Opening:
    """A compiled grammar of which no matcher can be opened."""

    def compile(self, spec: GrammarSpec) -> Opening:
        return self

    def open(self, source: object, num_left: int) -> Any:
        raise RuntimeError("the matcher blew up")


@pytest.mark.parametrize("resumed", [[], [1]])
def test_a_grammar_that_cannot_be_opened_ends_its_request(resumed: list[int]) -> None:
    core = make_core(gates=(GrammarGate(Opening().compile, lambda: None),))
    core.add_request(make_request("good", [1, 2, 3]))
    core.add_request(
        make_request("bad", [1, 2, 3], grammar=GrammarSpec(kind="lark", source="x"), resume_token_ids=resumed)
    )
    ends: dict[str, EngineOutput] = {}
    deadline = time.monotonic() + 20
    while core.has_work:
        assert time.monotonic() < deadline
        ends |= {output.request_id: output for output in core.step() if output.finish_reason is not None}
    assert ends["good"].finish_reason == "length"
    assert ends["bad"].finish_reason == "error"
    assert "the matcher blew up" in str(ends["bad"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_token_ids": [2**40]}, "prompt"),
        ({"prompt_token_ids": [1, -1]}, "prompt"),
        ({"resume_token_ids": [2**31]}, "resume_token_ids"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"deadline_ms": 10**400}, "deadline_ms"),
    ],
)
def test_what_could_not_be_worked_on_is_refused(fields: dict[str, Any], param: str) -> None:
    core = make_core()
    prompt = fields.pop("prompt_token_ids", [1, 2, 3])
    with pytest.raises(InvalidRequestError) as refused:
        core.add_request(make_request("x", prompt, **fields))
    assert refused.value.param == param
    assert not core.has_work


def test_far_deadlines_do_not_keep_what_is_finished() -> None:
    core = make_core()
    core.add_request(make_request("slow", [1, 2, 3], max_tokens=190, deadline_ms=60_000))
    for index in range(180):
        core.add_request(make_request(f"f{index}", [1] * 50, max_tokens=1, deadline_ms=120_000))
        core.step()
    assert len(core.scheduler.requests) <= 2
    assert len(core.scheduler._deadlines) <= 2 * 2 + 64 + 1
