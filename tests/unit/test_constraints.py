"""Grammars beside all else that happens to a request: failures, preemption, resuming, other fields, neighbours."""

from __future__ import annotations

import json
import threading
from typing import Any

import jsonschema
import pytest
from engine_helpers import Collector
from grammar_helpers import (
    BabblingExecutor,
    constrained,
    make_grammar_core,
    model,
    run_all,
    schema_spec,
    shared_compiler,
    text_of,
)
from json_schemas import SCHEMAS

from quire.engine.errors import InvalidRequestError
from quire.engine.grammar import GrammarSpec
from quire.engine.grammar.constraint import Constraint
from quire.engine.grammar.gate import CompiledGrammar
from quire.engine.grammar.request_fields import StructuredOutputsParams
from quire.engine.input_processor import InputProcessor
from quire.engine.outputs import EngineRequest
from quire.engine.sampling_params import SamplingParams

NAMES = ["person", "tree", "array_of_objects", "enum", "pattern", "nullable"]
COUNTS = (30, 40, 60, 90)


def requests() -> list[EngineRequest]:
    """Some that end by themselves, some that are steered; neighbours without a grammar among them."""
    held = [
        constrained(f"{name}-{count}-{choice}", schema_spec(SCHEMAS[name]), count, seed=7, choice_index=choice)
        for name in NAMES
        for count in COUNTS
        for choice in range(2)
    ]
    plain = [constrained(f"plain-{i}", schema_spec({}), 30, seed=i) for i in range(3)]
    return [*held, *(EngineRequest(**{**as_fields(one), "grammar": None}) for one in plain)]


