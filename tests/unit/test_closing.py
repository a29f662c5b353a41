"""JSON that always closes: whatever the model says and however few tokens it has, the answer parses and validates."""

from __future__ import annotations

import json
import re
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

from quire.engine.grammar import GrammarSpec
from quire.engine.outputs import EngineRequest


def shortest(spec: GrammarSpec) -> int:
    return shared_compiler().compile(spec).shortest.num_tokens


def punctuation() -> list[int]:
    """Tokens that open, close and separate: a model that likes them goes deep instead of writing one long string."""
    encode = model()[1].encode
    texts = ['"', '":', '":"', '","', '"}', "}", "]", ",", ":", "{", "[", '{"', "0", "1", "a", "\\", "-", "e", "."]
    return sorted({token for text in texts for token in encode(text, add_special_tokens=False)})


def check_json(collector: Collector, request: EngineRequest, schema: Any) -> None:
    end = collector.ends[request.request_id]
    text = text_of(collector, request.request_id)
    assert end.error is None, end.error
    assert len(collector.tokens[request.request_id]) <= (request.sampling_params.max_tokens or 0)
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except ValueError as error:
        raise AssertionError(f"max_tokens {request.sampling_params.max_tokens}: {text!r}") from error


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_parses_and_validates(name: str) -> None:
    schema = SCHEMAS[name]
    spec = schema_spec(schema)
    least = shortest(spec)
    counts = sorted({*range(least, least + 21), *(n for n in (16, 24, 40, 100) if n >= least)})
    requests = [
        constrained(f"{kind}-{count}", spec, count, seed=count) for count in counts for kind in ("flat", "punctuation")
    ]
    for executor, kind in ((BabblingExecutor(), "flat"), (BabblingExecutor(punctuation()), "punctuation")):
        mine = [request for request in requests if request.request_id.startswith(kind)]
        collector = run_all(make_grammar_core(executor), mine)
        for request in mine:
            check_json(collector, request, schema)


def test_a_schema_is_used_to_its_last_token() -> None:
    """Steering is late: a model that never closes a string by itself gets all its tokens."""
    backend = model()[1].backend_tokenizer
    letters = [i for i in range(300, 2000) if backend.id_to_token(i).isalpha()]
    spec = schema_spec(SCHEMAS["person"])
    requests = [constrained(f"r{i}", spec, 60, seed=i) for i in range(8)]
    collector = run_all(make_grammar_core(BabblingExecutor(letters)), requests)
    for request in requests:
        check_json(collector, request, SCHEMAS["person"])
    assert max(len(collector.tokens[request.request_id]) for request in requests) == 60


OTHERS: dict[str, tuple[GrammarSpec, str]] = {
    "regex": (GrammarSpec(kind="regex", source=r"[a-z]+@[a-z]+\.(com|info)"), r"[a-z]+@[a-z]+\.(com|info)"),
    "late_end": (GrammarSpec(kind="regex", source=r"(.|\n)*THE END"), r"(.|\n)*THE END"),
    "counted": (GrammarSpec(kind="regex", source=r"(long alternative|x)-[0-9]{12}"), r"(long alternative|x)-[0-9]{12}"),
    "choice": (GrammarSpec(kind="choice", source='["yes", "no", "perhaps not"]'), "yes|no|perhaps not"),
    "nesting": (
        GrammarSpec(kind="lark", source='start: e\ne: "(" e ")" | "[" e "," e "]" | NUM\nNUM: /[0-9]{2,5}/'),
        r"[()\[\],0-9]+",
    ),
    "gbnf": (GrammarSpec(kind="ebnf", source='root ::= item+\nitem ::= "- " [a-z]+ "\\n"'), r"(- [a-z]+\n)+"),
    "tool": (
        GrammarSpec(
            kind="lark",
            source='start: "<tool_call>" body "</tool_call>"\n'
            'body: %json {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}',
        ),
        r"<tool_call>\s*\{(.|\n)*\}\s*</tool_call>",
    ),
    "special": (
        GrammarSpec(kind="lark", source="start: <|im_start|> TEXT\nTEXT: /[a-z ]{3,}\\./"),
        r"<\|im_start\|>[a-z ]{3,}\.",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_answer_matches(name: str) -> None:
    spec, pattern = OTHERS[name]
    least = shortest(spec)
    requests = [constrained(f"r{n}-{seed}", spec, least + n, seed=seed) for n in range(16) for seed in range(2)]
    collector = run_all(make_grammar_core(), requests)
    for request in requests:
        text = text_of(collector, request.request_id)
        assert collector.ends[request.request_id].error is None
        assert re.fullmatch(pattern, text), (request.sampling_params.max_tokens, text)


@pytest.mark.parametrize("name", ["person", "long_string", "array_of_objects", "tree", "enum"])
def test_one_token_less_than_the_shortest_is_refused_with_the_number(name: str) -> None:
    spec = schema_spec(SCHEMAS[name])
    least = shortest(spec)
    collector = run_all(make_grammar_core(), [constrained("r", spec, least - 1), constrained("good", spec, least)])
    end = collector.ends["r"]
    assert end.finish_reason == "error"
    assert end.refusal is not None
    assert end.refusal.param == "max_tokens"
    assert end.error is not None
    assert end.error.endswith(f"needs {least}.")
    check_json(collector, constrained("good", spec, least), SCHEMAS[name])


@pytest.mark.parametrize(
    ("name", "most"),
    [("person", 8), ("any_object", 1), ("tree", 13), ("nullable", 12), ("union", 1), ("enum", 16), ("long_string", 11)],
)
def test_the_shortest_answer_is_short(name: str, most: int) -> None:
    """Counted by hand, in tokens of the default model."""
    assert shortest(schema_spec(SCHEMAS[name])) <= most


def test_the_context_is_a_limit_like_max_tokens() -> None:
    spec = schema_spec(SCHEMAS["person"])
    requests = [constrained(f"r{i}", spec, 500, seed=i, prompt=[5] * (100 - shortest(spec) - i)) for i in range(10)]
    core = make_grammar_core(BabblingExecutor(), max_model_len=100)
    collector = run_all(core, requests)
    for request in requests:
        check_json(collector, request, SCHEMAS["person"])