def as_fields(request: EngineRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request says when nothing disturbs it."""
    collector = run_all(make_grammar_core(BabblingExecutor(), max_num_seqs=1), requests())
    for request in requests():
        if request.grammar is not None:
            schema = json.loads(request.grammar.source)
            jsonschema.validate(json.loads(text_of(collector, request.request_id)), schema)
    return collector.tokens


def test_a_batch_says_the_same(alone: dict[str, list[int]]) -> None:
    assert run_all(make_grammar_core(BabblingExecutor(), max_num_seqs=64), requests()).tokens == alone


@pytest.mark.parametrize("inflight", [2, 3])
def test_steps_in_flight_say_the_same(alone: dict[str, list[int]], inflight: int) -> None:
    executor = BabblingExecutor(inflight=inflight)
    assert run_all(make_grammar_core(executor), requests()).tokens == alone
    assert executor.num_masked > 500


def test_chunked_prompts_say_the_same(alone: dict[str, list[int]]) -> None:
    core = make_grammar_core(BabblingExecutor(), max_num_batched_tokens=7, long_prefill_token_threshold=2)
    assert run_all(core, requests()).tokens == alone


def test_preempted_requests_say_the_same(alone: dict[str, list[int]]) -> None:
    core = make_grammar_core(BabblingExecutor(num_blocks=14), max_model_len=150)
    assert run_all(core, requests(), max_steps=50_000).tokens == alone
    assert core.stats().num_preemptions > 3


def test_a_failed_executor_says_the_same(alone: dict[str, list[int]]) -> None:
    executor = BabblingExecutor(fail_steps=(5, 19, 40, 41))
    assert run_all(make_grammar_core(executor), requests()).tokens == alone
    assert executor.num_restarts == 4


def test_another_engine_goes_on_with_the_same(alone: dict[str, list[int]]) -> None:
    """Resumed after any number of tokens, the last of them included, where only the end is missing."""
    for request in requests()[:48:9]:
        if request.grammar is None:
            continue
        said = alone[request.request_id]
        parts = [
            EngineRequest(**{**as_fields(request), "request_id": f"after-{n}", "resume_token_ids": said[:n]})
            for n in range(len(said) + 1)
        ]
        collector = run_all(make_grammar_core(BabblingExecutor()), parts)
        assert all(collector.tokens[part.request_id] == said for part in parts)
        assert {collector.ends[part.request_id].error for part in parts} == {None}


@pytest.fixture
def short() -> GrammarSpec:
    return GrammarSpec(kind="regex", source="[ab]{1,3}")


def ids(text: str) -> list[int]:
    token_ids: list[int] = model()[1].encode(text, add_special_tokens=False)
    return token_ids


def ended(request: EngineRequest) -> tuple[str, Any]:
    collector = run_all(make_grammar_core(BabblingExecutor()), [request])
    return text_of(collector, request.request_id), collector.ends[request.request_id]


@pytest.mark.parametrize("seed", range(6))
def test_ignore_eos_and_min_tokens_go_on_as_long_as_the_grammar_does(short: GrammarSpec, seed: int) -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 10}):
        text, end = ended(constrained("r", short, 20, seed=seed, **fields))
        assert (len(text), end.finish_reason, end.error) == (3, "stop", None)


def test_the_end_comes_at_once_when_nothing_else_is_allowed() -> None:
    """Without a token for it, so that one token is enough for an answer of one token."""
    text, end = ended(constrained("r", GrammarSpec(kind="choice", source='["yes"]'), 1))
    assert (text, end.finish_reason, end.first_index) == ("yes", "stop", 0)


def test_a_stop_token_ends_also_in_the_middle(short: GrammarSpec) -> None:
    spec = GrammarSpec(kind="choice", source='["a{b}"]')
    collector = run_all(
        make_grammar_core(), [constrained("r", spec, 20, stop_token_ids=tuple({*ids("{"), *ids("a{"), *ids("{b")}))]
    )
    assert collector.ends["r"].finish_reason == "stop"
    assert text_of(collector, "r") != "a{b}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (5000,)}, "allowed_token_ids"),
        ({"bad_words": ("yes",)}, "bad_words"),
        ({"bad_words": ("yes",), "bad_words_token_ids": ((5,),)}, "bad_words"),
        ({"min_tokens": 5, "stop_token_ids": (17, 18)}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_fields_that_could_leave_no_token_are_refused(fields: dict[str, Any], param: str) -> None:
    spec = GrammarSpec(kind="choice", source='["yes"]')
    core = make_grammar_core()
    with pytest.raises(InvalidRequestError, match=f"^{param}: ") as caught:
        core.add_request(constrained("r", spec, **fields))
    assert caught.value.param == param
    collector = run_all(core, [constrained("other", spec, 20)])
    assert text_of(collector, "other") == "yes"
    held = SamplingParams(**fields, structured_outputs=StructuredOutputsParams(choice=("yes",)))
    info, tokenizer = model()
    with pytest.raises(InvalidRequestError, match=f"^{param}: "):
        InputProcessor(info, tokenizer).process("r", "hi", held)


def test_a_bias_against_all_that_the_grammar_allows_ends_nothing() -> None:
    spec = GrammarSpec(kind="choice", source='["yes"]')
    bias = dict.fromkeys({*ids("yes"), *ids("y"), *ids("ye")}, -100.0)
    assert text_of(run_all(make_grammar_core(), [constrained("r", spec, 9, logit_bias=bias)]), "r") == "yes"


def test_a_matcher_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Constraint.accept

    def fail(self: Constraint, token_id: int, num_left: int) -> bool:
        if num_left == 16:
            raise ValueError("a fault of the matcher")
        return accept(self, token_id, num_left)

    monkeypatch.setattr(Constraint, "accept", fail)
    spec = schema_spec(SCHEMAS["person"])
    core = make_grammar_core(max_num_seqs=4)
    broken = [constrained(f"broken-{i}", spec, 20, seed=i) for i in range(3)]
    good = [constrained(f"good-{i}", spec, 15, seed=i) for i in range(3)]
    collector = run_all(core, [*broken, *good])
    for request in broken:
        assert collector.ends[request.request_id].error == "The grammar failed (a fault of the matcher)."
    for request in good:
        jsonschema.validate(json.loads(text_of(collector, request.request_id)), SCHEMAS["person"])
    assert core.stats().num_used_blocks == 0


def test_a_token_outside_of_the_mask_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As broken logits would give it."""
    monkeypatch.setattr(BabblingExecutor, "_draw", lambda self, index, row: 7)
    collector = run_all(make_grammar_core(), [constrained("r", schema_spec(SCHEMAS["person"]), 20)])
    assert collector.ends["r"].error == "The model said token 7, which the grammar does not allow here."


def test_no_special_token_is_allowed_inside_of_a_text() -> None:
    info, tokenizer = model()
    special = set(tokenizer.all_special_ids) | set(range(17))
    collector = Collector()
    core = make_grammar_core(BabblingExecutor(sorted(special)))
    held = [constrained(f"r{i}", schema_spec(SCHEMAS["person"]), 60, seed=i) for i in range(20)]
    collector = run_all(core, held)
    for request in held:
        assert not special & set(collector.tokens[request.request_id][:-1])
    assert info.eos_token_ids[0] in special


def test_waiting_for_the_compiler_is_billed_to_the_grammar() -> None:
    refused = threading.Event()

    def compile_after_refusal(spec: GrammarSpec) -> CompiledGrammar:
        assert refused.wait(60)
        return shared_compiler().compile(spec)

    core, collector = make_grammar_core(compile_grammar=compile_after_refusal), Collector()
    first = constrained("r", schema_spec(SCHEMAS["invoice"]), 90)
    collector.start(first)
    core.add_request(first)
    assert core.step() == []
    assert core.scheduler.waiting.num_aside == 1
    refused.set()
    for _ in range(1000):
        collector.take(core.step())
        if not core.has_work:
            break
    report = collector.ends["r"].report
    assert report is not None
    assert set(report.wait_s) <= {"GRAMMAR", "TOKEN_BUDGET"}
    assert report.wait_s["GRAMMAR"] > 0


def test_offline_parameters() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})  # type: ignore[arg-type]
    assert params.structured_outputs is not None
    assert params.structured_outputs.spec().source == '["a", "b"]'
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.choices: is not a known field"):
        SamplingParams(structured_outputs={"choices": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="must hold exactly one"):
        SamplingParams(structured_outputs={"regex": "a", "json_object": True})  # type: ignore[arg-type]


def test_masks_agree_with_the_tokenizer() -> None:
    """What a token stands for is what the tokenizer decodes it to."""
    shared_compiler().compile(GrammarSpec(kind="json_object"))
    vocabulary = shared_compiler()._vocabulary
    assert vocabulary is not None
    tokenizer = model()[1]
    for token_id in range(17, 49152, 97):
        text = bytes(vocabulary.symbols_of(token_id)).decode(errors="replace")
        assert text == tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    for text in ('{"a": [1, 22, "é🎉"]}', "year 2024 and 1,234"):
        symbols = list(text.encode())
        costs = vocabulary.costs(symbols)
        tokens, position = [], 0
        while position < len(symbols):
            tokens.append(vocabulary.first_token(symbols, position, costs))
            position += len(vocabulary.symbols_of(tokens[-1]))
        assert len(tokens) == costs[0] <= len(ids(text))
        assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
